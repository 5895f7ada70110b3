// The verdict that the ranks of a job with gated rounds get on a round: its norm, and whether it
// was skipped. It travels in three immediates of the kind kControl without payload, on every queue.
// Their `chunk` has 22 bits of it, their `round` the number of the part (2 bits) and the low 6 bits
// of the round. They may come in any order, and before or after the results of the round: a result
// counts when the verdict on its round is there. So the verdict on one round alone is under way on
// a queue.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "transport/wire.h"

namespace phub {

struct RoundVerdict {
  uint64_t round = 0;
  double norm = 0;       // before the gradient is clipped; not finite: nor are the gradients
  bool skipped = false;  // nothing was applied

  friend bool operator==(const RoundVerdict&, const RoundVerdict&) = default;
};

inline constexpr uint32_t kVerdictParts = 3;
inline constexpr uint32_t kVerdictPartBits = 22;

constexpr uint32_t low6(uint64_t round) { return static_cast<uint32_t>(round & 0x3f); }

constexpr uint32_t verdict_imm(const RoundVerdict& verdict, uint32_t part) {
  const auto bits = std::bit_cast<uint64_t>(verdict.norm);
  uint32_t piece =
      static_cast<uint32_t>(bits >> (part * kVerdictPartBits)) & (kMaxChunksPerQueue - 1);
  if (part == kVerdictParts - 1 && verdict.skipped) piece |= kMaxChunksPerQueue >> 1;
  return encode(
      {.chunk = piece, .round = low6(verdict.round) << 2 | part, .kind = ImmKind::kControl});
}

// Puts the parts together that come on a queue.
class VerdictReader {
 public:
  // False: there is no such part.
  bool read(const Imm& imm) {
    const uint32_t part = imm.round & 3;
    if (part >= kVerdictParts) return false;
    if (imm.round >> 2 != round_) parts_seen_ = 0;
    round_ = imm.round >> 2;
    parts_[part] = imm.chunk;
    parts_seen_ |= 1u << part;
    return true;
  }
  // The verdict on this round is there, which is the latest or the one after it.
  bool has(uint64_t round) const {
    return parts_seen_ == (1u << kVerdictParts) - 1 && round_ == low6(round);
  }
  RoundVerdict verdict(uint64_t round) const {  // REQUIRES: has(round)
    constexpr uint32_t kSkipped = kMaxChunksPerQueue >> 1;
    uint64_t bits = 0;
    for (uint32_t part = 0; part < kVerdictParts; ++part) {
      const uint32_t piece = part == kVerdictParts - 1 ? parts_[part] & ~kSkipped : parts_[part];
      bits |= uint64_t{piece} << (part * kVerdictPartBits);
    }
    return {round, std::bit_cast<double>(bits), (parts_.back() & kSkipped) != 0};
  }

 private:
  std::array<uint32_t, kVerdictParts> parts_ = {};
  uint32_t round_ = 0;  // its low 6 bits
  uint32_t parts_seen_ = 0;
};

}  // namespace phub

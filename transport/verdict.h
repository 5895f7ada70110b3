// What the ranks of a job with gated rounds are told of a round: its norm, and whether it was
// skipped. It travels in three immediates of the kind kControl without payload, ahead of the
// round's first result of each queue. Their `chunk` has 22 bits of it, their `round` is the number
// of the part.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "transport/wire.h"

namespace phub {

struct RoundVerdict {
  uint64_t round = 0;
  double norm = 0;       // of the gradient before it is clipped; not finite: nor are the gradients
  bool skipped = false;  // nothing was applied

  friend bool operator==(const RoundVerdict&, const RoundVerdict&) = default;
};

inline constexpr uint32_t kVerdictParts = 3;
inline constexpr uint32_t kVerdictPartBits = 22;

constexpr uint32_t verdict_imm(const RoundVerdict& verdict, uint32_t part) {
  const auto bits = std::bit_cast<uint64_t>(verdict.norm);
  uint32_t piece =
      static_cast<uint32_t>(bits >> (part * kVerdictPartBits)) & (kMaxChunksPerQueue - 1);
  if (part == kVerdictParts - 1 && verdict.skipped) piece |= kMaxChunksPerQueue >> 1;
  return encode({.chunk = piece, .round = part, .kind = ImmKind::kControl});
}

// Puts the parts together.
class VerdictReader {
 public:
  // False: there is no such part.
  bool read(const Imm& imm) {
    if (imm.round >= kVerdictParts) return false;
    parts_[imm.round] = imm.chunk;
    seen_ |= 1u << imm.round;
    return true;
  }
  bool complete() const { return seen_ == (1u << kVerdictParts) - 1; }
  RoundVerdict verdict(uint64_t round) const {  // REQUIRES: complete()
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
  uint32_t seen_ = 0;
};

}  // namespace phub

// The generations of a stream of a switch that adds (stream.h). The first begins with the job: its
// number is in the answer to the join. When one has ended, the box may begin another, and tells the
// workers by an immediate of the kind kControl without payload, on every queue of the stream, and
// before the first result with which a rank could send the generation's first round. Its `round`
// has 3 in the lower 2 bits, as parts of a verdict (transport/verdict.h) have less, and 6 bits of
// the round; its `chunk` 10 more of the round, and 12 of how many generations there were before.
#pragma once

#include <cstdint>

#include "transport/wire.h"

namespace phub {

inline constexpr uint32_t kMostSwitchGenerations = 1u << 12;

struct SwitchBeginning {
  uint32_t index = 0;  // the generation's index; 0: the job's first
  uint64_t round = 0;  // its first; only the low 16 bits travel

  friend bool operator==(const SwitchBeginning&, const SwitchBeginning&) = default;
};

constexpr uint32_t beginning_imm(const SwitchBeginning& beginning) {
  const auto round = static_cast<uint32_t>(beginning.round & 0xffff);
  return encode({.chunk = beginning.index << 10 | round >> 6,
                 .round = (round & 0x3f) << 2 | 3,
                 .kind = ImmKind::kControl});
}
constexpr bool is_switch_beginning(const Imm& imm) {
  return imm.kind == ImmKind::kControl && (imm.round & 3) == 3;
}
// REQUIRES: is_switch_beginning(imm). `near`: a round less than 2^15 from the first one.
constexpr SwitchBeginning switch_beginning(const Imm& imm, uint64_t near) {
  const uint32_t low = (imm.chunk & 0x3ff) << 6 | imm.round >> 2;
  const auto ahead = static_cast<int16_t>(static_cast<uint16_t>(low - near));
  return {imm.chunk >> 10, near + static_cast<uint64_t>(int64_t{ahead})};
}

// Stands for a generation in packets (SwitchHeader::generation): computed from that of the job's
// first, and different for each stream and index. It is never 0.
constexpr uint64_t switch_generation(uint64_t first, uint32_t first_slot, uint32_t index) {
  if (index == 0) return first;
  uint64_t h = first + (uint64_t{first_slot} << 12 | index) * 0x9E3779B97F4A7C15;
  h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9;
  h = (h ^ h >> 27) * 0x94D049BB133111EB;
  h ^= h >> 31;
  return h == 0 ? 1 : h;
}

}  // namespace phub

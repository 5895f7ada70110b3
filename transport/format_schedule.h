// The formats of a key's gradients by the round: several, each for a number of rounds, and the last
// one for all that follow. "f32*100,int8*900,topk" is f32 in rounds 1 to 100, int8 in rounds 101 to
// 1000, and topk from round 1001 on.
//
// A pure function of the job's round. Box and worker both evaluate it, so whoever joins late,
// connects again or goes on from a checkpoint needs nothing but the round.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "transport/slot_format.h"

namespace phub {

// Whether a format is written as a schedule, right or wrong.
constexpr bool is_schedule(std::string_view format) {
  return format.find_first_of(",*") != std::string_view::npos;
}

class FormatSchedule {
 public:
  static constexpr size_t kMostPhases = 8;
  static constexpr uint64_t kMostRounds = uint64_t{1} << 40;  // of a phase

  // Throws Error(kInvalid), which names the field: it is no schedule. Phases are f32, or coded but
  // int32.
  static FormatSchedule parse(std::string_view field, std::string_view text);

  // The format of a round. Round 0 has that of round 1.
  const SlotFormat& at(uint64_t round) const { return kSlotFormats[number_at(round)]; }
  // Its place among kSlotFormats.
  size_t number_at(uint64_t round) const {
    size_t phase = 0;
    while (round > phases_[phase].last) ++phase;
    return phases_[phase].format;
  }
  // What a slot has room for: a gradient of any phase.
  const SlotFormat& slot() const { return slot_; }

 private:
  static constexpr uint64_t kForever = std::numeric_limits<uint64_t>::max();
  struct Phase {
    size_t format = 0;
    uint64_t last = kForever;  // its last round
  };

  std::array<Phase, kMostPhases> phases_ = {};
  SlotFormat slot_;
};

}  // namespace phub

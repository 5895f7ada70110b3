// Which keys of a job send gradients in formats that change by the round, and how
// (format_schedule.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/job_spec.h"
#include "transport/format_schedule.h"

namespace phub {

class KeySchedules {
 public:
  static constexpr size_t kMost = 7;  // of a job: CoreChunk has 3 bits for the number of one

  // Throws Error(kInvalid): a key has no schedule that can be, or there are more than kMost.
  explicit KeySchedules(const JobSpec& spec);

  // Null: the key's format is the same in every round.
  const FormatSchedule* of(size_t key) const {
    const uint8_t number = number_of(key);
    return number == 0 ? nullptr : &all_[number - 1];
  }
  // Its place in all(), plus 1. 0: it has none.
  uint8_t number_of(size_t key) const { return number_.empty() ? 0 : number_[key]; }
  // Each one once, however many keys have it.
  std::span<const FormatSchedule> all() const { return all_; }

 private:
  std::vector<FormatSchedule> all_;
  std::vector<uint8_t> number_;  // by key; empty: no key has a schedule
};

}  // namespace phub

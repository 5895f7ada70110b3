// Whether accesses still come as recorded, and when an iteration is recorded again. It decides from
// sums over all ranks that each rank sees at the same clock: so all come to the same.
#pragma once

#include <atomic>
#include <cstdint>

#include "worker/iterstore/tally.h"

namespace phub::iterstore {

class PatternWatch {
 public:
  // `share`: of an iteration's accesses, from which on it is recorded again; 0: never.
  PatternWatch(double share, uint32_t ranks) : share_(share), ranks_(ranks) {}

  // Rows are placed for an iteration of so many clocks, which begins now.
  void placed(uint32_t clocks);
  // After each clock, with what all ranks said with the one before. True: an iteration has been
  // recorded, and rows are to be placed.
  bool after_clock(const Tally& before);
  // Any thread: the calls are recorded.
  bool is_recording() const { return recording_.load(std::memory_order_relaxed); }
  // The application records: nothing is recorded until rows are placed.
  void stop();

 private:
  bool is_of_all(const Tally& iteration) const;
  bool has_changed(const Tally& iteration);

  const double share_;
  const int64_t ranks_;
  uint32_t clocks_of_iteration_ = 0;  // 0: none was recorded yet
  uint64_t clocks_ = 0;               // since rows were placed
  Tally iteration_;
  std::atomic<bool> recording_ = false;
  bool stopped_ = false;
  uint64_t patience_ = 1;  // iterations before the next recording
};

}  // namespace phub::iterstore

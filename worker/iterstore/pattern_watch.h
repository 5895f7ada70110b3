// Decides whether accesses still come as recorded, and when an iteration is recorded again. It
// looks at sums over all ranks, which each rank sees at the same clock, so all ranks decide the
// same.
#pragma once

#include <atomic>
#include <cstdint>

namespace phub::iterstore {

// What every rank says with each clock, as sums: the values of the clock's key.
struct Tally {
  int64_t ranks = 0;     // that made the clock
  int64_t accesses = 0;  // of their threads
  int64_t outside = 0;   // of these, that did not come as recorded
  int64_t changes = 0;   // of rows, that they ask for

  friend Tally operator+(const Tally& a, const Tally& b) {
    return {a.ranks + b.ranks, a.accesses + b.accesses, a.outside + b.outside,
            a.changes + b.changes};
  }
  friend Tally operator-(const Tally& a, const Tally& b) {
    return {a.ranks - b.ranks, a.accesses - b.accesses, a.outside - b.outside,
            a.changes - b.changes};
  }
};

class PatternWatch {
 public:
  // An iteration is recorded again if at least this share of its accesses does not come as
  // recorded; 0 means never.
  PatternWatch(double share, uint32_t ranks) : share_(share), ranks_(ranks) {}

  // Rows are placed for an iteration of so many clocks, which begins now.
  void placed(uint32_t clocks);
  // REQUIRES: called after each clock, with the tally of all ranks for the clock before. True: an
  // iteration has been recorded, and rows are to be placed.
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

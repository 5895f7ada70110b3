// The rounds that a job's chunks are in, as its cores say them at boundaries and in probes. Part of
// Membership; no threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "phub/core/messages.h"

namespace phub {

class JobRounds {
 public:
  // 0: the initial parameters are still to come.
  explicit JobRounds(uint64_t first) : min_(first) {}
  void restore(uint64_t round) { min_ = round + 1; }  // the last that is complete

  // A boundary begins; each core has held, or has committed; all of them have held.
  void begin_boundary();
  void held(const CoreReport& report);
  void all_held();
  void committed(const CoreReport& report) {
    committed_min_ = std::min(committed_min_, report.min_round);
  }
  void probed(uint64_t min_round) {
    if (min_round != kNever) min_ = std::max(min_, min_round);
  }
  // A snapshot is being copied, which is still to save the decisions for rounds from `round` on;
  // kNever: none is.
  void keep_from(uint64_t round) { keep_from_ = round; }

  uint64_t completed() const { return min_ == 0 ? 0 : min_ - 1; }
  uint64_t in_progress() const { return min_; }  // the lowest; 0: the initial parameters
  bool had_begun_when_held() const { return held_min_ > 0; }
  // The initial parameters were not complete at the latest boundary.
  bool lacked_initial() const { return committed_min_ == 0; }
  // No chunk was in an earlier one at the latest boundary, not even a chunk that waits for no rank.
  uint64_t lowest() const { return lowest_; }
  // The highest round for which any contribution had come at the boundary that is committed.
  uint64_t started() const { return started_; }

 private:
  uint64_t min_;
  uint64_t started_ = 0;
  uint64_t held_min_ = 0;     // the lowest that a chunk is in; as CoreReport has it
  uint64_t held_lowest_ = 0;  // the lowest of all chunks
  uint64_t lowest_ = 0;       // the same, at the latest boundary
  uint64_t keep_from_ = kNever;
  uint64_t committed_min_ = 0;  // and after the latest boundary
};

inline void JobRounds::begin_boundary() {
  started_ = 0;
  held_min_ = held_lowest_ = kNever;
  committed_min_ = kNever;
}

inline void JobRounds::held(const CoreReport& report) {
  started_ = std::max(started_, report.started);
  held_min_ = std::min(held_min_, report.min_round);
  held_lowest_ = std::min(held_lowest_, report.lowest);
}

inline void JobRounds::all_held() {
  held_lowest_ = std::min(held_lowest_, keep_from_);
  lowest_ = held_lowest_;
  if (held_min_ != kNever) min_ = std::max(min_, held_min_);
}

}  // namespace phub

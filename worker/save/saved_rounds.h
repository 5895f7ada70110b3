// The rounds after which a rank's own state is saved, as the rank gets its results: bookkeeping,
// without threads, clocks or calls. The library drives it (saver.h), and so does the simulator.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "transport/control/messages.h"

namespace phub {

// Tells from the answer to a piece of a part, or from its lack, how to go on.
enum class PartEnd {
  kOver,   // the box does not want the part
  kThere,  // the box has the piece
  kAgain,  // it is sent again
  kFailed,
};
inline PartEnd end_of_part(ErrorCode code) {
  switch (code) {
    case ErrorCode::kNotFound:  // its round was left out
      return PartEnd::kOver;
    case ErrorCode::kTaken:  // the answer to an earlier attempt was lost
      return PartEnd::kThere;
    case ErrorCode::kUnavailable:
    case ErrorCode::kTimeout:
      return PartEnd::kAgain;
    default:
      return PartEnd::kFailed;
  }
}

// The caller guards it; due() may be read by any thread.
class SavedRounds {
 public:
  // `saves`: the rank has state of its own.
  SavedRounds(const JoinReply& reply, bool saves)
      : every_(saves ? reply.save_every : 0),
        due_(every_ == 0 ? 0 : (reply.first_round + every_ - 1) / every_ * every_),
        received_(reply.spec.keys.size(), reply.first_round - 1) {
    // A key that the rank neither writes nor reads has no results.
    const std::vector<bool> any = interest_in_keys(reply.interest, reply.spec.keys);
    for (size_t key = 0; key < received_.size(); ++key) {
      if (any[key])
        ++keys_;
      else
        received_[key] = ~uint64_t{0};
    }
    missing_ = keys_;
  }

  bool any() const { return every_ > 0; }
  uint64_t due() const { return due_; }  // the next round that is saved
  // The result of this round of a key is here. True: it was the last one that due() lacked.
  bool received(size_t key, uint64_t round) {
    if (round <= received_[key]) return false;  // a completion that was collected late
    const uint64_t before = std::exchange(received_[key], round);
    return before < due_ && round >= due_ && --missing_ == 0;
  }
  size_t missing() const { return missing_; }  // keys whose result of due() is not here
  // Before a push of this round: whether the state of an earlier one must be taken first.
  bool is_due_before(uint64_t round) const { return any() && due_ < round; }
  void next() {  // the state of due() was taken, or is left out
    due_ += every_;
    missing_ = keys_;
  }

 private:
  const uint64_t every_;  // 0: nothing is saved
  std::atomic<uint64_t> due_;
  std::vector<uint64_t> received_;  // by key
  size_t keys_ = 0;                 // those that have results
  size_t missing_ = 0;
};

}  // namespace phub

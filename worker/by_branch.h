// A rank's own state for each branch of its job, which the server does not have: statistics of
// batch normalisation, random numbers, the position in the data, and the like. It is saved when
// another branch runs, and given back when it does (the proposal of IterStore, GeePS and MLtuner,
// section 5.2, figure 17: local data). A child begins with its parent's state at the fork.
//
//   options.saver = [&](uint64_t) {
//     return phub::RankState{{"own", save()}, {"branches", own.saved()}};
//   };
//   ...
//   phub::ByBranch own(save, load);
//   if (const auto saved = worker.restored("branches")) own.restore(*saved);
//   for (...) {
//     own.begin(worker);
//     ... push all keys, and wait for all ...
//   }
//
// The state of each branch but the one that runs is in memory; branches with the same state share
// it. A rank that comes later begins all branches with the state that it has then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "transport/control/branch_messages.h"
#include "worker/worker.h"

namespace phub {

// One thread at a time. An exception of the two functions goes to the caller, who can then repeat
// the call.
class ByBranch {
 public:
  using State = std::vector<std::byte>;
  using Save = std::function<State()>;                           // returns the state
  using Load = std::function<void(std::span<const std::byte>)>;  // makes it as it was

  ByBranch(Save save, Load load);

  // Before this rank begins `round` (0: its next), once all results of the round before are here:
  // the state is that of the branch which runs in it, whose number is returned. A program calls it
  // before each round, or never; a second call for the same round has no effect. Throws as
  // Worker::branches(), and kNotFound if the round is over; kInvalid if a round with a fork was
  // left out, or if this one was begun long before (after rejoin(), restore() comes first).
  uint32_t begin(Worker& worker, uint64_t round = 0);
  uint32_t begin(const BranchReply& branches, uint64_t round);

  // For a checkpoint: all but the state that is in place, which is the program's to save.
  State saved() const;
  // Goes back to the state of that call of saved(). Throws Error(kMismatch) if these are not bytes
  // that saved() returned.
  void restore(std::span<const std::byte> saved);

 private:
  using Waiting = std::map<uint32_t, std::shared_ptr<const State>>;

  Save save_;
  Load load_;
  uint32_t branch_ = 0;  // the branch whose state is in place
  uint64_t next_ = 0;    // forks before earlier rounds are known; 0: it has not begun
  Waiting waiting_;      // the states of other branches that may still run, or be forked
};

}  // namespace phub

// The losses of a job's latest rounds, as its ranks report them, with the branch that ran.
// Checkpoints do not have them: they begin anew in each life of the job. Control thread only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/branch_messages.h"
#include "transport/control/loss_messages.h"

namespace phub {

class Losses {
 public:
  // Learns the branches that ran, and are to run, from the round of the first on. `runs` is
  // ascending and not empty. Called before add(), and before the sender forgets such runs.
  void learn(std::span<const BranchRun> runs);
  bool empty() const { return entries_.empty(); }  // no rank has reported a loss

  // Adds a loss. A rank's rounds ascend: if it has reported this round or a later one already, or
  // the round is no longer kept, the loss does not count. Throws Error(kInvalid) if the round is 0
  // or above `most`. REQUIRES: learn() was told of the round.
  void add(uint32_t rank, uint64_t round, double loss, uint64_t most);

  LossPage page(uint64_t from) const;  // without the epoch
  uint64_t bytes() const;

 private:
  struct Entry {
    uint64_t round = 0;  // 0: none
    uint32_t branch = 0;
    uint32_t ranks = 0;
    double sum = 0;
  };
  uint32_t branch_in(uint64_t round) const;
  void forget_runs(uint64_t newest);

  std::vector<Entry> entries_;      // a ring, by round; empty until the first report
  std::vector<uint64_t> reported_;  // by rank: its latest round
  std::vector<BranchRun> runs_;
  uint64_t latest_ = 0;
};

}  // namespace phub

// The losses of a job's latest rounds, as its ranks report them, with the branch that ran. Not a
// part of checkpoints: it begins anew in each life of the job. Control thread only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/branch_messages.h"
#include "transport/control/loss_messages.h"

namespace phub {

class Losses {
 public:
  // What ran, and is to run, from the round of the first on. Ascending; not empty. Before add(),
  // and before runs that it has are forgotten.
  void learn(std::span<const BranchRun> runs);
  bool empty() const { return entries_.empty(); }  // nobody has reported anything

  // A rank's rounds ascend: one that it has reported already, or a later one, counts once. So does
  // nothing of a round that is not kept any more. Throws Error(kInvalid): the round is above
  // `most`, or 0. REQUIRES: learn() was told of it.
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

// The losses of a job's latest rounds, as its ranks report them, by name, with the branch that ran.
// Checkpoints do not have them: they begin anew in each life of the job. Control thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/control/branch_messages.h"
#include "transport/control/loss_messages.h"

namespace phub {

class Losses {
 public:
  // Learns the branches that ran, and are to run, from the round of the first on. `runs` is
  // ascending and not empty. Called before add(), and before the sender forgets such runs.
  void learn(std::span<const BranchRun> runs);
  bool empty() const { return by_name_.empty(); }  // no rank has reported a loss

  // Adds a loss. A rank's rounds ascend, for each name: if it has reported this round or a later
  // one already, or the round is no longer kept, the loss does not count. Throws Error: kInvalid,
  // the round is 0 or above `most`, or the name is none; kFull, the job has kMostLossNames others.
  // REQUIRES: learn() was told of the round.
  void add(uint32_t rank, uint64_t round, double loss, uint64_t most,
           std::string_view name = kLossName);

  LossPage page(uint64_t from) const;  // without the epoch
  // Of each name the last before the latest round of all names, however long ago that was.
  std::vector<RoundLoss> latest() const;
  uint64_t bytes() const;

 private:
  struct Entry {
    uint64_t round = 0;  // 0: none
    uint32_t branch = 0;
    uint32_t ranks = 0;
    double sum = 0;
  };
  struct Named {
    std::vector<Entry> entries;      // a ring, by round; and the last that was replaced there
    std::vector<uint64_t> reported;  // by rank: its latest round
  };
  Named& named(std::string_view name);
  bool is_over(const Entry& entry) const;
  static RoundLoss mean_of(const std::string& name, const Entry& entry);
  uint32_t branch_in(uint64_t round) const;
  void forget_runs(uint64_t newest);

  std::map<std::string, Named, std::less<>> by_name_;
  std::vector<BranchRun> runs_;
  uint64_t latest_ = 0;  // round of all names
};

}  // namespace phub

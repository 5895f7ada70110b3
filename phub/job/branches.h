// A job's branches, and the decisions about them: a pure state machine, for which the membership
// makes the boundaries (transport/control/branch_messages.h).
//
// A branch counts its own rounds: its learning rate in the n-th of them is that of round n of a job
// of its own. The job's hyperparameter `lr_rounds_before` tells all ranks the offset: the values of
// a branch are set when it begins to run, like any change of hyperparameters.
//
// A branch that is killed from round R on lies on its shelf until a checkpoint after round R − 1,
// or a later one, is durable. Then the branch is in the files of that checkpoint and of every later
// one; its shelf is free, and only the record here stays in memory. To revive it, its files are
// read first (BranchChange::is_loaded). So a decision to kill needs no order, and nothing to undo
// if the checkpoint fails: the next one has the branch as well.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "kernels/kernels.h"
#include "phub/checkpoint/manifest.h"
#include "phub/core/branch_orders.h"
#include "phub/core/messages.h"
#include "transport/control/branch_messages.h"
#include "transport/control/job_spec.h"
#include "transport/control/messages.h"

namespace phub {

class Branches {
 public:
  explicit Branches(const JobSpec& spec);

  // Returns the branches for a checkpoint after `round`, without the steps of its shelves: all
  // decisions, also those for later rounds. REQUIRES: no call of decide() was told of a `lowest`
  // above round + 1.
  SavedBranches saved(uint64_t round) const;
  // Restores the branches of a job that goes on from a checkpoint. REQUIRES: no other call came
  // before. Throws Error(kInvalid).
  void restore(const Manifest& saved);

  // A decision: the orders and changes for the cores, and the records for the log.
  struct Decision {
    std::vector<BranchOrder> orders;
    std::vector<HyperChange> hyper;
    std::vector<LogRecord> records;
    uint64_t last = 0;  // its highest round
  };
  // `change` holds from `change.round` on, which is no lower than that of any decision before; no
  // chunk has begun it. No chunk is in a round below `lowest`. A fork makes the branch `child`,
  // from next(). Throws Error, and changes nothing: kNotFound, there is no such branch; kFull, no
  // shelf is free, or too many decisions are still to come; kInvalid. REQUIRES: the change is no
  // kList.
  Decision decide(const BranchChange& change, uint32_t child, uint64_t lowest);
  uint32_t next() { return next_++; }  // the number of the next child

  // Sets hyperparameters of the branch that runs, from `change.round` on, as for decide(). But
  // grad_scale is for all branches: it is the factor by which the ranks multiply.
  void set(const HyperChange& change);

  // A checkpoint after `round` is durable: branches that were killed before are on disk.
  void saved_durably(uint64_t round);
  // Whether a killed branch waits for a checkpoint after a round from `first` to `last`.
  bool wants_checkpoint(uint64_t first, uint64_t last) const;
  // The branch is killed, and its shelf is free. Throws Error(kNotFound).
  bool is_on_disk(uint32_t branch) const;
  // Whether some chunk may not have copied from the dock of `shelf` yet, if none is in a lower
  // round.
  bool needs_dock(uint32_t shelf, uint64_t in_progress) const;
  uint64_t killed_bytes() const;  // memory of the records of killed branches
  // Returns a shelf for another branch that comes from files, where no chunk is in a lower round
  // than this. Throws Error(kFull) if there is none.
  uint32_t shelf_for_one(uint64_t in_progress) const;

  std::vector<BranchStatus> list(uint64_t in_progress) const;
  std::vector<BranchGone> gone(uint64_t in_progress) const;   // ascending; BranchReply::gone
  std::vector<BranchRun> runs(uint64_t in_progress) const;    // from that round on
  std::vector<BranchFork> forks(uint64_t in_progress) const;  // the same

 private:
  using Values = std::vector<kernels::Hyper>;  // by group of keys
  struct Branch {
    uint32_t parent = 0;
    uint64_t forked = 0;  // before this round
    uint32_t place = 0;   // BranchOrder; kOnDisk: none
    uint64_t killed = 0;  // before this round; 0: it is not
    uint64_t rounds = 0;  // its own before the round in which it began to run, or stopped
    Values values;        // lr_rounds_before as of its own rounds
    std::map<std::string, double> own = {};  // BranchStatus::values
  };

  static constexpr uint32_t kNobody = ~uint32_t{0};
  static constexpr uint32_t kOnDisk = ~uint32_t{0};
  using Places = std::vector<uint32_t>;  // by place: its branch; kNobody: none
  static void carry_out(const BranchOrder& order, Places& places);
  void check_restored(uint64_t round, std::map<uint32_t, uint32_t> docks) const;

  Decision fork(const BranchChange& change, uint32_t child);
  Decision schedule(const BranchChange& change);
  Decision discard(const BranchChange& change);
  Decision kill(const BranchChange& change);
  Decision revive(const BranchChange& change);
  void run(uint32_t branch, uint64_t round, Decision& decision);
  Branch& find(uint32_t branch);
  Branch& find_alive(uint32_t branch);
  void check_not_running(uint32_t branch, std::string_view what) const;
  // 0: there is none. Not one whose dock is needed, if no chunk is in a lower round.
  uint32_t free_shelf(uint64_t in_progress = kNever) const;
  [[noreturn]] void fail_no_room() const;
  uint64_t rounds_before(uint32_t number, const Branch& branch, uint64_t round) const;

  void check_room(const BranchChange& change) const;

  kernels::Optimizer optimizer_ = kernels::Optimizer::kNone;
  uint32_t groups_ = 1;
  uint32_t shelves_;
  std::map<uint32_t, Branch> branches_;
  std::map<uint32_t, std::map<std::string, double>> gone_;  // Branch::own of those in runs_
  uint32_t next_ = 1;
  uint32_t running_ = 0;         // once all decisions are carried out
  std::vector<BranchRun> runs_;  // the last is running_'s; earlier ones stay while they are needed
  std::vector<BranchFork> forks_;    // for rounds that some chunk has not completed
  std::vector<BranchOrder> orders_;  // those that some chunk may not have carried out
  Places places_;                    // as all chunks have them, before orders_; without docks
};

}  // namespace phub

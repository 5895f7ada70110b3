// What there is of a job's branches, and what was decided about them: a pure state machine, of
// which the membership makes the boundaries (transport/control/branch_messages.h).
//
// A branch counts its own rounds: its learning rate in the n-th of them is what it would be in
// round n of a job of its own. The job's hyperparameter `lr_rounds_before` is what says so to
// everybody, as all that a branch has of its own is set when it begins to run, like any change of
// hyperparameters.
//
// A branch that is killed from round R on lies on its shelf until a checkpoint after round R − 1,
// or a later one, is durable. The branch is in its files then, and in those of every checkpoint
// that follows; its shelf is free, and nothing of it is in memory but what is here. To revive it
// somebody reads the files first (BranchChange::is_loaded). So a decision to kill needs no order,
// and nothing that is undone if the checkpoint fails: the next one has the branch as well.
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

  // What a checkpoint after `round` keeps, but for the steps of its shelves: what was decided, also
  // for later rounds. REQUIRES: no call of decide() was told of a `lowest` above round + 1.
  SavedBranches saved(uint64_t round) const;
  // The job goes on from a checkpoint: before anything else is called. Throws Error(kInvalid).
  void restore(const Manifest& saved);

  // A decision that is made: what the cores do, and what the log says.
  struct Decision {
    std::vector<BranchOrder> orders;
    std::vector<HyperChange> hyper;
    std::vector<LogRecord> records;
    uint64_t last = 0;  // the highest round that it is about
  };
  // `change.round` is the round from which it holds: no lower than that of any decision before, and
  // no chunk has begun it. `lowest`: no chunk is in a lower one. `child`: of a fork, from next().
  // Throws Error, and nothing has changed: kNotFound, there is no such branch; kFull, no shelf is
  // free, or too much is still to come; kInvalid. REQUIRES: it is no kList.
  Decision decide(const BranchChange& change, uint32_t child, uint64_t lowest);
  uint32_t next() { return next_++; }  // the number of the next child

  // Hyperparameters of the branch that runs, from `change.round` on, as for decide(); but
  // grad_scale is of all branches: it tells what the ranks multiply by.
  void set(const HyperChange& change);

  // A checkpoint after `round` is durable: what was killed before is on disk.
  void saved_durably(uint64_t round);
  // Somebody waits for one after a round from `first` to `last`.
  bool wants_checkpoint(uint64_t first, uint64_t last) const;
  // The branch is killed, and its shelf is free. Throws Error(kNotFound).
  bool is_on_disk(uint32_t branch) const;
  // Some chunk may not have copied what is in the dock of `shelf`, if none is in a lower round.
  bool needs_dock(uint32_t shelf, uint64_t in_progress) const;
  uint64_t killed_bytes() const;  // held of branches that are killed
  // Throws Error(kFull) if there is no shelf for another branch that comes from files, where no
  // chunk is in a lower round than this.
  void check_room_for_one(uint64_t in_progress) const { shelf_for_one(in_progress); }

  std::vector<BranchStatus> list(uint64_t in_progress) const;
  std::vector<BranchRun> runs(uint64_t in_progress) const;    // from that round on
  std::vector<BranchFork> forks(uint64_t in_progress) const;  // the same

 private:
  using Values = std::vector<kernels::Hyper>;  // by group of keys
  struct Branch {
    uint32_t parent = 0;
    uint64_t forked = 0;  // before this round
    uint32_t place = 0;   // BranchOrder; kOnDisk: none
    uint64_t killed = 0;  // before this round; 0: it is not
    uint64_t rounds = 0;  // of its own before the one in which it began to run, or stopped
    Values values;        // lr_rounds_before as of its own rounds
  };

  static constexpr uint32_t kNobody = ~uint32_t{0};
  static constexpr uint32_t kOnDisk = ~uint32_t{0};
  using Places = std::vector<uint32_t>;  // which branch lies there; kNobody: none
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
  uint32_t shelf_for_one(uint64_t in_progress) const;
  [[noreturn]] void fail_no_room() const;
  uint64_t rounds_before(uint32_t number, const Branch& branch, uint64_t round) const;

  void check_room(const BranchChange& change) const;

  kernels::Optimizer optimizer_ = kernels::Optimizer::kNone;
  uint32_t groups_ = 1;
  uint32_t shelves_;
  std::map<uint32_t, Branch> branches_;
  uint32_t next_ = 1;
  uint32_t running_ = 0;           // when all that was decided is done
  std::vector<BranchRun> runs_;    // the last is of running_; those before as long as somebody asks
  std::vector<BranchFork> forks_;  // of rounds that some chunk is before, or in
  std::vector<BranchOrder> orders_;  // those that some chunk may not have carried out
  Places places_;                    // as all chunks have them, before orders_; without docks
};

}  // namespace phub

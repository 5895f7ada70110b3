// A simulated process decides about the job's branches, beside its training: any number of ranks
// do, each as it was told last.
#include <algorithm>
#include <utility>

#include "tests/sim/rack.h"
#include "tests/sim/trainer.h"

namespace phub::sim {

void Trainer::call_branches() {
  const std::vector<BranchCall>& calls = job_.plan.branch_calls;
  while (branch_calls_ < calls.size() && calls[branch_calls_].after_pushes <= pushes_) {
    const BranchCall& call = calls[branch_calls_++];
    if (call.rank != reply_->rank) continue;
    SimRandom random(call.random);
    const auto some_branch = [&] { return branches_[random.below(branches_.size())]; };
    BranchChange change;
    if (random.chance(0.5)) change.round = session_->next_round() + random.below(4);
    const bool kills = job_.plan.kills_branches;
    const auto on_disk = std::ranges::find(killed_, true, &BranchStatus::on_disk);
    if (kills && killed_.empty() && random.chance(0.8)) {
      if (random.chance(0.7)) {  // else asks what there is
        change.action = branches_.size() > 1 ? BranchAction::kKill : BranchAction::kFork;
        change.branch = some_branch();
      }
      change_branches(change);
      continue;
    }
    // Asks until it is on disk: then it comes back.
    if (!killed_.empty() && random.chance(kills ? 0.9 : 0.5)) {
      if (on_disk != killed_.end()) {
        change.action = BranchAction::kRevive;
        change.branch = on_disk->branch;
      }
      change_branches(change);
      continue;
    }
    switch (random.below(10)) {
      case 0:
      case 1:
        change.action = BranchAction::kFork;
        change.branch = some_branch();
        if (!job_.plan.lock_step()) {
          const uint64_t most = job_.spec.consistency == "ssp" ? job_.spec.slack : 4;
          if (random.chance(0.7)) {
            change.values["slack"] = static_cast<double>(random.below(most + 1));
          }
        } else if (random.chance(0.7) && job_.spec.optimizer != "fold") {
          change.values["lr"] = 0.001 * static_cast<double>(random.between(1, 500));
        }
        break;
      case 2:
      case 3:
        change.action = BranchAction::kSchedule;
        for (uint64_t turns = random.between(1, 6); turns > 0; --turns) {
          change.turns.push_back({some_branch(), turns > 1 ? random.between(1, 3) : 0});
        }
        break;
      case 4:
        change.action = BranchAction::kDiscard;
        change.branch = some_branch();
        break;
      case 5:
      case 6:
        change.action = BranchAction::kKill;
        change.branch = some_branch();
        break;
      case 7:
      case 8:
        change.action = BranchAction::kRevive;
        change.branch =
            killed_.empty() ? some_branch() : killed_[random.below(killed_.size())].branch;
        break;
      default:
        break;
    }
    change_branches(change);
  }
}

void Trainer::change_branches(const BranchChange& change) {
  uint64_t complete = ~uint64_t{0};
  for (size_t key = 0; key < session_->keys(); ++key) {
    complete = std::min(complete, session_->round(key));
  }
  control().call<BranchReply>(
      "branches", mail_,
      [this, who = credential(), change](const Reply<BranchReply>& reply) {
        server().change_branches(who,
                                 {.action = change.action,
                                  .round = change.round,
                                  .branch = change.branch,
                                  .values = change.values,
                                  .turns = change.turns},
                                 reply);
      },
      [this, change, complete](const Result<BranchReply>& result) {
        if (!result || life_ != rack_.life(job_)) return;
        const bool was_on_disk =
            std::ranges::any_of(killed_, [&change](const BranchStatus& killed) {
              return killed.branch == change.branch && killed.on_disk;
            });
        job_.kills += change.action == BranchAction::kKill;
        job_.revivals += change.action == BranchAction::kRevive && was_on_disk;
        branches_.clear();
        killed_.clear();
        for (const BranchStatus& branch : result.value->branches) {
          branches_.push_back(branch.branch);
          if (branch.killed > 0) killed_.push_back(branch);
        }
        job_.oracle.heard_of_branches(complete, change, *result.value);
      },
      false);
}

}  // namespace phub::sim

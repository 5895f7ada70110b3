// Branches that are killed, and revived.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/job/branches.h"

namespace phub {

Branches::Decision Branches::kill(const BranchChange& change) {
  Branch& branch = find(change.branch);
  check_not_running(change.branch, "killed");
  if (branch.killed > 0) {
    fail(ErrorCode::kInvalid, "branch {} is killed already, before round {}", change.branch,
         branch.killed);
  }
  const auto killed =
      std::ranges::count_if(branches_, [](const auto& other) { return other.second.killed > 0; });
  if (killed >= kMostKilledBranches) {
    fail(ErrorCode::kFull, "{} branches are killed, which is the limit: discard some of them",
         killed);
  }
  branch.killed = change.round;
  return {.orders = {},
          .hyper = {},
          .records = {{.kind = LogRecord::Kind::kKilled,
                       .round = change.round,
                       .branch = change.branch}},
          .last = change.round};
}

// One that is not on disk yet lies where it lay.
Branches::Decision Branches::revive(const BranchChange& change) {
  Branch& branch = find(change.branch);
  if (branch.killed == 0) fail(ErrorCode::kInvalid, "branch {} is not killed", change.branch);
  Decision decision{.orders = {},
                    .hyper = {},
                    .records = {{.kind = LogRecord::Kind::kRevived,
                                 .round = change.round,
                                 .branch = change.branch}},
                    .last = change.round};
  if (branch.place == kOnDisk) {
    if (!change.is_loaded) {
      fail(ErrorCode::kTaken, "branch {} was being written, and is on disk now: try again",
           change.branch);
    }
    const uint32_t shelf = shelf_for_one(0);
    branch.place = shelf;
    decision.orders.push_back({.round = change.round,
                               .kind = BranchOrder::kCopy,
                               .from = shelves_ + shelf,
                               .to = shelf,
                               .child = change.branch});
  }
  branch.killed = 0;
  return decision;
}

uint32_t Branches::shelf_for_one(uint64_t in_progress) const {
  const uint32_t shelf = free_shelf(in_progress);
  if (shelf > 0) return shelf;
  if (free_shelf() == 0) fail_no_room();
  fail(ErrorCode::kFull,
       "the room that is left is still to take a branch that was revived for a later round, and is "
       "not needed any more: wait for that round");
}

void Branches::fail_no_room() const {
  const auto waits = std::ranges::find_if(branches_, [](const auto& branch) {
    return branch.second.killed > 0 && branch.second.place != kOnDisk;
  });
  if (waits != branches_.end()) {
    const auto& [number, branch] = *waits;
    fail(ErrorCode::kFull,
         "there is no room for another branch until branch {}, which is killed, is in a checkpoint "
         "after round {} or a later one: wait until it is on disk, or discard one",
         number, branch.killed - 1);
  }
  const auto on_disk = std::ranges::count_if(
      branches_, [](const auto& branch) { return branch.second.place == kOnDisk; });
  fail(ErrorCode::kFull,
       "the job has {} branches, one that runs and {} beside it, and there is no room for "
       "another: discard one, or kill it, or create the job with more `branches`",
       branches_.size() - static_cast<size_t>(on_disk), shelves_);
}

void Branches::saved_durably(uint64_t round) {
  for (auto& [number, branch] : branches_) {
    if (branch.killed > 0 && branch.killed <= round + 1) branch.place = kOnDisk;
  }
}

bool Branches::wants_checkpoint(uint64_t first, uint64_t last) const {
  return std::ranges::any_of(branches_, [first, last](const auto& each) {
    const Branch& branch = each.second;
    return branch.killed > first && branch.killed - 1 <= last && branch.place != kOnDisk;
  });
}

bool Branches::is_on_disk(uint32_t branch) const {
  const auto found = branches_.find(branch);
  if (found == branches_.end()) fail(ErrorCode::kNotFound, "the job has no branch {}", branch);
  return found->second.place == kOnDisk;
}

bool Branches::needs_dock(uint32_t shelf, uint64_t in_progress) const {
  return std::ranges::any_of(orders_, [&](const BranchOrder& order) {
    return order.kind == BranchOrder::kCopy && order.from == shelves_ + shelf &&
           order.round > in_progress;
  });
}

uint64_t Branches::killed_bytes() const {
  const auto killed =
      std::ranges::count_if(branches_, [](const auto& branch) { return branch.second.killed > 0; });
  return static_cast<uint64_t>(killed) * (sizeof(Branch) + groups_ * sizeof(kernels::Hyper));
}

}  // namespace phub

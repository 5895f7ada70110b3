// A job's branches in a checkpoint, and in a job that goes on from one.
//
// All decisions stay, as those on hyperparameters do, future turns included. The shelves are as of
// the checkpoint's round, so one may hold a branch that is discarded later, and runs before that.
#include <algorithm>
#include <set>
#include <utility>

#include "kernels/hyper.h"
#include "phub/core/hyper.h"
#include "phub/job/branches.h"

namespace phub {
namespace {

using kernels::Hyper;

std::map<std::string, double> branch_values(const std::vector<Hyper>& from,
                                            const std::vector<Hyper>& to) {
  std::map<std::string, double> values;
  for (const HyperChange& change : hyper_difference(from, to, 1)) {
    values.insert(change.values.begin(), change.values.end());
  }
  return values;
}

// Versions before 6 have those of branches that are there.
std::vector<BranchFork> forks_of(const std::vector<SavedBranch>& branches, uint64_t round) {
  std::vector<BranchFork> forks;
  for (const SavedBranch& each : branches) {
    if (each.round > round) forks.push_back({each.round, each.branch, each.parent});
  }
  std::ranges::stable_sort(forks, {}, &BranchFork::round);
  return forks;
}

void check_saved(bool holds, std::string_view what) {
  if (!holds) fail(ErrorCode::kInvalid, "the branches of the checkpoint do not fit: {}", what);
}

}  // namespace

void Branches::carry_out(const BranchOrder& order, Places& places) {
  if (order.kind == BranchOrder::kCopy) {
    std::ranges::replace(places, order.child, kNobody);  // where it lay before it was on disk
    places[order.to] = order.child;
  } else {
    std::swap(places[0], places[order.to]);
  }
}

SavedBranches Branches::saved(uint64_t round) const {
  SavedBranches saved;
  if (shelves_ == 0) return saved;
  saved.next = next_;
  saved.runs = runs(round + 1);
  saved.forks = forks(round + 1);
  Places places = places_;
  std::vector<BranchOrder> later;
  std::set<uint32_t> needed, replaced;  // shelves, by the later orders
  std::set<uint32_t> in_files;          // branches that lie nowhere else
  for (const BranchOrder& order : orders_) {
    if (order.round <= round + 1) {
      carry_out(order, places);
      continue;
    }
    later.push_back(order);
    const bool copies = order.kind == BranchOrder::kCopy;
    const uint32_t from = copies ? order.from : order.to;
    if (from > shelves_) {
      saved.shelves.push_back({.place = from, .branch = order.child, .steps = {}});
      in_files.insert(order.child);
    } else if (!replaced.contains(from)) {
      needed.insert(from);
    }
    if (copies) replaced.insert(order.to);
  }
  saved.moves = moves_of(later);
  const Values defaults(groups_, kernels::default_hyper(optimizer_));
  for (const auto& [number, branch] : branches_) {
    const bool is_gone = branch.killed > 0 && branch.killed <= round + 1;
    saved.branches.push_back({.branch = number,
                              .parent = branch.parent,
                              .round = branch.forked,
                              .rounds = branch.rounds,
                              .place = is_gone ? 0 : branch.place,
                              .killed = branch.killed,
                              .values = branch_values(defaults, branch.values)});
    if (branch.place != kOnDisk) continue;
    saved.shelves.push_back({.branch = number, .steps = {}});
    in_files.insert(number);
  }
  for (uint32_t place = 1; place <= shelves_; ++place) {
    const uint32_t there = places[place];
    if (there == kNobody || in_files.contains(there)) continue;
    if (!branches_.contains(there) && !needed.contains(place)) continue;
    saved.shelves.push_back({.place = place, .branch = there, .steps = {}});
  }
  return saved;
}

void Branches::restore(const Manifest& from) {
  const SavedBranches& saved = from.branches;
  if (shelves_ == 0) {
    return check_saved(saved.next == 0 && saved.shelves.empty() && saved.moves.empty(),
                       "its job has none");
  }
  check_saved(saved.next > 0, "there are none");
  branches_.clear();
  next_ = saved.next;
  for (const SavedBranch& was : saved.branches) {
    Branch& branch = branches_[was.branch];
    branch = {.parent = was.parent,
              .forked = was.round,
              .place = phub::is_on_disk(was, from) ? kOnDisk : was.place,
              .killed = was.killed,
              .rounds = was.rounds,
              .values = Values(groups_, kernels::default_hyper(optimizer_))};
    set_values(was.values, branch.values);
  }
  check_saved(branches_.size() == saved.branches.size(), "one is there twice");
  runs_ = saved.runs;
  forks_ = saved.forks.empty() ? forks_of(saved.branches, from.round) : saved.forks;
  uint64_t last = from.round + 1;
  for (const BranchFork& fork : forks_) {
    check_saved(fork.round >= last && fork.branch != fork.parent && fork.branch < next_,
                "of forks");
    last = fork.round;
  }
  running_ = runs_.back().branch;
  orders_ = orders_of(saved.moves);
  places_.assign(size_t{shelves_} + 1, kNobody);
  places_[0] = runs_.front().branch;
  std::set<uint32_t> in_files;
  std::map<uint32_t, uint32_t> docks;
  for (const SavedShelf& shelf : saved.shelves) {
    check_saved(in_files.insert(shelf.branch).second, "one lies at two places");
    const bool on_disk = phub::is_on_disk(shelf.branch, from);
    check_saved(on_disk ? shelf.place <= shelves_ : shelf.place > 0 && shelf.place <= 2 * shelves_,
                "of shelves");
    if (on_disk) continue;
    uint32_t& there = shelf.place <= shelves_
                          ? places_[shelf.place]
                          : docks.try_emplace(shelf.place, kNobody).first->second;
    check_saved(std::exchange(there, shelf.branch) == kNobody, "of shelves");
  }
  for (const auto& [number, branch] : branches_) {
    if (branch.place == kOnDisk) check_saved(in_files.contains(number), "one is in no file");
  }
  check_restored(from.round, std::move(docks));
}

// Each order must find its branch, and all orders together must lead to the decided state.
void Branches::check_restored(uint64_t round, std::map<uint32_t, uint32_t> docks) const {
  Places places = places_;
  std::set<uint32_t> numbers;
  for (const uint32_t branch : places) {
    if (branch != kNobody) check_saved(numbers.insert(branch).second, "one lies at two places");
  }
  uint64_t last = round + 1;
  for (const BranchOrder& order : orders_) {
    check_saved(order.round >= std::max(last, round + 2) && order.to <= shelves_, "of orders");
    const bool copies = order.kind == BranchOrder::kCopy;
    const uint32_t from = copies ? order.from : order.to;
    const auto dock = docks.find(from);
    const bool finds = from <= shelves_ ? places[from] != kNobody
                                        : from == shelves_ + order.to && dock != docks.end() &&
                                              dock->second == order.child;
    check_saved(finds, "an order finds nothing");
    check_saved(!copies || order.from != order.to, "of orders");
    docks.erase(from);
    last = order.round;
    carry_out(order, places);
  }
  check_saved(docks.empty(), "of shelves");
  for (const auto& [number, branch] : branches_) {
    const bool is_there =
        branch.place == kOnDisk || (branch.place <= shelves_ && places[branch.place] == number);
    check_saved(number < next_ && is_there, "one is not at its place");
  }
  check_saved(branches_.contains(running_) && branches_.at(running_).place == 0, "none runs");
  check_saved(runs_.front().round <= round + 1, "none runs at first");
  for (size_t i = 1; i < runs_.size(); ++i) {
    const uint64_t first = runs_[i].round;
    const bool is_move = std::ranges::find(orders_, first, &BranchOrder::round) != orders_.end();
    check_saved(is_move && first > std::max(runs_[i - 1].round, round + 1), "of runs");
  }
  check_saved(branches_.at(running_).killed == 0, "one that is killed runs");
}

}  // namespace phub

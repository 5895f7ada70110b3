#include "phub/job/branches.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/hyper.h"
#include "phub/core/hyper.h"
#include "phub/job_rules.h"
#include "transport/control/message_fields.h"

namespace phub {
namespace {

using kernels::Hyper;

constexpr const char* kGradScale = "grad_scale";
constexpr size_t kOrdersOfRound = 16;  // for each branch that there may be

// The difference between a branch's own rounds and the job's, if it begins to run in `round`.
double offset_of(uint64_t rounds_before, uint64_t round) {
  return static_cast<double>(rounds_before) - static_cast<double>(round - 1);
}

void shift(std::vector<Hyper>& values, double rounds) {
  for (Hyper& of_group : values) of_group.lr_rounds_before += rounds;
}

}  // namespace

Branches::Branches(const JobSpec& spec)
    : shelves_(spec.branches), runs_{{.round = 1, .branch = 0}} {
  if (shelves_ == 0) return;
  optimizer_ = rules_of(spec).optimizer;
  groups_ = hyper_groups(spec);
  Values values(groups_, kernels::default_hyper(optimizer_));
  set_values(spec.hyper, values);
  branches_[0] = {.values = std::move(values)};
  places_.assign(size_t{shelves_} + 1, kNobody);
  places_[0] = 0;
}

Branches::Branch& Branches::find(uint32_t branch) {
  const auto at = branches_.find(branch);
  if (at == branches_.end()) fail(ErrorCode::kNotFound, "the job has no branch {}", branch);
  return at->second;
}

Branches::Branch& Branches::find_alive(uint32_t branch) {
  Branch& found = find(branch);
  if (found.killed == 0) return found;
  fail(ErrorCode::kInvalid, "branch {} is killed before round {}: revive it first", branch,
       found.killed);
}

uint32_t Branches::free_shelf(uint64_t in_progress) const {
  for (uint32_t shelf = 1; shelf <= shelves_; ++shelf) {
    if (needs_dock(shelf, in_progress)) continue;
    const auto has_it = [shelf](const auto& branch) { return branch.second.place == shelf; };
    if (std::ranges::none_of(branches_, has_it)) return shelf;
  }
  return 0;
}

// The number of its own rounds before the job's `round`. REQUIRES: no decision is for a later
// round.
uint64_t Branches::rounds_before(uint32_t number, const Branch& branch, uint64_t round) const {
  return branch.rounds + (number == running_ ? round - runs_.back().round : 0);
}

Branches::Decision Branches::decide(const BranchChange& change, uint32_t child, uint64_t lowest) {
  std::erase_if(orders_, [this, lowest](const BranchOrder& order) {
    const bool is_done = order.round <= lowest;
    if (is_done) carry_out(order, places_);
    return is_done;
  });
  while (runs_.size() > 1 && runs_[1].round <= lowest) runs_.erase(runs_.begin());
  std::erase_if(forks_, [lowest](const BranchFork& fork) { return fork.round < lowest; });
  std::erase_if(gone_, [this](const auto& gone) {
    return std::ranges::find(runs_, gone.first, &BranchRun::branch) == runs_.end();
  });
  check_room(change);
  Decision decision;
  switch (change.action) {
    case BranchAction::kFork:
      decision = fork(change, child);
      break;
    case BranchAction::kSchedule:
      decision = schedule(change);
      break;
    case BranchAction::kKill:
      decision = kill(change);
      break;
    case BranchAction::kRevive:
      decision = revive(change);
      break;
    default:
      decision = discard(change);
  }
  orders_.insert(orders_.end(), decision.orders.begin(), decision.orders.end());
  return decision;
}

void Branches::check_room(const BranchChange& change) const {
  if (change.action == BranchAction::kDiscard || change.action == BranchAction::kKill) return;
  const size_t more = std::max<size_t>(change.turns.size(), 1);
  // Each may change all hyperparameters; and a chunk carries out all of a round at once.
  const auto at_once =
      static_cast<size_t>(std::ranges::count(orders_, change.round, &BranchOrder::round));
  const bool fits = orders_.size() + more <= kMostBranchRuns &&
                    (orders_.size() + more) * groups_ <= HyperTable::kMostChanges &&
                    at_once < kOrdersOfRound * (shelves_ + 1);
  if (fits) return;
  fail(ErrorCode::kFull,
       "{} changes of branches are still to come, {} of them in round {}: wait for some of them",
       orders_.size(), at_once, change.round);
}

Branches::Decision Branches::fork(const BranchChange& change, uint32_t child) {
  const Branch& parent = find_alive(change.branch);
  if (change.values.contains(kGradScale)) {
    fail(ErrorCode::kInvalid,
         "{} tells what the ranks multiply gradients by, and is the same in all branches",
         kGradScale);
  }
  const uint32_t shelf = free_shelf();
  if (shelf == 0) fail_no_room();
  const uint64_t rounds = rounds_before(change.branch, parent, change.round);
  Branch branch{.parent = change.branch,
                .forked = change.round,
                .place = shelf,
                .rounds = rounds,
                .values = parent.values};
  shift(branch.values, offset_of(rounds, change.round));
  set_values(change.values, branch.values);
  shift(branch.values, -offset_of(rounds, change.round));
  if (optimizer_ == kernels::Optimizer::kNone) {
    branch.own = change.values;
    branch.own.insert(parent.own.begin(), parent.own.end());
  }
  Decision decision{.orders = {{.round = change.round,
                                .kind = BranchOrder::kCopy,
                                .from = parent.place,
                                .to = shelf,
                                .child = child}},
                    .hyper = {},
                    .records = {{.kind = LogRecord::Kind::kForked,
                                 .round = change.round,
                                 .values = change.values,
                                 .branch = child,
                                 .parent = change.branch}},
                    .last = change.round};
  branches_[child] = std::move(branch);
  forks_.push_back({.round = change.round, .branch = child, .parent = change.branch});
  return decision;
}

Branches::Decision Branches::schedule(const BranchChange& change) {
  constexpr uint64_t kMostRounds = uint64_t{1} << 20;  // the most in all turns but the last
  if (change.turns.empty()) fail(ErrorCode::kInvalid, "turns: there are none");
  uint64_t rounds_left = kMostRounds;
  for (size_t i = 0; i < change.turns.size(); ++i) {
    const auto& [branch, rounds] = change.turns[i];
    find_alive(branch);
    const bool is_last = i + 1 == change.turns.size();
    if (is_last ? rounds != 0 : rounds == 0 || rounds > rounds_left) {
      fail(ErrorCode::kInvalid, "turns[{}].rounds: must be {}, got {}", i,
           is_last ? "0, as the last turn goes on until another branch is scheduled"
                   : fmt::format("from 1 to {}, of all turns together", kMostRounds),
           rounds);
    }
    rounds_left -= rounds;
  }
  Decision decision;
  decision.last = change.round;
  for (size_t i = 0; i < change.turns.size(); ++i) {
    run(change.turns[i].branch, decision.last, decision);
    decision.last += change.turns[i].rounds;
  }
  return decision;
}

void Branches::run(uint32_t branch, uint64_t round, Decision& decision) {
  if (branch == running_) return;
  Branch& before = branches_.at(running_);
  Branch& after = branches_.at(branch);
  Values from = before.values, to = after.values;
  shift(from, offset_of(before.rounds, runs_.back().round));
  shift(to, offset_of(after.rounds, round));
  decision.orders.push_back(
      {.round = round, .kind = BranchOrder::kSwap, .from = 0, .to = after.place});
  for (HyperChange& change : hyper_difference(from, to, round)) {
    decision.records.push_back(
        {.kind = LogRecord::Kind::kHyper, .round = round, .values = change.values});
    decision.hyper.push_back(std::move(change));
  }
  decision.records.push_back(
      {.kind = LogRecord::Kind::kScheduled, .round = round, .branch = branch});
  before.rounds = rounds_before(running_, before, round);
  before.place = std::exchange(after.place, 0);
  running_ = branch;
  if (runs_.back().round == round) runs_.pop_back();  // it runs in no round
  runs_.push_back({.round = round, .branch = branch});
}

Branches::Decision Branches::discard(const BranchChange& change) {
  Branch& branch = find(change.branch);
  check_not_running(change.branch, "discarded");
  if (optimizer_ == kernels::Optimizer::kNone) gone_[change.branch] = std::move(branch.own);
  branches_.erase(change.branch);
  Decision decision;
  decision.records.push_back(
      {.kind = LogRecord::Kind::kDiscarded, .round = change.round, .branch = change.branch});
  decision.last = change.round;
  return decision;
}

void Branches::check_not_running(uint32_t branch, std::string_view what) const {
  if (branch != running_) return;
  fail(ErrorCode::kInvalid, "branch {} runs from round {} on: schedule another one before it is {}",
       branch, runs_.back().round, what);
}

void Branches::set(const HyperChange& change) {
  if (shelves_ == 0) return;
  if (const auto scale = change.values.find(kGradScale); scale != change.values.end()) {
    for (auto& [number, each] : branches_) set_values({{kGradScale, scale->second}}, each.values);
  }
  Branch& branch = branches_.at(running_);
  const double offset = offset_of(branch.rounds, runs_.back().round);
  shift(branch.values, offset);
  set_values(change.values, branch.values);
  shift(branch.values, -offset);
}

// Rounds by decisions for later rounds are not counted.
std::vector<BranchStatus> Branches::list(uint64_t in_progress) const {
  std::vector<BranchStatus> all;
  for (const auto& [number, branch] : branches_) {
    BranchStatus status{.branch = number,
                        .parent = branch.parent,
                        .round = branch.forked,
                        .rounds = branch.rounds,
                        .killed = branch.killed,
                        .on_disk = branch.place == kOnDisk,
                        .batch = static_cast<uint64_t>(branch.values.front().batch),
                        .values = branch.own};
    for (size_t i = 0; i < runs_.size(); ++i) {
      if (runs_[i].branch != number) continue;
      const uint64_t first = std::max(runs_[i].round, in_progress);
      const bool is_last = i + 1 == runs_.size();
      status.runs = status.runs || (runs_[i].round <= in_progress &&
                                    (is_last || in_progress < runs_[i + 1].round));
      if (is_last) {
        status.rounds += first - runs_[i].round;
      } else if (first < runs_[i + 1].round) {
        status.rounds -= std::min(status.rounds, runs_[i + 1].round - first);
      }
    }
    all.push_back(status);
  }
  return all;
}

std::vector<BranchGone> Branches::gone(uint64_t in_progress) const {
  const std::vector<BranchRun> ahead = runs(in_progress);
  std::vector<BranchGone> gone;
  for (const auto& [branch, values] : gone_) {
    if (std::ranges::find(ahead, branch, &BranchRun::branch) == ahead.end()) continue;
    gone.push_back({.branch = branch, .values = values});
  }
  return gone;
}

std::vector<BranchRun> Branches::runs(uint64_t in_progress) const {
  std::vector<BranchRun> runs = runs_;
  while (runs.size() > 1 && runs[1].round <= in_progress) runs.erase(runs.begin());
  return runs;
}

std::vector<BranchFork> Branches::forks(uint64_t in_progress) const {
  std::vector<BranchFork> forks = forks_;
  std::erase_if(forks, [=](const BranchFork& fork) { return fork.round < in_progress; });
  return forks;
}

}  // namespace phub

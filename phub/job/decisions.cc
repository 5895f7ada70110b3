#include "phub/job/decisions.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "phub/background.h"
#include "phub/core/hyper.h"

namespace phub {
namespace {

constexpr uint64_t kFarthestDecision = uint64_t{1} << 20;  // rounds ahead
constexpr uint32_t kSeveral = ~uint32_t{0};

}  // namespace

Decisions::Decisions(const JobSpec& spec) : spec_(spec), branches_(spec) {}

bool Decisions::begin() {
  hypers_.current = std::exchange(hypers_.waiting, {});
  of_branches_.current = std::exchange(of_branches_.waiting, {});
  return !hypers_.current.empty() || !of_branches_.current.empty();
}

// Changes of branches come last: hyperparameters are those of the branch that runs.
Decisions::Placed Decisions::place(const Rounds& rounds) {
  Placed placed;
  const auto refuse = [&placed](uint64_t token, const std::optional<Error>& refused) {
    if (refused) placed.refused.push_back({.token = token, .refused = refused});
    return refused.has_value();
  };
  std::erase_if(hypers_.current, [&](const Hyper& hyper) {
    return refuse(hyper.token, error_of([&] { check_distance(hyper.change.round, rounds); }));
  });
  std::erase_if(hypers_.current, [&](Hyper& hyper) {
    return refuse(hyper.token, error_of([&] { place(hyper, rounds); }));
  });
  for (const Hyper& hyper : hypers_.current) {
    if (hyper.is_new) placed.hyper.push_back(hyper.change);
  }
  std::erase_if(of_branches_.current, [&](OfBranches& of) {
    return refuse(of.token, error_of([&] { place(of, rounds, placed); }));
  });
  return placed;
}

void Decisions::check_distance(uint64_t round, const Rounds& rounds) const {
  if (round <= rounds.boundary + kFarthestDecision) return;
  fail(ErrorCode::kInvalid,
       "round {} is too far away: job '{}' is in round {}, and changes can be made up to {} rounds "
       "ahead",
       round, spec_.name, rounds.boundary, kFarthestDecision);
}

// The ranks have asked for the batch of a round before it begins.
void Decisions::place(Hyper& hyper, const Rounds& rounds) {
  const uint64_t first =
      hyper.change.values.contains(kBatchName) ? rounds.first_unbegun : rounds.boundary;
  hyper.change.round = std::max({hyper.change.round, first, last_});
  if (hyper.change.round > last_) of_last_.clear();
  last_ = hyper.change.round;
  check_same(hyper);
  remember(hyper);
  if (hyper.is_new) branches_.set(hyper.change);
}

void Decisions::place(OfBranches& of, const Rounds& rounds, Placed& placed) {
  BranchChange change = of.change;
  change.round = std::max({change.round, rounds.first_unbegun, last_});
  check_distance(change.round, rounds);
  Branches decided = branches_;  // if anything of this fails, nothing has changed
  Branches::Decision decision = decided.decide(change, of.child, rounds.lowest);
  placed.hyper.reserve(placed.hyper.size() + decision.hyper.size());
  placed.orders.reserve(placed.orders.size() + decision.orders.size());
  of.change.round = change.round;
  of.records = std::move(decision.records);
  last_ = decision.last;
  of_last_.clear();
  std::ranges::move(decision.hyper, std::back_inserter(placed.hyper));
  std::ranges::copy(decision.orders, std::back_inserter(placed.orders));
  branches_ = std::move(decided);
}

// Throws Error(kMismatch) if another rank has set another value for the same round.
void Decisions::check_same(const Hyper& hyper) const {
  for (const auto& [name, value] : hyper.change.values) {
    const auto found = of_last_.find(name);
    if (found == of_last_.end()) continue;
    const auto& [set, rank] = found->second;
    if (set == value || rank == hyper.rank) continue;
    fail(ErrorCode::kMismatch,
         "rank {} sets {} to {} from round {} on, and {} to {}: the ranks of a job set the same",
         hyper.rank, name, value, hyper.change.round,
         rank == kSeveral ? "other ranks" : fmt::format("rank {}", rank), set);
  }
}

void Decisions::remember(Hyper& hyper) {
  hyper.is_new = false;
  for (const auto& [name, value] : hyper.change.values) {
    const auto [found, is_new] = of_last_.try_emplace(name, SetValue{value, hyper.rank});
    SetValue& known = found->second;
    hyper.is_new = hyper.is_new || is_new || known.rank == hyper.rank;
    if (known.rank != hyper.rank) known.rank = kSeveral;
    known.value = value;
  }
}

std::vector<Decisions::Answer> Decisions::finish(MembershipLog& log) {
  std::vector<Answer> answers;
  for (const Hyper& hyper : std::exchange(hypers_.current, {})) {
    if (hyper.is_new) {
      log.add({.kind = LogRecord::Kind::kHyper,
               .round = hyper.change.round,
               .values = hyper.change.values});
    }
    answers.push_back({.token = hyper.token, .round = hyper.change.round, .refused = {}});
  }
  for (OfBranches& of : of_branches_.current) {
    for (LogRecord& record : of.records) log.add(std::move(record));
    answers.push_back({.token = of.token, .round = of.change.round, .refused = {}});
  }
  of_branches_.current.clear();
  return answers;
}

std::vector<uint64_t> Decisions::drop() {
  std::vector<uint64_t> tokens;
  const auto take = [&tokens](auto& queue) {
    for (auto* each : {&queue.waiting, &queue.current}) {
      for (const auto& asked : *each) tokens.push_back(asked.token);
      each->clear();
    }
  };
  take(hypers_);
  take(of_branches_);
  return tokens;
}

// Decisions may hold from a future round.
void Decisions::note(const LogRecord& record) {
  using Kind = LogRecord::Kind;
  switch (record.kind) {
    case Kind::kHyper:
    case Kind::kForked:
    case Kind::kScheduled:
    case Kind::kDiscarded:
    case Kind::kKilled:
    case Kind::kRevived:
      return note(record.round);
    default:
      return;
  }
}

void Decisions::restore(const Manifest& saved, const std::vector<uint64_t>& latest) {
  for (const HyperChange& change : saved.hyper) note(change.round);
  branches_.restore(saved);
  for (const BranchMove& move : saved.branches.moves) note(move.round);
  if (spec_.branches == 0) return;
  for (const uint64_t round : latest) note(round + 1);  // up to there, rounds have had their branch
}

}  // namespace phub

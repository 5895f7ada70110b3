// What is decided about branches, against a model in which every branch is a job of its own, with
// rounds of its own.
#include "phub/job/branches.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phub/background.h"
#include "phub/core/hyper.h"
#include "tests/oracle/reference.h"
#include "tests/seeds.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace branches_test {

using testing::expect_error;
using Turns = std::vector<BranchTurn>;

JobSpec spec_of(uint32_t branches, uint32_t groups = 1) {
  JobSpec spec;
  spec.name = "job";
  spec.optimizer = "momentum";
  spec.hyper = {{"lr", 0.5}, {"lr_exponential", 0.9}, {"lr_warmup", 3}};
  spec.branches = branches;
  for (uint32_t g = 0; g < groups; ++g) {
    spec.keys.push_back({.name = fmt::format("k{}", g), .elements = 1, .group = g});
  }
  return spec;
}

BranchChange fork_of(uint32_t parent, uint64_t round, std::map<std::string, double> values = {}) {
  return {
      .action = BranchAction::kFork, .round = round, .branch = parent, .values = std::move(values)};
}
BranchChange turns_of(uint64_t round, Turns turns) {
  return {.action = BranchAction::kSchedule, .round = round, .turns = std::move(turns)};
}
BranchChange discard_of(uint32_t branch, uint64_t round) {
  return {.action = BranchAction::kDiscard, .round = round, .branch = branch};
}

BranchChange kill_of(uint32_t branch, uint64_t round) {
  return {.action = BranchAction::kKill, .round = round, .branch = branch};
}
BranchChange revival_of(uint32_t branch, uint64_t round) {
  return {.action = BranchAction::kRevive, .round = round, .branch = branch, .is_loaded = true};
}

Manifest manifest_of(const Branches& branches, uint64_t round) {
  Manifest manifest;
  manifest.round = round;
  manifest.branches = branches.saved(round);
  return manifest;
}

// A branch as a job of its own: its hyperparameters by group, and how many rounds it has made.
struct OwnJob {
  std::vector<kernels::Hyper> values;
  uint64_t rounds = 0;
};

// Random decisions. What they do to the own jobs is kept as a list by round, and done later.
class Decisions {
 public:
  explicit Decisions(uint64_t seed)
      : random_(seed),
        spec_(spec_of(1 + below(3), 1 + below(3))),
        branches_(spec_),
        table_(spec_, kernels::Optimizer::kMomentum, key_classes(spec_)) {}

  void decide_something() {
    round_ += below(3);
    switch (below(8)) {
      case 0:
        return set();
      case 5:
        return kill(below(last_ + 2));
      case 6:
        return revive(below(last_ + 2));
      case 7:
        return save();
      case 1:
        return fork(below(last_ + 2));
      case 2:
        return discard(below(last_ + 2));
      default:
        return schedule();
    }
  }

  void check() {
    std::map<uint32_t, OwnJob> jobs;
    jobs[0].values.resize(hyper_groups(spec_),
                          kernels::default_hyper(kernels::Optimizer::kMomentum));
    for (kernels::Hyper& hyper : jobs[0].values) {
      hyper.lr = 0.5;
      hyper.lr_exponential = 0.9;
      hyper.lr_warmup = 3;
    }
    std::vector<uint32_t> in_place(spec_.branches + 1);  // which branch
    uint32_t running = 0;
    size_t event = 0, order = 0;
    for (uint64_t round = 1; round < round_ + 10; ++round) {
      for (; event < events_.size() && events_[event].first == round; ++event) {
        events_[event].second(jobs, running);
      }
      for (; order < orders_.size() && orders_[order].round == round; ++order) {
        carry_out(order, in_place);
      }
      ASSERT_EQ(in_place[0], running) << "round " << round;
      check_hyper_of(jobs.at(running), round);
      ++jobs.at(running).rounds;
      if (round >= restored_) check_list(round, jobs);
    }
    EXPECT_EQ(event, events_.size());
    EXPECT_EQ(order, orders_.size());
  }

  // The job goes on from a checkpoint after some round, which has gone through its text. What lies
  // at each place then is known from the orders.
  void restore() {
    const uint64_t round = restored_ + below(static_cast<uint32_t>(round_ + 4 - restored_));
    Manifest manifest;
    manifest.spec = spec_;
    manifest.round = round;
    manifest.branches = branches_.saved(round);
    std::vector<uint32_t> in_place(spec_.branches + 1, ~0u);
    in_place[0] = 0;
    std::vector<BranchOrder> later;
    for (const BranchOrder& order : orders_) {
      if (order.round > round + 1) {
        later.push_back(order);
      } else if (order.kind == BranchOrder::kSwap) {
        std::swap(in_place[0], in_place[order.to]);
      } else {
        in_place[order.to] = order.child;
      }
    }
    EXPECT_EQ(orders_of(manifest.branches.moves), later);
    std::set<uint32_t> in_files;
    for (SavedShelf& shelf : manifest.branches.shelves) {
      EXPECT_TRUE(in_files.insert(shelf.branch).second) << "branch " << shelf.branch;
      shelf.steps = {1};
      if (shelf.place == 0) {
        EXPECT_TRUE(killed_.contains(shelf.branch) && killed_.at(shelf.branch).on_disk);
      } else if (shelf.place <= spec_.branches) {
        EXPECT_EQ(shelf.branch, in_place.at(shelf.place));
      } else {
        const auto is_from_there = [&](const BranchOrder& order) {
          return order.kind == BranchOrder::kCopy && order.from == shelf.place &&
                 order.child == shelf.branch;
        };
        EXPECT_TRUE(std::ranges::any_of(later, is_from_there));
      }
    }
    for (auto& [branch, killed] : killed_) killed.on_disk |= killed.round <= round + 1;
    const Manifest read = parse_manifest(manifest_text(manifest));
    EXPECT_EQ(read, manifest);
    branches_ = Branches(spec_);
    branches_.restore(read);
    restored_ = round;
    round_ = std::max(round_, round + 2);
    EXPECT_EQ(branches_.saved(round).branches, manifest.branches.branches);
    EXPECT_EQ(branches_.saved(round).moves, manifest.branches.moves);
  }

  uint64_t switches = 0, from_disk = 0;

 private:
  using Event = std::function<void(std::map<uint32_t, OwnJob>& jobs, uint32_t& running)>;

  uint32_t below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }

  void carry_out(size_t order, std::vector<uint32_t>& in_place) const {
    const BranchOrder& now = orders_[order];
    if (now.kind == BranchOrder::kSwap) return std::swap(in_place[0], in_place[now.to]);
    if (now.from > spec_.branches) {
      EXPECT_EQ(now.from, spec_.branches + now.to);
      std::ranges::replace(in_place, now.child, ~0u);
      in_place[now.to] = now.child;
      return;
    }
    const auto& [child, parent] = forks_.at(order);
    EXPECT_EQ(in_place[now.from], parent);
    EXPECT_EQ(now.child, child);
    in_place[now.to] = child;
  }

  void check_hyper_of(const OwnJob& job, uint64_t round) const {
    for (uint32_t group = 0; group < job.values.size(); ++group) {
      const kernels::Hyper got = table_.view().of(round, group);
      const kernels::Hyper& want = job.values[group];
      ASSERT_EQ(got.lr, reference::learning_rate(want, job.rounds + 1)) << "round " << round;
      ASSERT_EQ(got.momentum, want.momentum) << "round " << round;
      ASSERT_EQ(got.weight_decay, want.weight_decay) << "round " << round;
    }
  }

  // As far as those go that are there now.
  void check_list(uint64_t complete, const std::map<uint32_t, OwnJob>& jobs) const {
    for (const BranchStatus& status : branches_.list(complete + 1)) {
      if (status.round > complete) continue;  // it is forked later
      ASSERT_EQ(status.rounds, jobs.at(status.branch).rounds)
          << "branch " << status.branch << " after round " << complete;
    }
    std::vector<BranchFork> to_come;
    for (const auto& [order, fork] : forks_) {
      const uint64_t round = orders_[order].round;
      if (round > complete) to_come.push_back({round, fork.first, fork.second});
    }
    ASSERT_EQ(branches_.forks(complete + 1), to_come) << "after round " << complete;
  }

  void take(const Branches::Decision& decision) {
    EXPECT_GE(decision.last, round_);
    table_.change(decision.hyper, 0);
    orders_.insert(orders_.end(), decision.orders.begin(), decision.orders.end());
    round_ = decision.last;
  }

  void set() {
    const double lr = 0.1 * (1 + below(9)), momentum = 0.1 * below(9);
    const HyperChange change{.round = round_, .values = {{"momentum", momentum}, {"lr", lr}}};
    branches_.set(change);
    table_.change({&change, 1}, 0);
    events_.emplace_back(round_, [=](auto& jobs, uint32_t& running) {
      for (kernels::Hyper& hyper : jobs.at(running).values) {
        hyper.lr = lr;
        hyper.momentum = momentum;
      }
    });
  }

  void fork(uint32_t parent) {
    const double decay = 0.25 * below(4);
    const uint32_t groups = hyper_groups(spec_), group = below(groups);
    const std::string name = groups > 1 ? fmt::format("weight_decay@{}", group) : "weight_decay";
    const uint32_t child = branches_.next();
    EXPECT_EQ(child, ++last_);
    const auto decide = [&] {
      take(branches_.decide(fork_of(parent, round_, {{name, decay}}), child, 0));
    };
    if (killed_.contains(parent)) return expect_error(ErrorCode::kInvalid, "revive it", decide);
    if (!alive_.contains(parent)) return expect_error(ErrorCode::kNotFound, "no branch", decide);
    if (!has_room()) return expect_error(ErrorCode::kFull, "no room", decide);
    decide();
    alive_.insert(child);
    forks_[orders_.size() - 1] = {child, parent};
    events_.emplace_back(round_, [=](auto& jobs, uint32_t&) {
      jobs[child] = jobs.at(parent);
      jobs[child].values[group].weight_decay = decay;
    });
  }

  void discard(uint32_t branch) {
    const auto decide = [&] { take(branches_.decide(discard_of(branch, round_), 0, 0)); };
    if (killed_.erase(branch) > 0) return decide();
    if (!alive_.contains(branch)) return expect_error(ErrorCode::kNotFound, "no branch", decide);
    if (branch == running_) return expect_error(ErrorCode::kInvalid, "schedule another", decide);
    decide();
    alive_.erase(branch);
    events_.emplace_back(round_, [branch](auto& jobs, uint32_t&) { jobs.erase(branch); });
  }

  // On shelves: those that are killed, too, until they are on disk.
  bool has_room() const {
    const auto waiting =
        std::ranges::count_if(killed_, [](const auto& killed) { return !killed.second.on_disk; });
    return alive_.size() + static_cast<size_t>(waiting) <= spec_.branches;
  }

  // To its own job nothing happens.
  void kill(uint32_t branch) {
    const auto decide = [&] { take(branches_.decide(kill_of(branch, round_), 0, 0)); };
    if (killed_.contains(branch)) {
      return expect_error(ErrorCode::kInvalid, "killed already", decide);
    }
    if (!alive_.contains(branch)) return expect_error(ErrorCode::kNotFound, "no branch", decide);
    if (branch == running_) return expect_error(ErrorCode::kInvalid, "schedule another", decide);
    decide();
    alive_.erase(branch);
    killed_[branch] = {.round = round_};
  }

  void revive(uint32_t branch) {
    const size_t orders = orders_.size();
    const auto decide = [&] { take(branches_.decide(revival_of(branch, round_), 0, 0)); };
    if (alive_.contains(branch)) return expect_error(ErrorCode::kInvalid, "is not killed", decide);
    if (!killed_.contains(branch)) return expect_error(ErrorCode::kNotFound, "no branch", decide);
    const bool on_disk = killed_.at(branch).on_disk;
    if (on_disk && !has_room()) return expect_error(ErrorCode::kFull, "no room", decide);
    // As all orders are still to come, a dock serves once.
    const std::optional<Error> refused = error_of(decide);
    if (refused) {
      EXPECT_EQ(refused->code(), ErrorCode::kFull) << refused->what();
      EXPECT_TRUE(on_disk && docks_ > 0) << refused->what();
      return;
    }
    EXPECT_EQ(orders_.size() - orders, on_disk ? 1u : 0u);
    docks_ += on_disk;
    from_disk += on_disk;
    killed_.erase(branch);
    alive_.insert(branch);
  }

  // A checkpoint is durable that is before all decisions to come.
  void save() {
    if (round_ < 2) return;
    const uint64_t round = round_ - 2;
    if (round < restored_) return;
    branches_.saved_durably(round);
    restored_ = round;
    for (auto& [branch, killed] : killed_) killed.on_disk |= killed.round <= round + 1;
    for (const auto& [branch, killed] : killed_) {
      EXPECT_EQ(branches_.is_on_disk(branch), killed.on_disk) << "branch " << branch;
    }
  }

  void schedule() {
    Turns turns;
    for (uint32_t left = 1 + below(5); left > 0; --left) {
      const auto at = std::next(alive_.begin(), below(static_cast<uint32_t>(alive_.size())));
      turns.push_back({*at, left > 1 ? 1 + below(3) : 0});
    }
    uint64_t round = round_;
    take(branches_.decide(turns_of(round, turns), 0, 0));
    for (const BranchTurn& turn : turns) {
      switches += turn.branch != running_;
      running_ = turn.branch;
      events_.emplace_back(round,
                           [branch = turn.branch](auto&, uint32_t& running) { running = branch; });
      round += turn.rounds;
    }
    EXPECT_EQ(round, round_);
  }

  std::mt19937_64 random_;
  const JobSpec spec_;
  Branches branches_;
  HyperTable table_;
  uint64_t round_ = 2;     // of the latest decision
  uint64_t restored_ = 0;  // it went on after this one
  uint32_t last_ = 0;      // number of a branch
  uint32_t running_ = 0;
  std::set<uint32_t> alive_ = {0};
  struct Killed {
    uint64_t round = 0;
    bool on_disk = false;
  };
  std::map<uint32_t, Killed> killed_;
  uint32_t docks_ = 0;  // that orders copy from
  std::vector<std::pair<uint64_t, Event>> events_;
  std::vector<BranchOrder> orders_;
  std::map<size_t, std::pair<uint32_t, uint32_t>> forks_;  // by order: child, parent
};

// Whether its job goes on from checkpoints or not: all that was decided stays, also what is still
// to come.
TEST(Branches, EachIsAJobOfItsOwn) {
  const testing::Seeds seeds = testing::fresh_seeds(testing::scaled(600));
  uint64_t switches = 0, from_disk = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    Decisions run(seed);
    for (int i = 0; i < 40; ++i) {
      run.decide_something();
      if (seed % 2 == 0 && i % 5 == 0) run.restore();
    }
    run.check();
    switches += run.switches;
    from_disk += run.from_disk;
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
  if (seeds.count < 600) return;
  EXPECT_GT(switches, seeds.count);
  EXPECT_GT(from_disk, 0u);
}

TEST(Branches, OlderCheckpointsHaveTheForksOfBranchesThatAreThere) {
  Branches branches(spec_of(3));
  branches.decide(fork_of(0, 3), branches.next(), 1);
  branches.decide(fork_of(0, 7), branches.next(), 1);
  branches.decide(fork_of(2, 7), branches.next(), 1);
  Manifest manifest = manifest_of(branches, 4);
  const std::vector<BranchFork> want = {{7, 2, 0}, {7, 3, 2}};
  EXPECT_EQ(manifest.branches.forks, want);
  manifest.branches.forks.clear();
  Branches restored(spec_of(3));
  restored.restore(manifest);
  EXPECT_EQ(restored.forks(5), want);
}

// What is in a file may have been changed.
TEST(Branches, WhatDoesNotFitIsRefused) {
  Branches branches(spec_of(2));
  branches.decide(fork_of(0, 3), branches.next(), 1);
  branches.decide(turns_of(4, {{1, 2}, {0, 1}, {1, 0}}), 0, 1);
  Manifest manifest = manifest_of(branches, 4);
  ASSERT_EQ(manifest.branches.moves.size(), 2u);
  Branches(spec_of(2)).restore(manifest);
  const auto refused = [&](const char* words, const std::function<void(SavedBranches&)>& change) {
    Manifest changed = manifest;
    change(changed.branches);
    expect_error(ErrorCode::kInvalid, words, [&] { Branches(spec_of(2)).restore(changed); });
  };
  refused("one is there twice", [](auto& saved) { saved.branches[1].branch = 0; });
  refused("one is not at its place", [](auto& saved) { saved.branches[0].place = 2; });
  refused("one is not at its place", [](auto& saved) { saved.branches[0].place = 200; });
  refused("one is not at its place", [](auto& saved) { saved.next = 1; });
  refused("one lies at two places", [](auto& saved) { saved.shelves[0].branch = 1; });
  refused("of shelves", [](auto& saved) { saved.shelves[0].place = 5; });
  refused("of shelves",
          [](auto& saved) { saved.shelves.push_back({.place = 3, .branch = 9, .steps = {}}); });
  refused("an order finds nothing", [](auto& saved) { saved.shelves.clear(); });
  refused("an order finds nothing", [](auto& saved) { saved.moves[0].to = 2; });
  refused("of orders", [](auto& saved) { saved.moves[0].to = 3; });
  refused("of orders", [](auto& saved) { saved.moves[0].round = 5; });
  refused("of orders", [](auto& saved) { std::swap(saved.moves[0], saved.moves[1]); });
  refused("of orders", [](auto& saved) {
    saved.moves.push_back({.round = 20, .copies = true, .from = 1, .to = 1});
  });
  refused("none runs", [](auto& saved) { saved.runs.back().branch = 0; });
  refused("none runs at first", [](auto& saved) { saved.runs.front().round = 6; });
  refused("of runs", [](auto& saved) { saved.runs.back().round = 3; });
  refused("of forks", [](auto& saved) { saved.forks = {{4, 1, 0}}; });
  refused("of forks", [](auto& saved) { saved.forks = {{6, 1, 0}, {5, 1, 0}}; });
  refused("of forks", [](auto& saved) { saved.forks = {{5, 1, 1}}; });
  refused("of forks", [](auto& saved) { saved.forks = {{5, 2, 0}}; });
  refused("there are none", [](auto& saved) { saved = {}; });
  refused("lr", [](auto& saved) { saved.branches[0].values["lr"] = -1; });
  refused("learning", [](auto& saved) { saved.branches[0].values["learning"] = 1; });
  expect_error(ErrorCode::kInvalid, "its job has none",
               [&] { Branches(spec_of(0)).restore(manifest); });
}

TEST(Branches, WhatIsOnDiskAndDoesNotFitIsRefused) {
  Branches branches(spec_of(2));
  branches.decide(fork_of(0, 3), branches.next(), 1);
  branches.decide(fork_of(0, 3), branches.next(), 1);
  branches.decide(kill_of(1, 4), 0, 1);
  branches.decide(kill_of(2, 4), 0, 1);
  branches.saved_durably(4);
  branches.decide(revival_of(2, 8), 0, 5);
  Manifest manifest = manifest_of(branches, 5);
  ASSERT_EQ(manifest.branches.moves.size(), 1u);
  EXPECT_EQ(manifest.branches.shelves,
            (std::vector<SavedShelf>{{.place = 3, .branch = 2, .steps = {}},
                                     {.place = 0, .branch = 1, .steps = {}}}));
  Branches(spec_of(2)).restore(manifest);
  const auto refused = [&](const char* words, const std::function<void(SavedBranches&)>& change) {
    Manifest changed = manifest;
    change(changed.branches);
    expect_error(ErrorCode::kInvalid, words, [&] { Branches(spec_of(2)).restore(changed); });
  };
  refused("an order finds nothing",
          [](auto& saved) { saved.shelves.erase(saved.shelves.begin()); });
  refused("an order finds nothing", [](auto& saved) { saved.moves[0].from = 4; });
  refused("an order finds nothing", [](auto& saved) { saved.moves[0].to = 2; });
  refused("an order finds nothing", [](auto& saved) { saved.moves[0].child = 1; });
  refused("one is in no file", [](auto& saved) { saved.shelves.pop_back(); });
  refused("one lies at two places", [](auto& saved) { saved.shelves.push_back(saved.shelves[0]); });
  refused("of shelves", [](auto& saved) { saved.shelves[0].place = 5; });
  refused("of shelves", [](auto& saved) { saved.branches[1].killed = 7; });
  refused("one that is killed runs", [](auto& saved) { saved.branches[0].killed = 9; });
  refused("one is in no file", [](auto& saved) { saved.branches[0].killed = 6; });
}

TEST(Branches, AsManyAsCanBeKilledAre) {
  Branches branches(spec_of(1));
  for (uint32_t i = 0; i < kMostKilledBranches; ++i) {
    const uint32_t child = branches.next();
    branches.decide(fork_of(0, 3 + i), child, 3 + i);
    branches.decide(kill_of(child, 3 + i), 0, 3 + i);
    EXPECT_FALSE(branches.wants_checkpoint(0, 1 + i));
    EXPECT_TRUE(branches.wants_checkpoint(0, 2 + i));
    branches.saved_durably(2 + i);
    EXPECT_FALSE(branches.wants_checkpoint(0, 2 + i));
  }
  branches.decide(fork_of(0, 300), branches.next(), 300);
  expect_error(ErrorCode::kFull, "255 branches are killed, which is the limit",
               [&] { branches.decide(kill_of(256, 300), 0, 300); });
  EXPECT_EQ(branches.list(300).size(), kMostKilledBranches + 2u);
  Manifest manifest = manifest_of(branches, 300);
  Branches(spec_of(1)).restore(manifest);
}

TEST(Branches, OneThatComesBackOftenLiesAtOnePlace) {
  Branches branches(spec_of(2));
  branches.decide(fork_of(0, 3), branches.next(), 1);
  const auto kill = [&](uint64_t round) {
    branches.decide(kill_of(1, round), 0, 1);
    branches.saved_durably(round);
  };
  kill(4);
  branches.decide(revival_of(1, 6), 0, 1);
  kill(8);
  EXPECT_EQ(branches.decide(revival_of(1, 10), 0, 1).orders,
            (std::vector<BranchOrder>{{10, BranchOrder::kCopy, 4, 2, 1}}))
      << "the first dock is not empty";
  EXPECT_EQ(branches.saved(12).shelves,
            (std::vector<SavedShelf>{{.place = 2, .branch = 1, .steps = {}}}));
  kill(12);
  expect_error(ErrorCode::kFull, "wait for that round",
               [&] { branches.decide(revival_of(1, 14), 0, 1); });
  branches.decide(revival_of(1, 14), 0, 10);
}

// Whatever else is decided meanwhile, or not.
TEST(Branches, ThereIsRoomForOneAgainWhenAllHaveCopiedTheOneBefore) {
  Branches branches(spec_of(1));
  branches.decide(fork_of(0, 3), branches.next(), 1);
  branches.decide(kill_of(1, 4), 0, 1);
  expect_error(ErrorCode::kFull, "wait until it is on disk", [&] { branches.shelf_for_one(5); });
  branches.saved_durably(4);
  branches.shelf_for_one(5);
  branches.decide(revival_of(1, 8), 0, 5);
  branches.decide(kill_of(1, 9), 0, 6);
  branches.saved_durably(9);
  expect_error(ErrorCode::kFull, "wait for that round", [&] { branches.shelf_for_one(7); });
  branches.shelf_for_one(8);
}

TEST(Branches, TheLogSaysWhatTheCoresDo) {
  Branches branches(spec_of(2));
  const Branches::Decision forked = branches.decide(fork_of(0, 5, {{"lr", 0.25}}), 1, 4);
  EXPECT_EQ(forked.orders, (std::vector<BranchOrder>{{5, BranchOrder::kCopy, 0, 1, 1}}));
  EXPECT_TRUE(forked.hyper.empty()) << "it does not run yet";
  EXPECT_EQ(forked.records, (std::vector<LogRecord>{{.kind = LogRecord::Kind::kForked,
                                                     .round = 5,
                                                     .values = {{"lr", 0.25}},
                                                     .branch = 1,
                                                     .parent = 0}}));
  const Branches::Decision turns = branches.decide(turns_of(7, {{1, 3}, {0, 0}}), 0, 4);
  EXPECT_EQ(turns.orders, (std::vector<BranchOrder>{{7, BranchOrder::kSwap, 0, 1},
                                                    {10, BranchOrder::kSwap, 0, 1}}));
  EXPECT_EQ(turns.last, 10u);
  ASSERT_EQ(turns.hyper.size(), 2u);
  // Of the child round 7 is its fifth, as it began to differ before its parent's fifth.
  EXPECT_EQ(turns.hyper[0], (HyperChange{7, {{"lr", 0.25}, {"lr_rounds_before", -2}}}));
  EXPECT_EQ(turns.hyper[1], (HyperChange{10, {{"lr", 0.5}, {"lr_rounds_before", -3}}}));
  ASSERT_EQ(turns.records.size(), 4u);
  EXPECT_EQ(turns.records[0].values, turns.hyper[0].values);
  EXPECT_EQ(turns.records[1],
            (LogRecord{.kind = LogRecord::Kind::kScheduled, .round = 7, .branch = 1}));
  EXPECT_EQ(branches.runs(6), (std::vector<BranchRun>{{1, 0}, {7, 1}, {10, 0}}));
  EXPECT_EQ(branches.runs(8), (std::vector<BranchRun>{{7, 1}, {10, 0}}));
}

TEST(Branches, WhatIsToComeIsBounded) {
  Branches branches(spec_of(1));
  branches.decide(fork_of(0, 2), 1, 1);
  Turns turns;
  for (size_t i = 0; i < kMostBranchTurns; ++i) turns.push_back({i % 2 == 0 ? 1u : 0u, 1});
  turns.back().rounds = 0;
  uint64_t round = 3;
  for (size_t i = 0; i + 1 < kMostBranchRuns / kMostBranchTurns; ++i) {
    round = branches.decide(turns_of(round, turns), 0, 1).last + 1;
  }
  turns.resize(kMostBranchTurns - 1);
  turns.back().rounds = 0;
  round = branches.decide(turns_of(round, turns), 0, 1).last;
  expect_error(ErrorCode::kFull, "1024 changes of branches are still to come", [&] {
    branches.decide(turns_of(round, {{0, 1}, {1, 0}}), 0, 1);
  });
  branches.decide(turns_of(round, {{0, 1}, {1, 0}}), 0, 10);  // some are done
}

// A chunk carries out all orders of a round at once.
TEST(Branches, WhatComesInOneRoundIsBounded) {
  Branches branches(spec_of(1));
  for (uint32_t child = 1; child <= 32; ++child) {
    branches.decide(fork_of(0, 4), child, 1);
    branches.decide(discard_of(child, 4), 0, 1);
  }
  expect_error(ErrorCode::kFull, "32 of them in round 4",
               [&] { branches.decide(fork_of(0, 4), 33, 1); });
  branches.decide(fork_of(0, 5), 33, 1);
}

// Where ranks have the optimizer: those that begin a round later than others begin it alike.
TEST(Branches, ValuesOfADiscardedBranchStayUntilItsRoundsAreOver) {
  JobSpec spec = spec_of(2);
  spec.optimizer = "none";
  spec.hyper.clear();
  Branches branches(spec);
  branches.decide(fork_of(0, 2, {{"lr", 0.5}}), 1, 1);
  branches.decide(fork_of(1, 2), 2, 1);
  branches.decide(turns_of(3, {{1, 2}, {2, 1}, {0, 0}}), 0, 1);
  branches.decide(discard_of(1, 6), 0, 1);
  branches.decide(discard_of(2, 6), 0, 1);
  const BranchGone first{1, {{"lr", 0.5}}}, second{2, {{"lr", 0.5}}};
  EXPECT_EQ(branches.list(3).size(), 1u);
  EXPECT_EQ(branches.gone(4), (std::vector<BranchGone>{first, second}));
  EXPECT_EQ(branches.gone(5), std::vector<BranchGone>{second});
  branches.decide(fork_of(0, 7), 3, 4);
  EXPECT_EQ(branches.gone(3), (std::vector<BranchGone>{first, second}));
  EXPECT_EQ(branches.gone(6), std::vector<BranchGone>());
  branches.decide(discard_of(3, 7), 0, 6);
  EXPECT_EQ(branches.gone(4), std::vector<BranchGone>()) << "it was in no round";
  expect_error(ErrorCode::kNotFound, "no branch 1",
               [&] { branches.decide(discard_of(1, 8), 0, 6); });
}

TEST(Branches, TheScaleOfGradientsIsThatOfAll) {
  Branches branches(spec_of(1));
  branches.decide(fork_of(0, 2), 1, 1);
  branches.set({.round = 2, .values = {{"grad_scale", 8}, {"lr", 0.25}}});
  const auto there = branches.decide(turns_of(3, {{1, 0}}), 0, 1);
  ASSERT_EQ(there.hyper.size(), 1u);
  EXPECT_FALSE(there.hyper[0].values.contains("grad_scale"));
  EXPECT_TRUE(there.hyper[0].values.contains("lr"));
  expect_error(ErrorCode::kInvalid, "the same in all branches", [&] {
    branches.decide(fork_of(0, 4, {{"grad_scale", 2}}), 2, 1);
  });
}

TEST(Branches, TurnsThatAreNotWhatTheyShouldBeChangeNothing) {
  Branches branches(spec_of(1));
  branches.decide(fork_of(0, 2), 1, 1);
  const auto refused = [&](ErrorCode code, const char* words, const Turns& turns) {
    expect_error(code, words, [&] { branches.decide(turns_of(3, turns), 0, 1); });
  };
  refused(ErrorCode::kInvalid, "there are none", {});
  refused(ErrorCode::kInvalid, "turns[0].rounds: must be 0, as the last", {{1, 4}});
  refused(ErrorCode::kInvalid, "turns[0].rounds: must be from 1 to", {{1, 0}, {0, 0}});
  refused(ErrorCode::kInvalid, "turns[1].rounds", {{1, 1u << 20}, {0, 1}, {1, 0}});
  refused(ErrorCode::kNotFound, "no branch 2", {{1, 1}, {2, 0}});
  EXPECT_EQ(branches.runs(3), (std::vector<BranchRun>{{1, 0}}));
}

// Of learning rates that depend on the round, each branch has its own rounds; so has what is set.
TEST(Branches, RoundsBeforeTheJobAreOfTheBranch) {
  Branches branches(spec_of(1));
  branches.decide(fork_of(0, 3), 1, 1);
  branches.decide(turns_of(3, {{1, 0}}), 0, 1);
  branches.set({.round = 5, .values = {{"lr_rounds_before", 10}}});  // its round 5 is the 15th
  const auto there = branches.decide(turns_of(6, {{0, 2}, {1, 0}}), 0, 1);
  ASSERT_EQ(there.hyper.size(), 2u);
  EXPECT_EQ(there.hyper[0].values, (std::map<std::string, double>{{"lr_rounds_before", -3}}));
  EXPECT_EQ(there.hyper[1].values, (std::map<std::string, double>{{"lr_rounds_before", 8}}));
}

}  // namespace branches_test
}  // namespace phub

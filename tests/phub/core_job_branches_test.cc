// Branches on a core: orders, and what is copied or set between rounds beside them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "tests/phub/core_job_rig.h"
#include "tests/phub/core_script.h"
#include "tests/seeds.h"

namespace phub {
namespace core_job_branches_test {

using ::testing::ElementsAre;
using Rig = testing::CoreJobRig;

const std::vector<uint32_t> kRanks = {0, 1, 2};
constexpr uint32_t kChunks = 5, kElements = 64, kShelves = 2;

// Results in f32 are the parameters themselves; in 16 bits they have memory of their own.
Rig::Options options(kernels::DType results = kernels::DType::kF32) {
  return {.parameters = {.max_ranks = 3,
                         .rules = {.optimizer = kernels::Optimizer::kMomentum,
                                   .parameter_dtype = results}},
          .chunks = kChunks,
          .elements = kElements,
          .snapshots = true,
          .shelves = kShelves};
}

// A branch of one chunk: all elements are the same.
struct State {
  float parameter = 0, momentum = 0;
  uint64_t steps = 0;

  friend bool operator==(const State&, const State&) = default;
};

// lr 1, momentum 0.5: all numbers are exact.
void step(State& state, float sum) {
  state.momentum = 0.5f * state.momentum + sum;
  state.parameter -= state.momentum;
  ++state.steps;
}

// From here on these are carried out.
uint64_t order(Rig& rig, const std::vector<BranchOrder>& orders, Boundary boundary = {}) {
  rig.hyper.front().values.momentum = 0.5;
  boundary.round = rig.job->hold().round;
  boundary.hyper = rig.view(rig.hyper);
  boundary.orders = orders;
  rig.job->commit(boundary);
  return boundary.round;
}

float gradient(uint32_t rank, uint32_t chunk, uint64_t round) {
  return static_cast<float>(1 + rank + 3 * chunk + 31 * round);
}

void push_round(Rig& rig, uint32_t chunk, uint64_t round) {
  for (const uint32_t rank : kRanks) rig.push(rank, chunk, round, gradient(rank, chunk, round));
}

// By place: what runs, and the shelves.
std::vector<State> places_of(const Rig& rig, uint32_t chunk, uint64_t round) {
  const uint32_t id = kChunks - 1 - chunk;
  std::vector<State> places = {{.steps = round}};
  for (uint32_t shelf = 0; shelf < kShelves; ++shelf) {
    places.push_back({.steps = rig.shelves.steps[shelf][id]});
  }
  for (uint32_t place = 0; place < places.size(); ++place) {
    places[place].parameter = rig.at(place, Places::kParameters, chunk);
    places[place].momentum = rig.at(place, Places::kState0, chunk);
  }
  return places;
}

std::vector<State> copies_of(const Rig& rig, uint32_t chunk) {
  const size_t at = size_t{chunk} * kElements;
  const uint32_t id = kChunks - 1 - chunk;
  std::vector<State> places = {{rig.copy_parameters[at], rig.copy_state[at], rig.copy_steps[id]}};
  const Rig::Shelves& shelves = rig.copied_shelves;
  for (uint32_t shelf = 0; shelf < kShelves; ++shelf) {
    places.push_back({shelves.arrays[2 * shelf][at], shelves.arrays[2 * shelf + 1][at],
                      shelves.steps[shelf][id]});
  }
  return places;
}

void carry_out(const BranchOrder& order, std::vector<State>& places) {
  if (order.kind == BranchOrder::kCopy) {
    places[order.to] = places[order.from];
  } else {
    std::swap(places[0], places[order.to]);
  }
}

constexpr uint64_t kRounds = 8;

// All places of a chunk before a round.
std::vector<State> places_before(uint64_t round, uint32_t chunk,
                                 const std::vector<BranchOrder>& orders) {
  std::vector<State> places(1 + kShelves);
  for (uint64_t r = 1; r < round; ++r) {
    step(places[0], gradient(0, chunk, r) + gradient(1, chunk, r) + gradient(2, chunk, r));
    for (const BranchOrder& order : orders) {
      if (order.round == r + 1) carry_out(order, places);
    }
  }
  return places;
}

// A snapshot of a round has all places as they are when the round begins, whatever order the ranks
// and chunks come in, and whatever is ordered for later rounds.
class RandomSnapshots {
 public:
  explicit RandomSnapshots(uint64_t seed)
      : random_(seed), rig_(options(seed % 2 == 0 ? kernels::DType::kF32 : kernels::DType::kBF16)) {
    for (uint64_t round = 2; seed % 3 > 0 && round <= kRounds; ++round) {
      const auto to = static_cast<uint32_t>(1 + random_() % kShelves);
      if (random_() % 3 == 0) orders_.push_back({round, BranchOrder::kCopy, 0, to});
      if (random_() % 2 == 0) orders_.push_back({round, BranchOrder::kSwap, 0, to});
    }
    wanted_ = 2 + random_() % (kRounds - 1);
    order(rig_, orders_, {.snapshot = true, .snapshot_round = wanted_});
  }

  void run() {
    while (left_ > 0) {
      push(static_cast<uint32_t>(random_() % 3), static_cast<uint32_t>(random_() % kChunks));
      if (random_() % 3 == 0) rig_.job->step();
      if (wanted_ == 0 && random_() % 40 == 0) begin_snapshot();
      check_reports();
    }
    rig_.run();
    check_reports();
    EXPECT_TRUE(wanted_ == 0 || wanted_ > kRounds + 1);
    EXPECT_GT(snapshots_, 0u);
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const std::vector<State> want = places_before(kRounds + 1, chunk, orders_);
      EXPECT_EQ(places_of(rig_, chunk, want[0].steps), want) << "chunk " << chunk;
    }
  }

 private:
  // Each rank is in a round of its own of every chunk, at most one that is not complete.
  void push(uint32_t rank, uint32_t chunk) {
    auto& rounds = pushed_[chunk];
    const uint64_t slowest = std::ranges::min(rounds);
    if (rounds[rank] != slowest || slowest == kRounds) return;
    --left_;
    ++rounds[rank];
    rig_.push(rank, chunk, rounds[rank], gradient(rank, chunk, rounds[rank]));
    if (std::ranges::min(rounds) > slowest) rig_.run();
  }
  void begin_snapshot() {
    wanted_ = rig_.job->hold().round;
    Boundary boundary{.round = wanted_, .snapshot = true};
    boundary.snapshot_round = random_() % 2 == 0 ? 0 : wanted_ + random_() % 3;
    wanted_ = std::max(wanted_, boundary.snapshot_round);
    rig_.job->commit(boundary);
  }
  void check_reports() {
    const auto reports = rig_.take_reports();
    if (reports.empty()) return;
    EXPECT_THAT(reports, ElementsAre(fmt::format("snapped @{}", wanted_)));
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_EQ(copies_of(rig_, chunk), places_before(wanted_, chunk, orders_))
          << "chunk " << chunk;
    }
    std::ranges::fill(rig_.copy_parameters, -1);
    std::ranges::fill(rig_.copy_state, -1);
    wanted_ = 0;
    ++snapshots_;
  }

  std::mt19937_64 random_;
  Rig rig_;
  std::vector<BranchOrder> orders_;
  std::array<std::array<uint64_t, 3>, kChunks> pushed_ = {};
  uint64_t left_ = 3 * kChunks * kRounds;
  uint64_t wanted_ = 0;  // of the snapshot that is under way; 0: none is
  uint64_t snapshots_ = 0;
};

TEST(CoreJobBranches, ASnapshotHasThemAsTheyAreBeforeItsRound) {
  const testing::Seeds seeds = testing::fresh_seeds(200);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    RandomSnapshots(seed).run();
    if (::testing::Test::HasFailure()) return;
  }
}

// Everybody is gone, and who comes begins two rounds later: nobody is in the round between. What is
// set for it, and what a snapshot has of it, is of the branch that runs in it, and not of that
// which runs behind it.
TEST(CoreJobBranches, WhatIsSetBeforeARoundThatIsSkippedIsOfTheBranchOfThatRound) {
  testing::play_core(R"(
    job half-momentum chunks=5 snapshots shelves=2 | order copy@2:0>1 | pushes 1
    is 0=-21/21/0 | shelf-is 0 0=-21/21/1 | forget-posts | hold 2
    commit 2 copy@2:0>1 swap@3:0>1 -0 -1 -2 +0.2@4 +1.2@4 +2.2@4 snapshot set:0=5/7/40
    told snapped @2, set @2
    # As it was before the set; of other chunks nothing was set.
    copied 0-4=-21/21/1 | shelf-copied 0 0-4=-21/21/1
    # Branch 0, which runs in round 2, has what was set; it made no step in that round, which counts.
    shelf-is 0 0=5/7/41 | shelf-is 0 1-4=-21/21/2 | is 0-4=-21/21/0
  )");
}

// What orders copy is in the core's account of a pass: other jobs have as much.
TEST(CoreJobBranches, WhatIsCopiedCounts) {
  using Orders = std::vector<BranchOrder>;
  const auto bytes_of_a_round = [](const Orders& orders, kernels::DType results) {
    Rig rig(options(results));
    order(rig, orders);
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) push_round(rig, chunk, 1);
    uint64_t bytes = 0;
    while (rig.job->step(bytes)) {
    }
    return bytes;
  };
  const uint64_t array = kChunks * kElements * sizeof(float);
  const Orders fork = {{2, BranchOrder::kCopy, 0, 1}};
  const Orders both = {{2, BranchOrder::kCopy, 0, 1}, {2, BranchOrder::kSwap, 0, 1}};
  for (const auto results : {kernels::DType::kF32, kernels::DType::kBF16}) {
    const uint64_t without = bytes_of_a_round({}, results);
    // A copy reads and writes the parameters and a state. Of two that change places only parameters
    // do so, both ways, that ranks read where they lie.
    const uint64_t copied = without + 2 * 2 * array;
    EXPECT_EQ(bytes_of_a_round(fork, results), copied);
    EXPECT_EQ(bytes_of_a_round(both, results),
              copied + (results == kernels::DType::kF32 ? 4 * array : 0));
  }
}

}  // namespace core_job_branches_test
}  // namespace phub

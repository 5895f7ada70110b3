// Snapshots: every chunk is copied as it is between two rounds, whatever comes at whatever time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/phub/core_job_rig.h"
#include "tests/seeds.h"

namespace phub {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Rig = testing::CoreJobRig;

const std::vector<uint32_t> kRanks = {0, 1, 2};
constexpr uint32_t kChunks = 9;

Rig::Options options() {
  return {.parameters = {.max_ranks = 3, .optimizer = kernels::Optimizer::kMomentum},
          .chunks = kChunks,
          .snapshots = true};
}

// Different in every round, chunk and rank.
float value(uint32_t rank, uint32_t chunk, uint64_t round) {
  return static_cast<float>(1 + rank + 3 * chunk + 31 * round);
}

std::vector<float> parameters_of(const Rig& rig) {
  const auto* floats = reinterpret_cast<const float*>(rig.results.data());
  return {floats, floats + rig.results.size() / sizeof(float)};
}

// What a job that has completed these rounds and nothing else holds.
void expect_copy_of(const Rig& rig, uint64_t rounds) {
  Rig other(options());
  for (uint64_t round = 1; round <= rounds; ++round) {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      for (const uint32_t rank : kRanks) other.push(rank, chunk, round, value(rank, chunk, round));
    }
    other.run();
  }
  EXPECT_EQ(rig.copy_parameters, parameters_of(other)) << "before round " << rounds + 1;
  EXPECT_EQ(rig.copy_state, other.state) << "before round " << rounds + 1;
  EXPECT_THAT(rig.copy_steps, Each(rounds));
}

uint64_t snapshot(Rig& rig) {
  const CoreReport held = rig.job->hold();
  rig.job->commit({.round = held.round, .snapshot = true});
  return held.round;
}

TEST(CoreJobSnapshot, IsOfOneRoundWhateverComesWhen) {
  const testing::Seeds seeds = testing::fresh_seeds(100);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    Rig rig(options());
    constexpr uint64_t kRounds = 8;
    // Each rank is in a round of its own of every chunk, at most one that is not complete.
    std::vector<std::vector<uint64_t>> pushed(3, std::vector<uint64_t>(kChunks, 0));
    std::vector<uint64_t> snapshots;
    uint64_t round = 0;
    const auto all = [&] {
      return std::ranges::all_of(pushed, [](const auto& of_rank) {
        return std::ranges::all_of(of_rank, [](uint64_t r) { return r == kRounds; });
      });
    };
    while (!all()) {
      const auto rank = static_cast<uint32_t>(random() % 3);
      const auto chunk = static_cast<uint32_t>(random() % kChunks);
      uint64_t& mine = pushed[rank][chunk];
      const uint64_t slowest = std::min({pushed[0][chunk], pushed[1][chunk], pushed[2][chunk]});
      if (mine < kRounds && mine == slowest) {
        ++mine;
        rig.push(rank, chunk, mine, value(rank, chunk, mine));
      }
      if (random() % 3 == 0) rig.job->step();
      if (std::min({pushed[0][chunk], pushed[1][chunk], pushed[2][chunk]}) > slowest) rig.run();
      if (round == 0 && random() % 40 == 0) round = snapshot(rig);
      const auto reports = rig.take_reports();
      if (reports.empty()) continue;
      EXPECT_THAT(reports, ElementsAre(fmt::format("snapped @{}", round)));
      expect_copy_of(rig, round - 1);
      std::ranges::fill(rig.copy_parameters, -1);
      std::ranges::fill(rig.copy_state, -1);
      snapshots.push_back(std::exchange(round, 0));
    }
    EXPECT_TRUE(std::ranges::is_sorted(snapshots));
    EXPECT_FALSE(snapshots.empty());
  }
}

TEST(CoreJobSnapshot, IsTakenWhileTheCoreIsIdle) {
  Rig rig(options());
  snapshot(rig);
  EXPECT_FALSE(rig.job->arm()) << "there is something to copy";
  EXPECT_TRUE(rig.job->step());
  EXPECT_THAT(rig.take_reports(), IsEmpty()) << "a chunk at a time: what arrives does not wait";
  rig.run();
  EXPECT_FALSE(rig.job->arm()) << "there is something to report";
  EXPECT_THAT(rig.take_reports(), ElementsAre("snapped @1"));
  EXPECT_TRUE(rig.job->arm());
  EXPECT_THAT(rig.take_reports(), IsEmpty()) << "once";
  expect_copy_of(rig, 0);
}

TEST(CoreJobSnapshot, WaitsForChunksThatAreBehind) {
  Rig rig(options());
  const auto push = [&rig](uint32_t chunk) {
    for (const uint32_t rank : kRanks) rig.push(rank, chunk, 1, value(rank, chunk, 1));
    rig.run();
  };
  for (uint32_t chunk = 1; chunk < kChunks; ++chunk) push(chunk);
  EXPECT_EQ(snapshot(rig), 2u) << "some chunks have completed round 1";
  rig.run();
  EXPECT_THAT(rig.take_reports(), IsEmpty()) << "chunk 0 has not";
  EXPECT_TRUE(rig.job->arm()) << "and nothing can be done about it";
  push(0);
  EXPECT_THAT(rig.take_reports(), ElementsAre("snapped @2"));
  expect_copy_of(rig, 1);
}

// Chunks are copied when they come to it, not before.
TEST(CoreJobSnapshot, MayBeOfALaterRound) {
  Rig rig(options());
  const CoreReport held = rig.job->hold();
  ASSERT_EQ(held.round, 1u);
  rig.job->commit({.round = held.round, .snapshot = true, .snapshot_round = 4});
  for (uint64_t round = 1; round <= 5; ++round) {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      for (const uint32_t rank : kRanks) rig.push(rank, chunk, round, value(rank, chunk, round));
    }
    rig.run();
    if (round < 3) {
      EXPECT_THAT(rig.take_reports(), IsEmpty()) << "after round " << round;
    }
  }
  EXPECT_THAT(rig.take_reports(), ElementsAre("snapped @4"));
  expect_copy_of(rig, 3);
}

TEST(CoreJobSnapshot, OfAJobThatHasNothingToSaveIsComplete) {
  Rig::Options nothing = options();
  nothing.snapshots = false;
  Rig rig(std::move(nothing));
  snapshot(rig);
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("snapped @1"));
}

// Memory for the state of all chunks but the last, in an order of its own.
struct StateMemory {
  explicit StateMemory(float parameter, float state) : floats(2 * kChunks * kElements) {
    memory.floats = floats.data();
    memory.places.resize(kChunks);
    for (uint32_t id = 0; id + 1 < kChunks; ++id) {
      memory.places[id] = {.first = 2 * kElements * id, .stride = kElements, .steps = 40};
      std::fill_n(floats.begin() + 2 * kElements * id, kElements, parameter);
      std::fill_n(floats.begin() + 2 * kElements * id + kElements, kElements, state);
    }
  }
  static constexpr uint32_t kElements = 64;
  std::vector<float> floats;
  KeyStateMemory memory;
};

void push_round(Rig& rig, uint32_t chunk, uint64_t round) {
  for (const uint32_t rank : kRanks) rig.push(rank, chunk, round, value(rank, chunk, round));
}

// Until the round is closed nobody's parameters change. A snapshot of it is of before what is set,
// a get of after that.
TEST(CoreJobKeyStates, AreSetWhenTheirRoundIsClosed) {
  Rig rig(options());
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) push_round(rig, chunk, 1);
  rig.run();
  for (uint32_t chunk = 0; chunk < 4; ++chunk) push_round(rig, chunk, 2);
  rig.run();

  const StateMemory from(5, 2);
  StateMemory to(-1, -1), untouched(-1, -1);
  for (KeyStateMemory::Place& place : to.memory.places) place.steps = 0;
  ASSERT_EQ(rig.job->hold().round, 3u);
  rig.job->commit({.round = 3, .snapshot = true, .set_state = &from.memory});
  ASSERT_EQ(rig.job->hold().round, 3u);
  rig.job->commit({.round = 3, .get_state = &to.memory});
  rig.run();
  EXPECT_THAT(rig.take_reports(), IsEmpty());  // some chunks are in round 2
  EXPECT_NE(to.floats, untouched.floats);
  EXPECT_NE(to.floats, from.floats);
  for (uint32_t chunk = 4; chunk < kChunks; ++chunk) push_round(rig, chunk, 2);
  rig.run();
  EXPECT_FALSE(rig.job->arm());
  EXPECT_THAT(rig.take_reports(), ElementsAre("snapped @3", "got @3"));
  EXPECT_TRUE(rig.job->arm());
  expect_copy_of(rig, 2);
  EXPECT_EQ(parameters_of(rig), rig.copy_parameters);
  EXPECT_EQ(rig.state, rig.copy_state);
  EXPECT_EQ(to.floats, from.floats);
  for (uint32_t id = 0; id + 1 < kChunks; ++id) EXPECT_EQ(to.memory.places[id].steps, 40u) << id;

  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) push_round(rig, chunk, 3);
  rig.run();
  EXPECT_FALSE(rig.job->arm());
  EXPECT_THAT(rig.take_reports(), ElementsAre("set @3"));
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    const size_t first = size_t{chunk} * StateMemory::kElements;
    const bool was_set = chunk != 0;  // its id is the last
    const float sum = value(0, chunk, 3) + value(1, chunk, 3) + value(2, chunk, 3);
    const float momentum = 0.9f * (was_set ? 2 : rig.copy_state[first]) + sum;
    EXPECT_EQ(rig.state[first], momentum) << chunk;
    EXPECT_EQ(rig.result(chunk), (was_set ? 5 : rig.copy_parameters[first]) - momentum) << chunk;
  }
}

// What comes before the core is idle is closed after the copy.
TEST(CoreJobKeyStates, AreCopiedBeforeTheirRoundIsClosed) {
  Rig rig(options()), before(options());
  for (uint64_t round = 1; round <= 2; ++round) {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      for (Rig* each : {&rig, &before}) push_round(*each, chunk, round);
    }
    rig.run();
    before.run();
  }
  StateMemory to(-1, -1);
  const uint64_t round = rig.job->hold().round;
  rig.job->commit({.round = round, .get_state = &to.memory});
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) push_round(rig, chunk, round);
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("got @3"));
  for (uint32_t id = 0; id + 1 < kChunks; ++id) EXPECT_EQ(to.memory.places[id].steps, 2u) << id;
  for (uint32_t chunk = 1; chunk < kChunks; ++chunk) {  // the id of chunk 0 is the last
    const size_t first = size_t{chunk} * StateMemory::kElements;
    const size_t copy = 2 * StateMemory::kElements * (kChunks - 1 - chunk);
    EXPECT_EQ(to.floats[copy], before.result(chunk)) << chunk;
    EXPECT_EQ(to.floats[copy + StateMemory::kElements], before.state[first]) << chunk;
  }
}

// Everybody is gone before some chunks come to the round, and who comes begins behind it: nobody
// closes the round, and the newcomer gets what was set.
TEST(CoreJobKeyStates, AreSetInARoundThatIsSkipped) {
  Rig rig(options());
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) push_round(rig, chunk, 1);
  rig.run();
  const StateMemory from(5, 2);
  ASSERT_EQ(rig.job->hold().round, 2u);
  rig.job->commit({.round = 3, .set_state = &from.memory});
  rig.run();
  rig.take_posts();
  EXPECT_THAT(rig.take_reports(), IsEmpty());

  std::vector<uint64_t> last_rounds(kChunks);
  Boundary boundary{.round = 5};
  for (const uint32_t rank : kRanks) {
    boundary.lost.push_back({.rank = rank, .last_rounds = last_rounds});
  }
  boundary.admitted.push_back(rig.admission(0, 2, 5));
  rig.job->hold();
  rig.job->commit(boundary);
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("set @3"));
  EXPECT_EQ(rig.take_posts().size(), kChunks);
  for (uint32_t chunk = 1; chunk < kChunks; ++chunk) {  // of chunk 0 nothing is set
    EXPECT_EQ(rig.result(chunk), 5) << chunk;
    EXPECT_EQ(rig.state[size_t{chunk} * StateMemory::kElements], 2) << chunk;
  }
}

}  // namespace
}  // namespace phub

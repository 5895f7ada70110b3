// Jobs whose gradients are added in groups of ranks, on a whole box: every rank sees the bytes of a
// process that adds them in this order alone.
#include "tests/oracle/groups.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"

namespace phub {
namespace groups_test {

using testing::Box;
using testing::each_rank;
using testing::expect_error;
using testing::grouped_spec;
using testing::GroupedTraining;
using testing::Results;

// All ranks train. What each saw is what one process computes. Returns whether other bits came
// without groups.
bool differs_from_flat(Box& box, const GroupedTraining& run) {
  SCOPED_TRACE(
      fmt::format("{}, groups {}, PHUB_SEED={}", run.spec.name, run.spec.groups, run.seed));
  const auto seen = train(run, [&](uint32_t) { return box.options(run.spec); });
  const std::vector<LogRecord> log = box.log(run.spec.name);
  const std::vector<Results> want = alone(run, run.spec, log);
  for (uint32_t rank = 0; rank < run.spec.world_size; ++rank) {
    EXPECT_TRUE(seen[rank] == want) << "rank " << rank;
  }
  JobSpec flat = run.spec;
  flat.groups.clear();
  return alone(run, flat, log) != want;
}

TEST(Groups, EveryTreeGivesTheBytesOfOneProcess) {
  const auto seeds = testing::fresh_seeds(6);
  Box box("pack:2 core:2 pu:1");
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937_64 random(seed);
    const auto ranks = static_cast<uint32_t>(3 + random() % 6);
    const std::string groups =
        reference::some_groups(ranks, [&random](uint64_t n) { return random() % n; });
    GroupedTraining run{.spec = grouped_spec(fmt::format("tree{}", seed), ranks, groups),
                        .seed = seed,
                        .has_nulls = random() % 2 == 0};
    if (random() % 2 == 0) run.spec.optimizer = "adam";
    if (random() % 2 == 0) run.spec.reduction = "mean";
    const char* const kTypes[] = {"f32", "bf16", "f16", "fp8-e5m2", "int8", "int4"};
    run.spec.gradient_dtype = kTypes[random() % 6];
    run.spec.parameter_dtype = kTypes[random() % 3];
    if (random() % 2 == 0) run.spec.rounding = "stochastic";
    differs_from_flat(box, run);
  }
}

TEST(Groups, ThreeLevelsGiveOtherBitsThanTwoAndOne) {
  Box box(2);
  const GroupedTraining run{.spec = grouped_spec("three", 8, "(2,2),(2,2)"), .seed = 5};
  EXPECT_TRUE(differs_from_flat(box, run));
  const std::vector<LogRecord> log = box.log("three");
  JobSpec two = run.spec;
  two.groups = "4,4";
  EXPECT_NE(alone(run, run.spec, log), alone(run, two, log));
}

TEST(Groups, ClippedRoundsAndRoundsThatAreSkipped) {
  Box box(2);
  GroupedTraining run{.spec = grouped_spec("gated", 5, "2,(1,2)"), .seed = 9};
  run.spec.optimizer = "adam";
  run.spec.hyper = {{"max_norm", 10}};
  run.spec.on_nonfinite = "skip";
  EXPECT_TRUE(differs_from_flat(box, run));
}

// Ranks that never come have their places.
TEST(Groups, OfRanksThatAreNotThere) {
  Box box(2);
  GroupedTraining run{.spec = grouped_spec("spare", 3, "1,(1,4)"), .seed = 3};
  run.spec.max_ranks = 6;
  EXPECT_TRUE(differs_from_flat(box, run));
}

TEST(Groups, WhatCannotBeIsRefused) {
  Box box;
  const auto refused = [&](ErrorCode code, const char* what,
                           const std::function<void(JobSpec&)>& change) {
    JobSpec spec = grouped_spec("refused", 1, "1");
    change(spec);
    expect_error(code, what, [&] { Worker worker(box.options(spec)); });
  };
  refused(ErrorCode::kInvalid, "groups order the sum of a round, and with consistency 'async'",
          [](JobSpec& spec) { spec.consistency = "async"; });
  refused(ErrorCode::kInvalid, "with consistency 'ssp' there are none: it must be bsp",
          [](JobSpec& spec) { spec.consistency = "ssp"; });
  refused(ErrorCode::kInvalid, "groups: '1' has 1 ranks, and max_ranks is 2",
          [](JobSpec& spec) { spec.max_ranks = 2; });
  refused(ErrorCode::kInvalid, "groups: expected", [](JobSpec& spec) { spec.groups = "one"; });

  JobSpec spec = grouped_spec("agreed", 1, "1,2");
  spec.max_ranks = 3;
  const Worker worker(box.options(spec));
  spec.groups = "2,1";
  expect_error(ErrorCode::kMismatch, "groups is '2,1' here and '1,2' in the job",
               [&] { Worker other(box.options(spec)); });
}

}  // namespace groups_test
}  // namespace phub

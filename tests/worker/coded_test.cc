// Gradients in coded formats: residuals belong to a rank, and what is not finite leaves them alone.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/oracle/replay.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"
#include "worker/gradient_coder.h"

namespace phub {
namespace {

using testing::alone;
using testing::Box;
using testing::each_rank;
using testing::expect_error;
using testing::grouped_spec;
using testing::GroupedTraining;
using testing::Results;
using testing::results_of;

constexpr const char* kFormats[] = {"fp8-e4m3", "fp8-e5m2", "int8", "int4", "topk"};

// In every other round some chunks of some ranks have a NaN; some keys have no gradient.
TEST(Coded, WhatIsNotFiniteLeavesResidualsAlone) {
  const auto seeds = testing::fresh_seeds(1);
  Box box(2);
  for (const char* format : kFormats) {
    for (const char* policy : {"exclude", "pass", "skip"}) {
      GroupedTraining run{.spec = grouped_spec(fmt::format("{}-{}", format, policy), 3, ""),
                          .seed = seeds.first,
                          .has_nulls = true,
                          .has_nans = true,
                          .rounds = 10};
      SCOPED_TRACE(fmt::format("{}, PHUB_SEED={}", run.spec.name, run.seed));
      run.spec.keys[0].format = format;
      run.spec.on_nonfinite = policy;
      run.spec.rounding = run.seed % 2 == 0 ? "stochastic" : "nearest";
      // What passes must not stay: in sums of one round it does not.
      run.spec.optimizer = run.spec.on_nonfinite == "pass" ? "none" : "sgd";
      const auto seen = train(run, [&](uint32_t) { return box.options(run.spec); });
      const std::vector<Results> want = alone(run, run.spec, box.log(run.spec.name));
      for (uint32_t rank = 0; rank < run.spec.world_size; ++rank) {
        for (size_t i = 0; i < run.rounds; ++i) {
          EXPECT_TRUE(seen[rank][i] == want[i]) << "rank " << rank << ", round " << i + 1;
        }
      }
    }
  }
}

// One worker after another has rank 1: it leaves, or is replaced.
TEST(Coded, WhoTakesOverARankBeginsWithoutResiduals) {
  Box box(2);
  for (const bool replaced : {false, true}) {
    GroupedTraining run{
        .spec = grouped_spec(replaced ? "replaced" : "left", 2, ""), .seed = 11, .rounds = 6};
    SCOPED_TRACE(run.spec.name);
    run.spec.keys[0].format = "int4";
    run.spec.keys[1].format = "topk";
    run.spec.optimizer = "momentum";
    const auto join = [&](uint32_t rank, bool replace) {
      WorkerOptions options = box.options(run.spec);
      options.rank = static_cast<int32_t>(rank);
      options.replace = replace;
      options.await_ranks = false;
      return std::make_unique<Worker>(options);
    };
    std::vector<std::unique_ptr<Worker>> workers;
    for (uint32_t rank = 0; rank < 2; ++rank) workers.push_back(join(rank, false));
    std::vector<Results> seen;
    const auto train_together = [&](uint64_t first, uint64_t last) {
      each_rank(2, [&](uint32_t rank) {
        workers[rank]->wait_all();
        for (uint64_t round = first; round <= last; ++round) {
          train_round(run, *workers[rank], rank, round);
          if (rank == 0) seen.push_back(results_of(*workers[0]));
        }
      });
    };
    train_together(1, 3);
    if (!replaced) workers[1]->leave();
    workers[1] = join(1, replaced);
    ASSERT_EQ(workers[1]->first_round(), 4u);
    train_together(4, run.rounds);
    const std::vector<Results> want = alone(run, run.spec, box.log(run.spec.name));
    for (size_t i = 0; i < run.rounds; ++i) {
      EXPECT_TRUE(seen[i] == want[i]) << "round " << i + 1;
    }
    workers.clear();
    EXPECT_TRUE(box.becomes_empty());
  }
}

TEST(GradientCoder, RestoresWhatItSavedAndNothingElse) {
  JoinReply reply;
  reply.spec.name = "job";
  reply.spec.keys = {{.name = "a", .elements = 33, .format = "int4"},
                     {.name = "b", .elements = 1000},
                     {.name = "c", .elements = 5, .format = "topk"}};
  GradientCoder coder(reply);
  EXPECT_TRUE(coder.codes(0) && !coder.codes(1) && coder.codes(2));
  EXPECT_EQ(coder.gradient(0).size(), 33u);
  EXPECT_EQ(coder.residual_bytes(), 38 * sizeof(float));
  EXPECT_EQ(coder.residuals(), std::vector<std::byte>(coder.residual_bytes()));
  std::vector<std::byte> saved(coder.residual_bytes());
  for (size_t i = 0; i < saved.size(); ++i) saved[i] = static_cast<std::byte>(i);
  coder.restore(saved);
  EXPECT_EQ(coder.residuals(), saved);
  for (const size_t bytes : {size_t{0}, saved.size() - 4, saved.size() + 4, size_t{1033 * 4}}) {
    expect_error(
        ErrorCode::kInvalid,
        fmt::format("the saved residuals of this rank have {} bytes, and its keys 152", bytes),
        [&] { coder.restore(std::vector<std::byte>(bytes)); });
  }
  EXPECT_EQ(coder.residuals(), saved);
}

}  // namespace
}  // namespace phub

// Rounds that are applied as a whole: clipped to a norm, or skipped. Every rank sees the bytes of a
// process that computes alone, and is told the same of every round (any_job_test: in every format,
// with every optimizer).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"

namespace phub {
namespace gated_test {

using testing::Box;
using testing::each_rank;
using testing::expect_error;
using testing::GroupedTraining;

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 5000, .priority = 1},
               {.name = "b", .elements = 7, .lr_scale = 0.5},
               {.name = "c", .elements = 640}};
  spec.world_size = ranks;
  spec.chunk_elements = 96;
  spec.optimizer = "adam";
  spec.reduction = "mean";
  spec.hyper = {{"lr", 0.01}, {"weight_decay", 0.001}};
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

// The optimizer's steps are rounds without those that were skipped, which are all even ones here.
TEST(Gated, StepsThatWereSkippedAreNotCounted) {
  Box box(2);
  GroupedTraining run{.spec = spec_of("steps", 1), .has_nans = true};
  run.spec.on_nonfinite = "skip";
  Worker worker(box.options(run.spec));
  worker.wait_all();
  const uint64_t steps[] = {1, 1, 2, 40, 41};  // after each round; 40 is set after the third
  for (uint64_t round = 1; round <= 5; ++round) {
    train_round(run, worker, 0, round);
    std::vector<float> p(7), m(7), v(7);
    KeyState state{.key = 1, .arrays = {p, m, v}};
    EXPECT_EQ(worker.get_state({&state, 1}), round);
    EXPECT_EQ(state.step, steps[round - 1]) << "round " << round;
    if (round != 3) continue;
    state.step = 40;
    worker.set_state({&state, 1});
  }
}

// What nobody has a gradient of is none of the optimizer's steps, also behind a gate, and in rounds
// that are skipped.
TEST(Gated, UnusedKeysAreLeftOut) {
  Box box(2);
  for (const bool skips : {false, true}) {
    GroupedTraining run{.spec = spec_of(fmt::format("unused{}", skips), 1),
                        .has_nulls = true,
                        .has_nans = skips,
                        .rounds = 9};
    run.spec.unused = "skip";
    run.spec.hyper["max_norm"] = 20;
    if (skips) run.spec.on_nonfinite = "skip";
    Worker worker(box.options(run.spec));
    worker.wait_all();
    for (uint64_t round = 1, steps = 0; round <= run.rounds; ++round) {
      train_round(run, worker, 0, round);
      if (!run.is_null(0, round, 2) && !worker.verdict()->skipped) ++steps;
      std::vector<float> p(640), m(640), v(640);
      KeyState state{.key = 2, .arrays = {p, m, v}};
      EXPECT_EQ(worker.get_state({&state, 1}), round);
      EXPECT_EQ(state.step, steps) << "round " << round;
      EXPECT_EQ(worker.verdict()->skipped, skips && round % 2 == 0);
    }
  }
}

// A result waits for all keys: who waits for one before it pushed another learns what is missing.
TEST(Gated, AKeyThatIsLeftOutIsNamed) {
  Box box(2);
  JobSpec spec = spec_of("left-out", 2);
  spec.hyper["max_norm"] = 1;
  spec.progress_limit_ms = 20'000;  // after a tenth of it the server is asked who is missing
  each_rank(2, [&](uint32_t r) {
    WorkerOptions options = box.options(spec, r);
    options.wait_timeout_ms = 5'000;
    Worker worker(options);
    worker.wait_all();
    worker.push(0);
    worker.push(1);
    expect_error(ErrorCode::kTimeout, "has not sent key 'c' of round 1", [&] { worker.wait(0); });
    worker.push(2);
    worker.wait_all();
    EXPECT_EQ(worker.verdict()->round, 1u);
    worker.barrier();
  });
}

}  // namespace gated_test
}  // namespace phub

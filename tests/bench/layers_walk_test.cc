// Nodes of bench/ladder over a box: when layers are pushed, and that what comes back is checked.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bench/layers/walk.h"
#include "tests/worker/box.h"

namespace phub::layers {
namespace layers_walk_test {

using phub::testing::Box;
using phub::testing::each_rank;

constexpr uint32_t kRanks = 3;

Net small_net() {
  return {.table = {.name = "small",
                    .keys = {{.name = "a.weight", .elements = 9000, .shape = {}},
                             {.name = "b.weight", .elements = 40 * 30, .shape = {40, 30}},
                             {.name = "b.bias", .elements = 40, .shape = {40}},
                             {.name = "c.weight", .elements = 20 * 50, .shape = {20, 50}}}},
          .layers = {{.name = "a", .keys = {0}, .matrix = {}, .connections = 5},
                     {.name = "b", .keys = {1, 2}, .matrix = 1, .connections = 2},
                     {.name = "c", .keys = {3}, .matrix = 3, .connections = 1}}};
}

WorkerOptions options_of_rank(const Box& box, const JobSpec& spec, uint32_t rank) {
  WorkerOptions options = box.options(spec);
  options.rank = static_cast<int32_t>(rank);
  return options;
}

// Of all ranks.
std::vector<WalkResult> walked(const std::string& name, const WalkOptions& options,
                               JobSpec spec = {}) {
  const Net net = small_net();
  spec.name = name;
  spec.world_size = kRanks;
  spec.lease_ms = 60'000;
  spec = job_of(net, options, spec);
  Box box(2);
  std::vector<WalkResult> results(kRanks);
  each_rank(kRanks, [&](uint32_t rank) {
    Worker worker(options_of_rank(box, spec, rank));
    worker.broadcast({});
    results[rank] = walk(net, options, worker);
    worker.barrier();
  });
  return results;
}

WalkOptions quick() { return {.compute_s = 0.03, .warmup = 1, .iterations = 4}; }

TEST(LayersWalk, WithOverlapEveryLayerIsPushedBeforeTheOneBelowIsDone) {
  for (const WalkResult& result : walked("overlap", quick())) {
    EXPECT_EQ(result.layers, 4u * 2);
    EXPECT_EQ(result.pushed_early, result.layers);
    EXPECT_EQ(result.wrong, 0u);
    EXPECT_GE(result.iteration_s, 0.03);
  }
}

TEST(LayersWalk, WithoutNoneIs) {
  WalkOptions options = quick();
  options.overlap = false;
  for (const WalkResult& result : walked("no-overlap", options)) {
    EXPECT_EQ(result.pushed_early, 0u);
    EXPECT_EQ(result.back_early, 0u);
    EXPECT_EQ(result.wrong, 0u);
  }
}

TEST(LayersWalk, OutOfLockStepResultsAreWithinTheSlack) {
  JobSpec spec;
  spec.consistency = "ssp";
  spec.slack = 2;
  for (const WalkResult& result : walked("slack", quick(), spec)) EXPECT_EQ(result.wrong, 0u);
}

TEST(LayersWalk, ProductsAreMadeOrTakeTheirTime) {
  WalkOptions options = quick();
  options.as_factors = {1, 2};
  options.samples = 4;
  for (const WalkResult& result : walked("made", options)) EXPECT_EQ(result.wrong, 0u);

  const Net net = small_net();
  const double flop = product_flop(net, 1, kRanks, 4) + product_flop(net, 2, kRanks, 4);
  EXPECT_EQ(flop, 2.0 * kRanks * 4 * (40 * 30 + 20 * 50));
  options.product_flops = flop / 0.05;
  for (const WalkResult& result : walked("timed", options)) {
    EXPECT_EQ(result.wrong, 0u);
    EXPECT_GE(result.iteration_s, 0.03 + 0.05);
  }
}

// A rank that sends something else than it should: all see it.
// One key has another gradient, and one has that of the first round in all of them.
TEST(LayersWalk, WhatIsNoSumOfTheRoundIsWrong) {
  const Net net = small_net();
  const WalkOptions options = quick();
  JobSpec spec;
  spec.name = "wrong";
  spec.world_size = 2;
  spec.lease_ms = 60'000;
  spec = job_of(net, options, spec);
  Box box(1);
  each_rank(2, [&](uint32_t rank) {
    Worker worker(options_of_rank(box, spec, rank));
    worker.broadcast({});
    if (rank == 0) {
      const uint64_t rounds = options.warmup + options.iterations;
      EXPECT_EQ(walk(net, options, worker).wrong, rounds + rounds - 1);
    } else {
      for (uint64_t round = 1; round <= options.warmup + options.iterations; ++round) {
        for (size_t key = 0; key < worker.keys(); ++key) {
          const float right = 2 * scale_of(key == 0 ? 1 : round);
          std::ranges::fill(worker.gradient(key), key == 2 ? 0.5F : right);
          worker.push(key);
        }
        worker.wait_all();
      }
    }
    worker.barrier();
  });
}

}  // namespace layers_walk_test
}  // namespace phub::layers

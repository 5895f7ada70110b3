// Branches on a core: orders, and what is copied or set between rounds beside them.
#include <gtest/gtest.h>

#include <vector>

#include "tests/phub/core_job_rig.h"
#include "tests/phub/core_script.h"

namespace phub {
namespace core_job_branches_test {

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

// From here on these are carried out.
uint64_t order(Rig& rig, const std::vector<BranchOrder>& orders, Boundary boundary = {}) {
  rig.hyper.front().values.momentum = 0.5;
  boundary.round = rig.job->hold().round;
  boundary.hyper = rig.view(rig.hyper);
  boundary.orders = orders;
  rig.job->commit(boundary);
  return boundary.round;
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
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) rig.push_all(kRanks, chunk, 1);
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

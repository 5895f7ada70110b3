// As many ranks as a job may have, in one rack or over many: all of them join, exchange, and leave.
#include <gtest/gtest.h>

#include <string>

#include "tests/sim/rack.h"
#include "transport/wire.h"

namespace phub::sim {
namespace scale_test {

RackPlan plan_of(uint32_t ranks, const std::string& optimizer) {
  RackPlan plan;
  plan.seed = ranks;
  plan.clean = true;
  plan.cores = 2;
  plan.net.seed = ranks;
  JobPlan job;
  job.seed = 7;
  job.rounds = 2;
  job.lockstep = true;
  job.spec.name = "large";
  job.spec.chunk_elements = 32;
  job.spec.keys = {{.name = "a", .elements = 70}, {.name = "b", .elements = 1}};
  job.spec.world_size = job.spec.max_ranks = ranks;
  job.spec.optimizer = optimizer;
  job.spec.on_loss = "fail";
  plan.jobs.push_back(job);
  return plan;
}

// The oracle adds up all gradients in rank order and compares every result of every rank.
void exchange(uint32_t ranks, const std::string& optimizer) {
  const RackPlan plan = plan_of(ranks, optimizer);
  const RackResult result = run_rack(plan);
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.admitted, ranks);
  EXPECT_EQ(result.lost, 0u);
  // Every rank looks at every chunk before the first round and after each.
  constexpr uint64_t kChunks = 4;
  EXPECT_EQ(result.observations, uint64_t{ranks} * kChunks * (plan.jobs[0].rounds + 1));
}

TEST(ScaleTest, AThousandRanksJoinExchangeAndLeave) { exchange(1000, "none"); }

TEST(ScaleTest, AsManyAsThereMayBe) { exchange(kMaxRanks, "nesterov"); }

TEST(ScaleTest, AThousandRanksGoOnWithoutThoseThatAreLost) {
  RackPlan plan = plan_of(1000, "sgd");
  plan.clean = false;
  JobPlan& job = plan.jobs[0];
  job.rounds = 3;
  job.spec.on_loss = "shrink";
  for (const uint32_t rank : {0u, 63u, 64u, 500u, 999u}) {
    job.faults.push_back({.kind = Fault::kCrash, .rank = rank, .after_pushes = 3});
  }
  const RackResult result = run_rack(plan);
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.admitted, 1000u);
  EXPECT_EQ(result.lost, 5u);
}

TEST(ScaleTest, AThousandRanksOverThreeLevelsBelowARootWithEightMoreBoxes) {
  const RackPlan plan = thousand_ranks(1000);
  const RackResult result = run_rack(plan);
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.admitted, 1000u);
  EXPECT_EQ(result.lost, 0u);
  EXPECT_EQ(result.spread_jobs, 1u);
  EXPECT_EQ(result.racks_admitted, 5u);
  constexpr uint64_t kChunks = 14;
  EXPECT_EQ(result.observations, 1000 * kChunks * (plan.jobs[0].rounds + 1));
}

}  // namespace scale_test
}  // namespace phub::sim

// Whom a job waits for, as its cores' answers to a probe have it together.
#include "phub/job/meter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "numa/topology.h"
#include "phub/plan/plan.h"

namespace phub {
namespace meter_test {

using ::testing::ElementsAre;

class MeterTest : public ::testing::Test {
 protected:
  MeterTest() {
    meters_.cores.resize(2);
    for (uint32_t core = 0; core < 2; ++core) meter_.probe(core).min_round = 5;
  }
  // On this core, for chunk 0.
  void lacks(uint32_t core, uint32_t rank, uint64_t round) {
    Probe& probe = meter_.probe(core);
    probe.waited_for[rank / 64] |= uint64_t{1} << rank % 64;
    probe.lacks[rank].add({.chunks = 1, .chunk = 0, .round = round});
  }
  std::vector<uint32_t> waited_for() {
    const Probe all = meter_.collect(0);
    std::vector<uint32_t> ranks;
    for (uint32_t r = 0; r < spec_.max_ranks; ++r) {
      if (all.waited_for[r / 64] >> r % 64 & 1) ranks.push_back(r);
    }
    return ranks;
  }

  const JobSpec spec_ = {.name = "job",
                         .keys = {{.name = "key", .elements = 20'000}},
                         .world_size = 70,
                         .max_ranks = 70};
  const Plan plan_ =
      make_plan(numa::from_synthetic("pack:1 core:2 pu:1"), spec_.keys, {.ranks = spec_.max_ranks});
  BoxMeters meters_;
  JobMeter meter_{plan_, spec_, "tcp", {0, 1}, meters_, 0};
};

TEST_F(MeterTest, NobodyLacks) { EXPECT_THAT(waited_for(), ElementsAre()); }

TEST_F(MeterTest, WhoLacksInOneRoundIsWaitedForWhicheverCoreSaysSo) {
  lacks(0, 3, 6), lacks(1, 66, 6);
  EXPECT_THAT(waited_for(), ElementsAre(3, 66));
}

// Rank 3 pushed all of round 5 and waits for rank 66, which did not; others are in round 6 already.
TEST_F(MeterTest, WhoLacksInALaterRoundOnlyMayWaitItself) {
  lacks(0, 3, 6), lacks(0, 66, 6), lacks(1, 66, 5);
  EXPECT_THAT(waited_for(), ElementsAre(66));
}

// Of a rank's chunks, all cores together; parts of those that are still to come do not count.
TEST_F(MeterTest, ContributionsAreChunks) {
  for (uint32_t core = 0; core < 2; ++core) {
    meter_.probe(core).arrivals[3] = 20 + core;
    meter_.probe(core).parts[3] = 500;
  }
  EXPECT_EQ(meter_.collect(0).parts[3], 1000u);
  JobStatus status;
  status.ranks = {{.rank = 3}, {.rank = 4}};
  meter_.add_to(status);
  EXPECT_EQ(status.ranks[0].contributions, 41u);
  EXPECT_EQ(status.ranks[1].contributions, 0u);
}

}  // namespace meter_test
}  // namespace phub

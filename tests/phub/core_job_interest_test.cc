// Ranks that are idle at a chunk, or do not read it; and chunks at which all are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/phub/core_job_rig.h"

namespace phub::testing {
namespace core_job_interest_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr ChunkInterest kIdle{.writes = false, .reads = false};
constexpr ChunkInterest kWrites{.writes = true, .reads = false};
constexpr ChunkInterest kReads{.writes = false, .reads = true};
constexpr ChunkInterest kBoth;

// Two chunks. `interest`: of each rank, in chunk 0 and 1; empty: everything.
using Interests = std::vector<std::vector<ChunkInterest>>;
struct Rig : CoreJobRig {
  Rig(const Interests& interest, kernels::Optimizer optimizer, bool mean)
      : CoreJobRig({.parameters = {.max_ranks = 3, .optimizer = optimizer, .mean = mean},
                    .chunks = 2,
                    .admit = false}),
        of(interest) {
    for (std::vector<ChunkInterest>& each : of) std::ranges::reverse(each);  // by id
    Boundary boundary{.round = 1};
    for (const uint32_t rank : {0, 1, 2}) boundary.admitted.push_back(with(rank, 1, 1));
    job->hold();
    job->commit(boundary);
  }
  Boundary::Admitted with(uint32_t rank, uint32_t incarnation, uint64_t first_round) {
    Boundary::Admitted admitted = admission(rank, incarnation, first_round);
    admitted.interest = of[rank];
    return admitted;
  }
  // The boundary's round.
  uint64_t hold() { return job->hold().round; }

  Interests of;
};

TEST(CoreJobInterest, WhoIsIdleIsCountedAndNotWaitedFor) {
  Rig rig({{kWrites, kBoth}, {kReads, kBoth}, {kIdle, kBoth}}, kernels::Optimizer::kNone, true);
  EXPECT_THAT(rig.take_posts(),
              UnorderedElementsAre("0:0@0", "1:0@0", "2:0@0", "0:1@0", "1:1@0", "2:1@0"));
  rig.push(0, 0, 1, 12);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty()) << "the reader may be reading";
  rig.arrive(1, {0, 1, ImmKind::kNull});
  rig.run();
  EXPECT_EQ(rig.result(0), 4) << "of three";
  ASSERT_EQ(rig.endpoint.posted.size(), 2u);
  for (const auto& [rank, write] : rig.endpoint.posted) {
    EXPECT_EQ(decode(write.imm).kind, rank == 0 ? ImmKind::kNull : ImmKind::kData);
    EXPECT_EQ(write.bytes, rank == 0 ? 0u : 64 * sizeof(float));
  }
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "1:0@1"));
  rig.arrive(2, {0, 2, ImmKind::kNull});
  rig.run();
  CoreReport report;
  ASSERT_TRUE(rig.job->next_report(report));
  EXPECT_EQ(report.type, CoreReport::kViolation);
  EXPECT_EQ(report.violation, CoreReport::kInterest);
  EXPECT_EQ(report.rank, 2u);
}

// Who could not be told that he is in, as his queue was full, is told so later.
TEST(CoreJobInterest, WhoIsIdleIsToldOfTheRoundBeforeHisFirst) {
  Rig rig({{kBoth, kBoth}, {kIdle, kBoth}, {kIdle, kBoth}}, kernels::Optimizer::kNone, false);
  rig.take_posts();
  rig.hold();
  rig.endpoint.room = 0;
  Boundary boundary{.round = 1};
  boundary.lost.push_back({.rank = 1});
  boundary.admitted.push_back(rig.with(1, 2, 1));
  rig.job->commit(boundary);
  for (uint64_t round = 1; round <= 3; ++round) {
    rig.push(0, 0, round, 1);
    rig.run();
  }
  rig.endpoint.room = 100;
  rig.run();
  EXPECT_THAT(rig.take_posts(), UnorderedElementsAre("0:0@3", "1:0@0", "1:1@0"));
}

// At a boundary, and then step by step: momentum goes on without gradients.
TEST(CoreJobInterest, WhatIsLeftAloneFollows) {
  Rig rig({{kBoth, kBoth}, {kIdle, kBoth}, {kIdle, kBoth}}, kernels::Optimizer::kMomentum, false);
  rig.push(0, 0, 1, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), -1);
  // Its only writer is lost; the others go on elsewhere.
  rig.hold();
  std::vector<uint64_t> last(2);
  Boundary loss{.round = 2};
  loss.lost.push_back({.rank = 0, .last_rounds = last});
  rig.job->commit(loss);
  EXPECT_THAT(last, ElementsAre(0, 1)) << "by id";
  for (uint64_t round = 1; round <= 4; ++round) {
    for (const uint32_t rank : {1, 2}) rig.push(rank, 1, round, 1);
    rig.run();
  }
  EXPECT_EQ(rig.result(0), -1) << "nobody is concerned";
  EXPECT_EQ(rig.job->hold().min_round, 5u);
  EXPECT_EQ(rig.hold(), 5u);
  // All that were idle are lost at one time: they were in the rounds before this one.
  Boundary all{.round = 5};
  std::vector<uint64_t> of_1(2), of_2(2);
  all.lost.push_back({.rank = 1, .last_rounds = of_1});
  all.lost.push_back({.rank = 2, .last_rounds = of_2});
  all.admitted.push_back(rig.with(0, 2, 5));
  rig.take_posts();
  rig.job->commit(all);
  EXPECT_THAT(of_1, ElementsAre(4, 4));
  EXPECT_THAT(of_2, ElementsAre(4, 4));
  rig.run();
  float momentum = 1, want = -1;
  for (int round = 2; round <= 4; ++round) {
    momentum *= 0.9f;
    want -= momentum;
  }
  EXPECT_FLOAT_EQ(rig.result(0), want);
  EXPECT_THAT(rig.take_posts(), UnorderedElementsAre("0:0@4", "0:1@4"));
  EXPECT_THAT(rig.take_reports(), IsEmpty());
}

// The job pauses for a rank that is lost, also where it was idle.
TEST(CoreJobInterest, WhoIsToComeBackIsWaitedForEverywhere) {
  Rig rig({{kBoth, kBoth}, {kIdle, kBoth}, {kIdle, kBoth}}, kernels::Optimizer::kNone, false);
  rig.hold();
  Boundary loss{.round = 1};
  loss.lost.push_back({.rank = 1, .expected_again = 2});
  rig.job->commit(loss);
  rig.take_posts();
  for (uint64_t round = 1; round <= 2; ++round) {
    rig.push(0, 0, round, 1);
    rig.run();
  }
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1"));
  ASSERT_EQ(rig.hold(), 2u);
  Boundary back{.round = 2};
  back.admitted.push_back(rig.with(1, 2, 2));
  rig.job->commit(back);
  rig.run();
  EXPECT_THAT(rig.take_posts(), UnorderedElementsAre("1:0@1", "0:0@2"));
}

// Nobody is there for whom a chunk is: it does not go past the first round of who comes.
TEST(CoreJobInterest, WhatFollowsWaitsForWhoComes) {
  Rig rig({{kBoth, kIdle}, {kIdle, kBoth}, {kBoth, kIdle}}, kernels::Optimizer::kNone, true);
  for (uint64_t round = 1; round <= 6; ++round) {
    for (const uint32_t rank : {0, 2}) rig.push(rank, 0, round, 3);
    rig.run();
  }
  ASSERT_EQ(rig.hold(), 7u);
  Boundary loss{.round = 7};
  loss.lost.push_back({.rank = 1});
  rig.job->commit(loss);
  rig.run();
  ASSERT_EQ(rig.hold(), 7u);
  Boundary boundary{.round = 7};
  boundary.admitted.push_back(rig.with(1, 2, 9));
  rig.job->commit(boundary);
  rig.take_posts();
  EXPECT_EQ(rig.hold(), 9u) << "nobody comes into what it follows to";
  rig.job->commit({.round = 9});
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("1:1@8"));
  rig.push(1, 1, 9, 6);
  rig.run();
  EXPECT_EQ(rig.result(1), 2) << "of three";
}

}  // namespace core_job_interest_test
}  // namespace phub::testing

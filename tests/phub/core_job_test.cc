#include "phub/core/core_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "tests/phub/core_job_rig.h"

namespace phub {
namespace core_job_test {

using kernels::DType;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Rig = testing::CoreJobRig;

constexpr float kAll3 = 1 + 4 + 16;
const std::vector<uint32_t> kRanks = {0, 1, 2};

TEST(CoreJob, AChunkCompletesWithItsLastRank) {
  Rig rig({});
  rig.push_all(std::vector<uint32_t>{2, 0}, 1, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  rig.push(1, 1, 1, Rig::digit(1));
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:1@1", "1:1@1", "2:1@1"));
  EXPECT_EQ(rig.endpoint.flushed, 3u);
  EXPECT_EQ(rig.result(1), kAll3);
  EXPECT_EQ(rig.result(0), 0);
  EXPECT_EQ(rig.result(2), 0);
}

TEST(CoreJob, NobodyHasToSendZeros) {
  Rig rig({.parameters = {.max_ranks = 3, .mean = true}});
  rig.push(0, 0, 1, 9);
  rig.arrive(1, {0, 1, ImmKind::kNull});
  rig.arrive(2, {0, 1, ImmKind::kNull});
  rig.run();
  EXPECT_EQ(rig.result(0), 3);  // null contributions are in the divisor
  for (const uint32_t rank : kRanks) rig.arrive(rank, {0, 2, ImmKind::kNull});
  rig.run();
  EXPECT_EQ(rig.result(0), 0);
}

TEST(CoreJob, AContributionCountsOnce) {
  Rig rig({});
  rig.push(1, 0, 1, Rig::digit(1));
  rig.push(1, 0, 1, Rig::digit(1));
  rig.arrive(1, {0, 1, ImmKind::kNull});  // even if it says something else now
  rig.push_all(std::vector<uint32_t>{0, 2}, 0, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), kAll3);
  rig.take_posts();
  // Once more after the round: its result was lost on the way, and is sent again to that rank only.
  rig.push(1, 0, 2, Rig::digit(1));
  rig.run();
  rig.arrive(2, {0, 1, ImmKind::kData});
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("2:0@1"));
  EXPECT_EQ(rig.result(0), kAll3);
  rig.push_all(std::vector<uint32_t>{0, 2}, 0, 2);
  rig.run();
  EXPECT_EQ(rig.result(0), kAll3);
  EXPECT_THAT(rig.take_reports(), IsEmpty());
}

TEST(CoreJob, WhatCannotBeIsAViolationOfThatRankAlone) {
  const struct {
    const char* what;
    Imm imm;
  } kCases[] = {
      {"a chunk that is not there", {4, 3, ImmKind::kData}},
      {"the last chunk that an immediate can name", {kMaxChunksPerQueue - 1, 3, ImmKind::kNull}},
      {"a round that is to come", {0, 4, ImmKind::kData}},
      {"a round long ago", {0, 1, ImmKind::kData}},
      {"a null of the wrong round", {0, 1, ImmKind::kNull}},
      {"initial parameters in a job without", {0, 0, ImmKind::kInitial}},
      {"a control message", {0, 3, ImmKind::kControl}},
  };
  for (const auto& [what, imm] : kCases) {
    SCOPED_TRACE(what);
    Rig rig({});
    for (uint32_t round = 1; round < 3; ++round) {
      for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(kRanks, chunk, round);
      rig.run();
    }
    rig.take_posts();
    rig.push(1, 1, 3, Rig::digit(1));
    rig.arrive(1, imm);
    rig.arrive(1, imm);
    rig.push(1, 0, 3, Rig::digit(1));  // nothing of this rank is taken any more
    rig.push_all(std::vector<uint32_t>{0, 2}, 0, 3);
    rig.push_all(std::vector<uint32_t>{0, 2}, 1, 3);
    rig.run();
    EXPECT_THAT(rig.take_reports(), ElementsAre("violation 1"));
    EXPECT_THAT(rig.take_posts(), ElementsAre("0:1@3", "2:1@3"));  // chunk 0 lacks rank 1
    EXPECT_EQ(rig.result(1), kAll3);
  }
}

TEST(CoreJob, ABrokenQueuePairIsReportedOnce) {
  Rig rig({});
  rig.endpoint.inbox.push_back({.rank = 2, .ok = false});
  rig.endpoint.inbox.push_back({.rank = 2, .ok = false});
  rig.push(2, 0, 1, 1);
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("broken 2"));
}

TEST(CoreJob, WhileHeldNoNewRoundIsCompleted) {
  Rig rig({});
  for (uint32_t chunk = 0; chunk < 3; ++chunk) rig.push_all(kRanks, chunk, 1);  // not chunk 3
  rig.run();
  rig.push(0, 1, 2, Rig::digit(0));
  rig.run();
  rig.take_posts();
  const CoreReport held = rig.job->hold();
  EXPECT_EQ(held.round, 2u);
  EXPECT_EQ(held.started, 2u);
  EXPECT_EQ(held.min_round, 1u);

  rig.push_all(kRanks, 0, 2);
  rig.push_all(kRanks, 3, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:3@1", "1:3@1", "2:3@1"));  // an earlier round
  rig.push_all(kRanks, 3, 2);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  rig.job->commit({.round = 2});
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@2", "1:0@2", "2:0@2", "0:3@2", "1:3@2", "2:3@2"));
}

// Chunks of a later round are ready, and others before them, when a rank comes that takes part in
// it.
TEST(CoreJob, WhatWasReadyWaitsForANewcomer) {
  const std::vector<uint32_t> two = {0, 1};
  Rig rig({.chunks = 12,
           .elements = 10592,
           .expected = two,
           .priorities = {0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}});
  for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(two, chunk, 1);
  rig.run();
  for (uint32_t chunk = 4; chunk < 12; ++chunk) rig.push_all(two, chunk, 1);
  for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(two, chunk, 2);
  rig.take_posts();
  rig.job->step();  // a pass completes eight
  EXPECT_THAT(rig.take_posts(), SizeIs(16));
  EXPECT_EQ(rig.job->hold().round, 2u);
  rig.job->commit({.round = 2, .admitted = {rig.admission(2, 1, 2)}});
  rig.take_posts();
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  rig.push(2, 3, 2, Rig::digit(2));
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:3@2", "1:3@2", "2:3@2"));
  EXPECT_EQ(rig.result(3), kAll3);
}

// Its last rank is gone in the middle of a round, and who comes begins behind those that it began.
TEST(CoreJob, RoundsThatNobodyCanTakePartInAreSkipped) {
  Rig rig({.chunks = 2, .expected = {0}});
  for (uint32_t round = 1; round <= 4; ++round) {
    rig.push(0, 0, round, 1);
    rig.run();
  }
  rig.take_posts();
  EXPECT_EQ(rig.job->hold().round, 5u);
  rig.job->commit({.round = 5, .lost = {{.rank = 0}}, .admitted = {rig.admission(1, 1, 5)}});
  EXPECT_THAT(rig.take_posts(), ::testing::UnorderedElementsAre("1:0@4", "1:1@4"));
  rig.push(1, 1, 5, 7);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("1:1@5"));
  EXPECT_EQ(rig.result(1), 7);
}

TEST(CoreJob, WhatWasReadyBeforeTheHoldIsHeldToo) {
  Rig rig({.chunks = 20, .elements = 10592});
  for (uint32_t chunk = 0; chunk < 20; ++chunk) rig.push_all(kRanks, chunk, 1);
  EXPECT_TRUE(rig.job->step());  // a batch of them
  const size_t completed = rig.take_posts().size() / 3;
  EXPECT_GT(completed, 0u);
  EXPECT_LT(completed, 20u);
  EXPECT_EQ(rig.job->hold().round, 2u);
  rig.push_all(kRanks, 0, 2);
  rig.run();
  EXPECT_THAT(rig.take_posts(), SizeIs(3 * (20 - completed)));  // round 1 only
  rig.job->commit({.round = 2});
  rig.run();
  EXPECT_THAT(rig.take_posts(), SizeIs(3));
}

// A lost rank's contribution that was accepted: kept where the box has its bytes, dropped where
// they are still the worker's.
TEST(CoreJob, ALostRanksContributions) {
  for (const bool workers_own : {false, true}) {
    SCOPED_TRACE(workers_own);
    Rig rig({.parameters = {.max_ranks = 3, .mean = true, .slots_belong_to_worker = workers_own}});
    for (uint32_t chunk = 1; chunk < 4; ++chunk) rig.push_all(kRanks, chunk, 1);
    rig.run();
    rig.push(1, 1, 2, 12);                  // accepted, in round 2 of chunk 1
    rig.arrive(1, {2, 2, ImmKind::kNull});  // null contributions have no bytes to change
    rig.push_all(std::vector<uint32_t>{0, 2}, 0, 1);
    rig.run();
    rig.take_posts();

    rig.job->hold();
    std::vector<uint64_t> last(4, 99);
    rig.job->commit({.round = 2, .lost = {{.rank = 1, .last_rounds = last}}});
    // By the chunks' numbers in the job, which run the other way here.
    EXPECT_THAT(last, ElementsAre(1, 2, workers_own ? 1 : 2, 0));
    EXPECT_EQ(rig.endpoint.attached, (std::set<uint32_t>{0, 2}));
    rig.run();
    EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "2:0@1"));  // it was the last one awaited
    EXPECT_EQ(rig.result(0), (1 + 16) * 0.5f);

    for (uint32_t chunk = 0; chunk < 4; ++chunk) {
      rig.push(0, chunk, 2, 6);
      rig.push(2, chunk, 2, 6);
    }
    rig.push(1, 3, 2, 1000);  // what it still writes arrives nowhere
    rig.run();
    EXPECT_THAT(rig.take_posts(), SizeIs(8));
    EXPECT_EQ(rig.result(0), 6);
    EXPECT_EQ(rig.result(1), workers_own ? 6 : 24 * static_cast<float>(1.0 / 3));
    EXPECT_EQ(rig.result(2), 12 * static_cast<float>(1.0 / 3));
    EXPECT_EQ(rig.result(3), 6);
    EXPECT_THAT(rig.take_reports(), IsEmpty());
  }
}

// What nobody has a gradient of stays as it is, and the optimizer makes no step on it.
TEST(CoreJob, UnusedChunksAreLeftOut) {
  for (const bool skips : {false, true}) {
    SCOPED_TRACE(skips);
    Rig rig({.parameters = {.max_ranks = 3,
                            .optimizer = kernels::Optimizer::kMomentum,
                            .unused = skips ? Unused::kSkip : Unused::kZero}});
    rig.hyper.front().values.momentum = 0.5;
    const auto round = [&](uint64_t r, uint32_t of_gradients) {
      for (const uint32_t rank : kRanks) {
        if (rank < of_gradients) {
          rig.push(rank, 1, r, 1);
        } else {
          rig.arrive(rank, {1, static_cast<uint32_t>(r), ImmKind::kNull});
        }
      }
      rig.run();
      EXPECT_THAT(rig.take_posts(), SizeIs(3)) << "round " << r;
      return rig.result(1);
    };
    EXPECT_EQ(round(1, 3), -3);
    EXPECT_EQ(round(2, 0), skips ? -3 : -4.5) << "momentum";
    EXPECT_EQ(round(3, 1), skips ? -5.5 : -6.25) << "one has a gradient";
    EXPECT_EQ(round(4, 0), skips ? -5.5 : -7.125);
  }
}

// What is too small to change 1 alone does so together with its group, whoever of it is there.
TEST(CoreJob, GroupsOrderTheSum) {
  constexpr float kSmall = 0x1p-24f, kNext = 1 + 0x1p-23f;
  const std::vector<uint32_t> four = {0, 1, 2, 3};
  for (const char* groups : {"", "2,2", "1,(1,2)"}) {
    SCOPED_TRACE(groups);
    const bool has_groups = groups[0] != 0;
    Rig rig({.parameters = {.max_ranks = 4,
                            .tree = RankTree(groups, 4),
                            .on_nonfinite = OnNonFinite::kExclude},
             .expected = four});
    rig.push(0, 0, 1, 0);
    for (const uint32_t rank : {1, 2, 3}) rig.push(rank, 0, 1, rank == 1 ? 1 : kSmall);
    rig.run();
    EXPECT_EQ(rig.result(0), has_groups ? kNext : 1);
    rig.arrive(0, {1, 1, ImmKind::kNull});
    for (const uint32_t rank : {1, 2, 3}) rig.push(rank, 1, 1, rank == 1 ? 1 : kSmall);
    rig.run();
    EXPECT_EQ(rig.result(1), has_groups ? kNext : 1) << "one of them is null";
    for (const uint32_t rank : four) {
      rig.push(rank, 2, 1, rank == 0 ? NAN : rank == 1 ? 1 : kSmall);
    }
    rig.run();
    EXPECT_EQ(rig.result(2), has_groups ? kNext : 1) << "one of them is excluded";
    rig.job->hold();
    rig.job->commit({.round = 2, .lost = {{.rank = 0}}});
    for (const uint32_t rank : {1, 2, 3}) rig.push(rank, 0, 2, rank == 1 ? 1 : kSmall);
    rig.run();
    EXPECT_EQ(rig.result(0), has_groups ? kNext : 1) << "one of them is gone";
  }
}

TEST(CoreJob, OneOfManyIsLostTwiceOver) {
  // More ranks than a word has bits, and a boundary in which several go.
  std::vector<uint32_t> ranks(70);
  std::iota(ranks.begin(), ranks.end(), 0u);
  Rig rig({.parameters = {.max_ranks = 70, .slots_belong_to_worker = true},
           .chunks = 1,
           .expected = ranks});
  for (const uint32_t rank : ranks) {
    if (rank != 3 && rank != 66) rig.push(rank, 0, 1, 1);
  }
  rig.run();
  std::vector<uint64_t> last3(1), last66(1), last69(1);
  rig.job->hold();
  rig.job->commit({.round = 1,
                   .lost = {{.rank = 66, .last_rounds = last66},
                            {.rank = 3, .last_rounds = last3},
                            {.rank = 69, .last_rounds = last69}}});
  rig.run();
  EXPECT_EQ(rig.result(0), 67);
  EXPECT_THAT(rig.take_posts(), SizeIs(67));
  EXPECT_EQ(last69[0], 0u);
}

TEST(CoreJob, ForWhomTheJobPausesIsAwaitedFromTheNextRoundOn) {
  Rig rig({.parameters = {.max_ranks = 3, .slots_belong_to_worker = true}});
  rig.push_all(std::vector<uint32_t>{0, 1}, 0, 1);
  rig.run();
  EXPECT_EQ(rig.job->hold().started, 1u);
  std::vector<uint64_t> last(4);
  rig.job->commit({.round = 1, .lost = {{.rank = 1, .expected_again = 2, .last_rounds = last}}});
  EXPECT_THAT(last, Each(0));
  const std::vector<uint32_t> others = {0, 2};
  rig.push(2, 0, 1, Rig::digit(2));
  for (uint32_t chunk = 1; chunk < 4; ++chunk) rig.push_all(others, chunk, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), 1 + 16);
  EXPECT_THAT(rig.take_posts(), SizeIs(8));  // round 1 is finished without it
  rig.push_all(others, 0, 2);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());  // and round 2 is not

  rig.job->hold();
  rig.job->commit({.round = 2, .admitted = {rig.admission(1, 2, 2)}});
  EXPECT_THAT(rig.take_posts(), ElementsAre("1:0@1", "1:1@1", "1:2@1", "1:3@1"));
  rig.push(1, 0, 2, Rig::digit(1));
  rig.run();
  EXPECT_EQ(rig.result(0), kAll3);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@2", "1:0@2", "2:0@2"));
}

TEST(CoreJob, ANewRankEntersTheRoundInProgress) {
  Rig rig({.parameters = {.max_ranks = 4}});
  for (uint32_t chunk = 0; chunk < 3; ++chunk) rig.push_all(kRanks, chunk, 1);
  rig.run();
  rig.push_all(kRanks, 0, 2);
  rig.run();
  rig.push_all(kRanks, 0, 3);  // complete, but for the hold
  EXPECT_EQ(rig.job->hold().round, 3u);
  rig.run();
  rig.take_posts();
  rig.job->commit({.round = 3, .admitted = {rig.admission(3, 1, 3)}});
  EXPECT_THAT(rig.take_posts(), ElementsAre("3:0@2"));  // the others are not that far
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());  // round 3 waits for it
  for (uint32_t chunk = 1; chunk < 3; ++chunk) rig.push_all(kRanks, chunk, 2);
  rig.run();
  EXPECT_THAT(rig.take_posts(),
              ElementsAre("0:1@2", "1:1@2", "2:1@2", "3:1@2", "0:2@2", "1:2@2", "2:2@2", "3:2@2"));
  EXPECT_EQ(rig.result(1), kAll3);
  rig.push(3, 0, 3, Rig::digit(3));
  rig.run();
  EXPECT_EQ(rig.result(0), kAll3 + 64);
  // A round before its first is not its business.
  rig.push(3, 3, 1, Rig::digit(3));
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("violation 3"));
}

TEST(CoreJob, ASuccessorBeginsAfterWhatItsPredecessorGave) {
  Rig rig({.chunks = 2});
  rig.push(1, 0, 1, Rig::digit(1));
  rig.run();
  rig.job->hold();
  std::vector<uint64_t> last(2);
  rig.job->commit({.round = 1, .lost = {{.rank = 1, .last_rounds = last}}});
  EXPECT_THAT(last, ElementsAre(0, 1));
  rig.job->hold();
  rig.job->commit({.round = 1, .admitted = {rig.admission(1, 2, 2)}});
  const std::vector<uint32_t> others = {0, 2};
  for (uint32_t chunk = 0; chunk < 2; ++chunk) rig.push_all(others, chunk, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), kAll3);  // the predecessor's
  EXPECT_EQ(rig.result(1), 1 + 16);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "1:0@1", "2:0@1", "0:1@1", "1:1@1", "2:1@1"));
  for (uint32_t chunk = 0; chunk < 2; ++chunk) rig.push_all(kRanks, chunk, 2);
  rig.run();
  EXPECT_EQ(rig.result(0), kAll3);
  EXPECT_EQ(rig.result(1), kAll3);
}

TEST(CoreJob, ARankThatNeverCameIsForgotten) {
  Rig rig({.admit = false});
  rig.job->hold();
  rig.job->commit({.round = 1, .admitted = {rig.admission(0, 1, 1), rig.admission(1, 1, 1)}});
  rig.take_posts();
  for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(std::vector<uint32_t>{0, 1}, chunk, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  rig.job->hold();
  rig.job->commit({.round = 1, .forgotten = {2}});
  rig.run();
  EXPECT_THAT(rig.take_posts(), SizeIs(8));
  EXPECT_EQ(rig.result(3), 1 + 4);
}

TEST(CoreJob, ResultsAreOwedToAFullQueue) {
  Rig rig({.chunks = 130});
  rig.endpoint.room = 5;
  for (uint32_t chunk = 0; chunk < 130; ++chunk) rig.push_all(kRanks, chunk, 1);
  rig.run();
  EXPECT_TRUE(rig.job->owes());
  std::vector<std::string> posts = rig.take_posts();
  EXPECT_THAT(posts, SizeIs(5));
  for (int i = 0; i < 1000 && rig.job->owes(); ++i) {
    rig.endpoint.room = 7;
    rig.run();
    for (std::string& post : rig.take_posts()) posts.push_back(std::move(post));
  }
  EXPECT_FALSE(rig.job->owes());
  EXPECT_THAT(posts, SizeIs(3 * 130));
  const std::set<std::string> different(posts.begin(), posts.end());
  EXPECT_THAT(different, SizeIs(3 * 130));
  EXPECT_THAT(rig.take_posts(), IsEmpty());
}

// Where one result at a time may go, ranks take turns, each with the most important of its own.
TEST(CoreJob, WhoIsOwedResultsTakesTurns) {
  Rig rig({.priorities = {0, 3, 1, 2}});
  rig.endpoint.room = 0;
  for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(kRanks, chunk, 1);
  rig.run();
  std::vector<std::pair<uint32_t, uint32_t>> posted, expected;  // rank, chunk
  while (rig.job->owes()) {
    rig.endpoint.room = 1;
    rig.run();
    ASSERT_THAT(rig.endpoint.posted, SizeIs(1));
    posted.emplace_back(rig.endpoint.posted[0].first,
                        decode(rig.endpoint.posted[0].second.imm).chunk);
    rig.endpoint.posted.clear();
  }
  for (const uint32_t chunk : {1u, 3u, 2u, 0u}) {
    for (const uint32_t rank : kRanks) expected.emplace_back(rank, chunk);
  }
  EXPECT_EQ(posted, expected);
}

TEST(CoreJob, NothingIsOwedToTheLost) {
  Rig rig({});
  rig.endpoint.room = 0;
  for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(kRanks, chunk, 1);
  rig.run();
  rig.job->hold();
  Boundary boundary{.round = 2};
  for (const uint32_t rank : kRanks) boundary.lost.push_back({.rank = rank});
  rig.job->commit(boundary);
  EXPECT_FALSE(rig.job->owes());
  rig.endpoint.room = 100;
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
}

TEST(CoreJob, HigherPriorityCompletesFirst) {
  Rig rig({.priorities = {-1, 5, 5, 7}});
  for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(kRanks, chunk, 1);
  rig.run();
  std::vector<std::string> to_rank0;
  for (const std::string& post : rig.take_posts()) {
    if (post.starts_with("0:")) to_rank0.push_back(post);
  }
  EXPECT_THAT(to_rank0, ElementsAre("0:3@1", "0:1@1", "0:2@1", "0:0@1"));
}

TEST(CoreJob, InitialParametersOfFullWidthComeInOnePart) {
  Rig rig({.parameters = {.max_ranks = 3,
                          .optimizer = kernels::Optimizer::kSgd,
                          .initial_broadcast = true},
           .chunks = 2});
  rig.push(0, 0, 0, 40);  // its slot
  rig.endpoint.inbox.clear();
  rig.arrive(0, {0, 0, ImmKind::kInitial});
  rig.arrive(0, {0, 0, ImmKind::kInitial});  // once more: the result is on its way
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@0", "1:0@0", "2:0@0"));
  rig.job->detach(0);
  rig.job->reattach(0, 1);
  rig.arrive(0, {0, 0, ImmKind::kInitial});  // over a new connection: the result again
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@0"));
  EXPECT_EQ(rig.result(0), 40);
  rig.push_all(kRanks, 0, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), 40 - kAll3);
  EXPECT_THAT(rig.take_reports(), IsEmpty());
  rig.push(1, 1, 1, 1);  // of chunk 1 there are no parameters yet
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("violation 1"));
  rig.arrive(2, {1, 0, ImmKind::kInitial});  // only rank 0 sends them
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("violation 2"));
}

TEST(CoreJob, InitialParametersOfHalfWidthComeInTwoParts) {
  Rig rig({.parameters = {.max_ranks = 3,
                          .parameter_dtype = DType::kF32,
                          .optimizer = kernels::Optimizer::kSgd,
                          .initial_broadcast = true},
           .chunks = 2,
           .dtype = DType::kBF16});
  auto* slot = reinterpret_cast<float*>(rig.slots[0].data());
  const auto part = [&](uint32_t number, float value) {
    std::fill_n(slot, 32, value);
    rig.arrive(0, {0, number, ImmKind::kInitial});
    rig.run();
  };
  part(0, 7);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0i0"));
  part(0, 9);  // it did not see the answer: what was taken stays
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0i0"));
  part(1, 8);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@0", "1:0@0", "2:0@0"));
  const auto* result = reinterpret_cast<const float*>(rig.results.data());
  EXPECT_THAT(std::vector<float>(result, result + 32), Each(7));
  EXPECT_THAT(std::vector<float>(result + 32, result + 64), Each(8));
  rig.arrive(0, {1, 1, ImmKind::kInitial});  // the second part first
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("violation 0"));
}

// A loss of rank 0 fails the job while the parameters are not there: what counts is what is there
// after the commit.
TEST(CoreJob, InitialParametersThatCompleteBetweenHoldAndCommitAreThere) {
  Rig rig({.parameters = {.max_ranks = 3,
                          .optimizer = kernels::Optimizer::kSgd,
                          .initial_broadcast = true},
           .chunks = 1});
  rig.job->hold();
  rig.arrive(0, {0, 0, ImmKind::kInitial});
  rig.run();
  EXPECT_EQ(rig.job->commit({.round = 1, .lost = {{.rank = 0}}}), 1u);
}

// What a rank sends next could overtake what it sent again: a result of the chunk must not come
// before that is here, though the box had the contribution.
TEST(CoreJob, AfterAReconnectionAResultFollowsWhatIsSentAgain) {
  Rig rig({});
  rig.push(1, 0, 1, Rig::digit(1));
  rig.run();
  rig.job->detach(1);
  rig.job->reattach(1, 1);
  rig.push_all(std::vector<uint32_t>{0, 2}, 0, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "2:0@1"));
  rig.push(1, 0, 1, Rig::digit(1));
  rig.arrive(1, {2, 0, ImmKind::kControl});  // lacks the result of the round before its first
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("1:0@1", "1:2@0"));
  rig.push_all(kRanks, 0, 2);  // as ever
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@2", "1:0@2", "2:0@2"));
  EXPECT_THAT(rig.take_reports(), IsEmpty());
}

// It takes the place of an older report of its rank, however many came after that one.
TEST(CoreJob, AViolationAfterAReconnectionIsToldOfItsOwnRank) {
  Rig rig({});
  rig.endpoint.inbox.push_back({.rank = 1, .ok = false});
  rig.endpoint.inbox.push_back({.rank = 2, .ok = false});
  rig.run();
  rig.job->detach(1);
  rig.job->reattach(1, 1);
  rig.endpoint.inbox.push_back(
      {.rank = 1, .imm = encode({1, 1, ImmKind::kData}), .bytes = 4, .offset = 64 * sizeof(float)});
  rig.run();
  CoreReport one, two;
  ASSERT_TRUE(rig.job->next_report(one) && rig.job->next_report(two));
  EXPECT_EQ(one.rank, 1u);
  EXPECT_EQ(one.type, CoreReport::kViolation);
  EXPECT_EQ(one.violation, CoreReport::kBytes);
  EXPECT_EQ(one.said, 4u);
  EXPECT_EQ(two.rank, 2u);
  EXPECT_EQ(two.type, CoreReport::kBroken);
  EXPECT_EQ(two.said, CoreReport().said);
}

// What a frame did not overwrite would be summed as if it had come.
TEST(CoreJob, APayloadOfAnotherSizeOrAtAnotherPlaceIsAViolation) {
  constexpr uint64_t kBytes = 64 * sizeof(float);
  struct Case {
    Imm imm;
    uint64_t bytes, offset;
    CoreReport::Violation violation;
    uint64_t said;
  };
  const std::vector<Case> cases = {
      {{1, 1, ImmKind::kData}, kBytes - 4, kBytes, CoreReport::kBytes, kBytes - 4},
      {{1, 1, ImmKind::kData}, kBytes + 4, kBytes, CoreReport::kBytes, kBytes + 4},
      {{1, 1, ImmKind::kData}, 0, kBytes, CoreReport::kBytes, 0},
      {{1, 1, ImmKind::kData}, kBytes, 0, CoreReport::kPlace, 0},
      {{1, 1, ImmKind::kData}, kBytes, 2 * kBytes, CoreReport::kPlace, 2 * kBytes},
      {{1, 1, ImmKind::kData}, kBytes, ~uint32_t{0}, CoreReport::kPlace, ~uint32_t{0}},
      {{1, 1, ImmKind::kNull}, kBytes, kBytes, CoreReport::kBytes, kBytes},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(fmt::format("{} bytes at {}", c.bytes, c.offset));
    Rig rig({});
    rig.endpoint.inbox.push_back(
        {.rank = 1, .imm = encode(c.imm), .bytes = c.bytes, .offset = c.offset});
    rig.push_all(std::vector<uint32_t>{0, 2}, 1, 1);
    rig.run();
    CoreReport report;
    ASSERT_TRUE(rig.job->next_report(report));
    EXPECT_EQ(report.type, CoreReport::kViolation);
    EXPECT_EQ(report.rank, 1u);
    EXPECT_EQ(report.violation, c.violation);
    EXPECT_EQ(report.said, c.said);
    EXPECT_THAT(rig.take_posts(), IsEmpty());  // it does not count
  }
  Rig rig({});
  rig.endpoint.inbox.push_back(
      {.rank = 1, .imm = encode({1, 1, ImmKind::kData}), .bytes = kBytes, .offset = kBytes});
  rig.endpoint.inbox.push_back(
      {.rank = 1, .imm = encode({2, 1, ImmKind::kNull}), .bytes = 0, .offset = 4711});
  rig.run();
  EXPECT_THAT(rig.take_reports(), IsEmpty());
}

// Rows take as many bytes as there are, and no more than there is room for.
TEST(CoreJob, APayloadOfRowsSaysHowLongItIs) {
  constexpr uint64_t kRow = 4 + 16 * 4;
  struct Case {
    uint32_t count;
    uint64_t bytes;
    bool fits;
  };
  for (const Case& c : {Case{1, 4 + kRow, true}, Case{3, 4 + 3 * kRow, true}, Case{0, 4, true},
                        Case{2, 4 + kRow, false}, Case{1, 4 + 2 * kRow, false}, Case{0, 0, false},
                        Case{4, 4 + 4 * kRow, false}, Case{~0u, 3, false}}) {
    for (const bool told : {true, false}) {
      SCOPED_TRACE(fmt::format("{} rows in {} bytes", c.count, c.bytes));
      Rig rig({.form = kernels::SlotForm::kRows, .columns = 16, .limit = 3});
      const kernels::SlotShape shape{64, kernels::DType::kF32, kernels::SlotForm::kRows, 16, 3};
      const uint64_t at = 64 * sizeof(float);  // of chunk 1
      const std::vector<float> row(16, 2.0f);
      for (const uint32_t rank : {0u, 1u, 2u}) {
        kernels::clear_rows(rig.slots[rank].data() + at);
        kernels::append_row(shape, 3, row.data(), rig.slots[rank].data() + at);
      }
      for (uint32_t i = 0; i < 3; ++i) {  // rows that rank 1 may say that it has
        std::memcpy(rig.slots[1].data() + at + 4 + i * kRow, &i, sizeof i);
        std::memcpy(rig.slots[1].data() + at + 8 + i * kRow, row.data(), 64);
      }
      std::memcpy(rig.slots[1].data() + at, &c.count, sizeof c.count);
      Arrival arrival{.rank = 1, .imm = encode({1, 1, ImmKind::kData})};
      if (told) arrival.bytes = c.bytes, arrival.offset = at;
      rig.endpoint.inbox.push_back(arrival);
      for (const uint32_t rank : {0u, 2u}) rig.arrive(rank, {1, 1, ImmKind::kData});
      rig.run();
      if (told ? c.fits : c.count <= 3) {
        EXPECT_THAT(rig.take_reports(), IsEmpty());
        const auto* sum = reinterpret_cast<const float*>(rig.results.data()) + 64;
        EXPECT_EQ(sum[3 * 16], 4);
        EXPECT_EQ(sum[0], c.count > 0 ? 2 : 0);
        EXPECT_EQ(sum[2 * 16], c.count > 2 ? 2 : 0);
        continue;
      }
      CoreReport report;
      ASSERT_TRUE(rig.job->next_report(report));
      EXPECT_EQ(report.violation, CoreReport::kBytes);
      EXPECT_EQ(report.rank, 1u);
      EXPECT_THAT(rig.take_posts(), IsEmpty());
    }
  }
}

// Who has the result before gets nothing of one that is the same; who comes gets all of it.
TEST(CoreJob, AResultThatIsTheSameIsSentToNobodyWhoHasIt) {
  Rig rig({.parameters = {.max_ranks = 3, .optimizer = kernels::Optimizer::kSgd},
           .chunks = 1,
           .form = kernels::SlotForm::kRows,
           .columns = 16,
           .limit = 3,
           .lazy = true,
           .expected = {0, 1}});
  const kernels::SlotShape shape{64, kernels::DType::kF32, kernels::SlotForm::kRows, 16, 3};
  const std::vector<float> row(16, 2.0f);
  const auto posted = [&rig] {
    std::vector<std::string> all;
    for (const auto& [rank, write] : std::exchange(rig.endpoint.posted, {})) {
      const Imm imm = decode(write.imm);
      all.push_back(fmt::format("{}@{}: {} bytes{}", rank, imm.round, write.bytes,
                                imm.kind == ImmKind::kNull ? ", null" : ""));
    }
    return all;
  };
  kernels::clear_rows(rig.slots[1].data());
  kernels::append_row(shape, 2, row.data(), rig.slots[1].data());
  rig.arrive(0, {0, 1, ImmKind::kNull});
  rig.arrive(1, {0, 1, ImmKind::kData});
  rig.run();
  EXPECT_THAT(posted(), ElementsAre("0@1: 256 bytes", "1@1: 256 bytes"));
  for (const uint32_t rank : {0u, 1u}) rig.arrive(rank, {0, 2, ImmKind::kNull});
  rig.run();
  EXPECT_THAT(posted(), ElementsAre("0@2: 0 bytes, null", "1@2: 0 bytes, null"));
  rig.job->hold();
  Boundary boundary{.round = 3};
  boundary.admitted.push_back(rig.admission(2, 1, 3));
  rig.job->commit(boundary);
  EXPECT_THAT(posted(), ElementsAre("2@2: 256 bytes"));
  for (const uint32_t rank : {0u, 1u, 2u}) rig.arrive(rank, {0, 3, ImmKind::kNull});
  rig.run();
  EXPECT_THAT(posted(),
              ElementsAre("0@3: 0 bytes, null", "1@3: 0 bytes, null", "2@3: 0 bytes, null"));
}

// 16-bit gradients: the f32 of the initial parameters come in two parts, of the sizes that they
// have.
TEST(CoreJob, PartsOfInitialParametersHaveTheirSize) {
  for (const uint32_t part : {0u, 1u}) {
    for (const uint64_t bytes : {16u * 4u, 17u * 4u}) {
      Rig rig({.parameters = {.max_ranks = 3,
                              .optimizer = kernels::Optimizer::kSgd,
                              .initial_broadcast = true},
               .chunks = 2,
               .elements = 33,
               .dtype = DType::kF16});
      if (part == 1) rig.arrive(0, {0, 0, ImmKind::kInitial});
      rig.endpoint.inbox.push_back(
          {.rank = 0, .imm = encode({0, part, ImmKind::kInitial}), .bytes = bytes, .offset = 0});
      rig.run();
      const bool right = bytes == (part == 0 ? 16u : 17u) * 4u;
      EXPECT_EQ(rig.take_reports().empty(), right) << part << " " << bytes;
    }
  }
}

TEST(CoreJob, ASuccessorSendsTheInitialParametersFromTheStart) {
  Rig rig({.parameters = {.max_ranks = 3,
                          .parameter_dtype = DType::kF32,
                          .optimizer = kernels::Optimizer::kSgd,
                          .initial_broadcast = true,
                          .slots_belong_to_worker = true},
           .chunks = 1,
           .dtype = DType::kF16});
  rig.arrive(0, {0, 0, ImmKind::kInitial});
  rig.run();
  rig.job->hold();
  std::vector<uint64_t> last(1, 9);
  EXPECT_EQ(rig.job->commit(
                {.round = 1, .lost = {{.rank = 0, .expected_again = 1, .last_rounds = last}}}),
            0u);
  EXPECT_EQ(last[0], 0u);
  rig.job->hold();
  rig.job->commit({.round = 1, .admitted = {rig.admission(0, 2, 1)}});
  rig.take_posts();
  auto* slot = reinterpret_cast<float*>(rig.slots[0].data());
  std::fill_n(slot, 32, 3.0f);
  for (const uint32_t part : {0u, 1u}) {
    rig.arrive(0, {0, part, ImmKind::kInitial});
    rig.run();
  }
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0i0", "0:0@0", "1:0@0", "2:0@0"));
  EXPECT_EQ(rig.result(0), 3);
  EXPECT_THAT(rig.take_reports(), IsEmpty());
}

TEST(CoreJob, NonFiniteGradients) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kLargest = std::numeric_limits<float>::max();
  const auto run = [](Rig& rig, float rank1) {
    rig.push(0, 0, 1, rank1 == kLargest ? kLargest : 2);
    rig.push(1, 0, 1, rank1);
    rig.push(2, 0, 1, 4);
    rig.push_all(kRanks, 1, 1);
    rig.run();
  };
  {
    Rig rig({.parameters = {.max_ranks = 3, .on_nonfinite = OnNonFinite::kStop}});
    run(rig, kNan);
    EXPECT_THAT(rig.take_reports(), ElementsAre("nonfinite 1 chunk 3 @1"));
    EXPECT_THAT(rig.take_posts(), IsEmpty());  // nothing completes any more
    rig.run();
    EXPECT_THAT(rig.take_reports(), IsEmpty());
  }
  {
    Rig rig({.parameters = {.max_ranks = 3, .mean = true, .on_nonfinite = OnNonFinite::kExclude}});
    run(rig, kNan);
    EXPECT_THAT(rig.take_reports(), ElementsAre("excluded 1 chunk 3 @1"));
    EXPECT_EQ(rig.result(0), 3);  // of the two that are left
    EXPECT_THAT(rig.take_posts(), SizeIs(6));
  }
  {
    Rig rig({.parameters = {.max_ranks = 3, .on_nonfinite = OnNonFinite::kExclude}});
    run(rig, kLargest);
    EXPECT_THAT(rig.take_reports(), ElementsAre("nonfinite nobody chunk 3 @1"));
  }
  {
    Rig rig({.parameters = {.max_ranks = 3, .on_nonfinite = OnNonFinite::kPass}});
    run(rig, kNan);
    EXPECT_THAT(rig.take_reports(), IsEmpty());
    EXPECT_NE(rig.result(0), rig.result(0));
  }
}

TEST(CoreJob, AProbeTellsWhoIsWaitedFor) {
  Rig rig({.parameters = {.max_ranks = 70}});
  Probe probe;
  probe.arrivals.resize(70);
  probe.waited_for.resize(2);
  rig.job->probe(probe);
  EXPECT_EQ(probe.min_round, 1u);
  EXPECT_THAT(probe.waited_for, ElementsAre(0, 0));  // nobody has sent anything: nobody waits
  rig.push_all(kRanks, 0, 1);
  rig.push(0, 1, 1, 1);
  rig.push(2, 1, 1, 1);
  rig.run();
  rig.job->probe(probe);
  EXPECT_THAT(probe.waited_for, ElementsAre(2, 0));
  EXPECT_EQ(probe.arrivals[0], 2u);
  EXPECT_EQ(probe.arrivals[1], 1u);
  EXPECT_EQ(probe.chunks_completed, 1u);
  rig.job->hold();
  rig.job->commit({.round = 2, .admitted = {rig.admission(65, 1, 2)}});
  rig.push(0, 0, 2, 1);
  rig.run();
  rig.job->probe(probe);
  EXPECT_THAT(probe.waited_for, ElementsAre(6, 2));
}

TEST(CoreJob, ItSleepsUntilARankComesWithoutWhomNothingCompletes) {
  Rig rig({});
  EXPECT_TRUE(rig.job->arm());
  EXPECT_THAT(rig.endpoint.wake_after, ElementsAre(1, 0, 0));
  rig.push(0, 0, 1, 1);
  EXPECT_FALSE(rig.job->arm());
  rig.run();
  EXPECT_TRUE(rig.job->arm());
  EXPECT_THAT(rig.endpoint.wake_after, ElementsAre(0, 1, 0));
  rig.push_all(kRanks, 1, 1);
  rig.push(1, 0, 1, 1);
  rig.run();
  EXPECT_TRUE(rig.job->arm());
  EXPECT_THAT(rig.endpoint.wake_after, ElementsAre(0, 0, 1));
  rig.push(2, 1, 1, 1);  // out of turn for chunk 1: round 1 is over there
  rig.arrive(2, {9, 0, ImmKind::kData});
  rig.run();
  EXPECT_FALSE(rig.job->arm());  // a report waits to be taken
  EXPECT_THAT(rig.take_reports(), ElementsAre("violation 2"));
  EXPECT_TRUE(rig.job->arm());
}

TEST(CoreJob, HyperparametersOfARound) {
  Rig rig({.parameters = {.max_ranks = 3, .optimizer = kernels::Optimizer::kSgd}, .chunks = 2});
  rig.push_all(kRanks, 0, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), -kAll3);
  rig.job->hold();
  std::vector<HyperVersion> changed = rig.hyper;
  changed.push_back(changed.front());
  changed.back().from_round = 2;
  changed.back().values.lr = 0.5;
  rig.job->commit({.round = 2, .hyper = rig.view(changed)});
  rig.push_all(kRanks, 1, 1);  // still round 1
  rig.push_all(kRanks, 0, 2);
  rig.run();
  EXPECT_EQ(rig.result(1), -kAll3);
  EXPECT_EQ(rig.result(0), -kAll3 * 1.5f);
  for (uint64_t round = 3; round < 600; ++round) {  // the round's low bits come round
    rig.push_all(kRanks, 0, round);
    rig.run();
    ASSERT_EQ(rig.result(0), -kAll3 * (1 + 0.5f * static_cast<float>(round - 1)));
  }
}

// A pass ends when it has taken its part of the core, in bytes of all ranks.
TEST(CoreJob, APassIsMeasuredInBytes) {
  constexpr uint32_t kLarge = CoreJob::kPassBytes / sizeof(float);
  Rig large({.chunks = 3, .elements = kLarge});
  Rig small({.chunks = 400, .elements = 64});
  for (uint32_t c = 0; c < 3; ++c) large.push_all(kRanks, c, 1);
  for (uint32_t c = 0; c < 400; ++c) small.push_all(kRanks, c, 1);
  uint64_t bytes = 0;
  EXPECT_TRUE(large.job->step(bytes));
  EXPECT_EQ(large.take_posts().size(), 3u);  // one chunk, to three ranks
  EXPECT_GE(bytes, 4 * CoreJob::kPassBytes);
  while (small.endpoint.inbox.pending() > 0) {  // arrivals are taken in batches
    bytes = 0;
    small.job->step(bytes);
    EXPECT_LE(bytes, CoreJob::kPassBytes + 8192);
  }
}

TEST(CoreJob, OnlyWhatHappenedCountsAsActivity) {
  Rig rig({.chunks = 2});
  const uint64_t before = rig.job->activity();
  for (int i = 0; i < 10; ++i) rig.job->step();
  EXPECT_EQ(rig.job->activity(), before);
  rig.push(0, 0, 1, 1);
  rig.run();
  const uint64_t arrived = rig.job->activity();
  EXPECT_GT(arrived, before);
  rig.job->hold();
  rig.job->commit({.round = 1});
  EXPECT_GT(rig.job->activity(), arrived);
}

// The one that a round waits for may never come: then the others' arrivals are to be seen, too.
TEST(CoreJob, WaitsForOneRankAloneOnceAtMost) {
  Rig rig({.chunks = 2});
  rig.push(0, 0, 1, 1);
  rig.push(1, 0, 1, 1);
  rig.run();
  const uint64_t before = rig.job->activity();
  EXPECT_TRUE(rig.job->arm());
  EXPECT_THAT(rig.endpoint.wake_after, ElementsAre(0, 0, 1));
  EXPECT_TRUE(rig.job->waits_for_one());
  EXPECT_GT(rig.job->activity(), before);
  EXPECT_TRUE(rig.job->arm());
  EXPECT_THAT(rig.endpoint.wake_after, ElementsAre(1, 1, 1));
  EXPECT_FALSE(rig.job->waits_for_one());
  rig.push(0, 1, 1, 1);
  rig.run();
  EXPECT_TRUE(rig.job->arm());
  EXPECT_THAT(rig.endpoint.wake_after, ElementsAre(0, 0, 1));
}

}  // namespace core_job_test
}  // namespace phub

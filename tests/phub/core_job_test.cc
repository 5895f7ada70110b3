#include "phub/core/core_job.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>

#include "tests/phub/core_job_rig.h"
#include "tests/phub/core_script.h"

namespace phub {
namespace core_job_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::play_core;
using Rig = testing::CoreJobRig;

const std::vector<uint32_t> kRanks = {0, 1, 2};

TEST(CoreJob, AChunkCompletesWithItsLastRank) {
  play_core(R"(
    job | push 2,0 1@1 | sent
    push 1 1@1 | sent 0-2:1@1 | flushed 3 | has 1=21 0,2-3=0
  )");
}

TEST(CoreJob, NobodyHasToSendZeros) {
  play_core(R"(
    # Nulls are in the divisor.
    job mean | push 0 0@1=9 | null 1,2 0@1 | sent 0-2:0@1 | has 0=3
    null 0-2 0@2 | sent 0-2:0@2 | has 0=0
  )");
}

TEST(CoreJob, AContributionCountsOnce) {
  play_core(R"(
    # Even if it says something else now.
    job | push 1 0@1 | push 1 0@1 | null 1 0@1 | push 0,2 0@1 | sent 0-2:0@1 | has 0=21
    # Once more after the round: its result was lost on the way, and is sent again to that rank.
    push 1 0@2 | run | again 2 0@1 | sent 2:0@1 | has 0=21
    push 0,2 0@2 | sent 0-2:0@2 | has 0=21
  )");
}

// What is in the round of chunk 1 goes on; chunk 0 lacks rank 1.
TEST(CoreJob, WhatCannotBeIsAViolationOfThatRankAlone) {
  const struct {
    const char* what;
    const char* command;
    const char* violation;
  } kCases[] = {
      {"a chunk that is not there", "again 1 4@3", "chunk 4"},
      {"the last that an immediate can name", "null 1 65535@3", "chunk 65535"},
      {"a round that is to come", "again 1 0@4", "round 4"},
      {"a round long ago", "again 1 0@1", "round 1"},
      {"a null of the wrong round", "null 1 0@1", "round 1"},
      {"initial parameters in a job without", "initial 1 0", "kind 2"},
      {"a control message", "control 1 0@3", "kind 3"},
  };
  for (const auto& [what, command, violation] : kCases) {
    SCOPED_TRACE(what);
    play_core(fmt::format(R"(
      job | push 0-2 0-3@1 | sends 12 | push 0-2 0-3@2 | sends 12
      push 1 1@3 | {0} | {0} | push 1 0@3 | push 0,2 0,1@3
      told violation 1 {1} | sent 0,2:1@3 | has 1=21
    )",
                          command, violation));
  }
}

TEST(CoreJob, ABrokenQueuePairIsReportedOnce) {
  play_core("job | break 2 | break 2 | push 2 0@1 | told broken 2");
}

TEST(CoreJob, WhileHeldNoNewRoundIsCompleted) {
  play_core(R"(
    job | push 0-2 0-2@1 | run | push 0 1@2 | sent 0-2:0-2@1 | hold 2 2 1
    # Chunk 3 is in an earlier round.
    push 0-2 0@2 3@1 | sent 0-2:3@1 | push 0-2 3@2 | sent
    commit 2 | sent 0-2:0,3@2
  )");
}

// Chunks of a later round are ready, and others before them, when a rank comes that takes part in
// it. A pass completes eight.
TEST(CoreJob, WhatWasReadyWaitsForANewcomer) {
  play_core(R"(
    job chunks=12 elements=10592 ranks=0,1 priorities=0,0,0,0,1,1,1,1,1,1,1,1
    push 0,1 0-3@1 | sends 8 | push 0,1 4-11@1 0-3@2 | step | posted 0-1:4-11@1
    hold 2 | commit 2 +2.1@2 | posted 2:0-11@1 | sent
    push 2 3@2 | sent 0-2:3@2 | has 3=21
  )");
}

// Its last rank is gone in the middle of a round, and who comes begins behind those that it began.
TEST(CoreJob, RoundsThatNobodyCanTakePartInAreSkipped) {
  play_core(R"(
    job chunks=2 ranks=0
    push 0 0@1 | run | push 0 0@2 | run | push 0 0@3 | run | push 0 0@4 | sends 4
    hold 5 | commit 5 -0 +1.1@5 | sent-mixed 1:0-1@4
    push 1 1@5=7 | sent 1:1@5 | has 1=7
  )");
}

// A chunk that a boundary moved on is in no round that the others close.
TEST(CoreJob, ARoundOfAGateIsOfTheChunksThatAreInIt) {
  play_core(R"(
    job gated nan=skip momentum snapshots chunks=2 ranks=0
    push 0 0@1=nan | run | hold 2 1 1 | commit 2 -0 +1.1@2 | run | sends 2
    push 1 0-1@2=1 | sends 5 | order snapshot | told snapped @3 | copied 0=-1/1/1 | copied 1=-1/1/2
  )");
}

TEST(CoreJob, WhatWasReadyBeforeTheHoldIsHeldToo) {
  play_core(R"(
    job chunks=20 elements=10592 | push 0-2 0-19@1 | step | posted 0-2:0-6@1 | hold 2
    push 0-2 0@2 | sent 0-2:7-19@1 | commit 2 | sent 0-2:0@2
  )");
}

// A lost rank's contribution that was accepted: kept where the box has its bytes, dropped where
// they are still the worker's. Nulls have no bytes to change.
TEST(CoreJob, ALostRanksContributions) {
  constexpr std::string_view kBefore = R"(
    push 0-2 1-3@1 | sends 9 | push 1 1@2=12 | null 1 2@2 | push 0,2 0@1 | run
    hold | commit 2 -1 | attached 0 2 | sent 0,2:0@1 | has 0=17/2
    # What it still writes arrives nowhere.
    push 0,2 0-3@2=6 | push 1 3@2=1000 | sends 8 | has 0=6 2=12/3 3=6
  )";
  play_core(fmt::format("job mean \n{}\n last 1 0 2 2 1 | has 1=24/3", kBefore));
  play_core(fmt::format("job mean workers-own \n{}\n last 1 0 1 2 1 | has 1=6", kBefore));
}

// What nobody has a gradient of stays as it is, and the optimizer makes no step on it.
TEST(CoreJob, UnusedChunksAreLeftOut) {
  play_core(R"(
    job half-momentum | push 0-2 1@1=1 | sends 3 | has 1=-3
    null 0-2 1@2 | sends 3 | has 1=-4.5 | push 0 1@3=1 | null 1,2 1@3 | sends 3 | has 1=-6.25
    null 0-2 1@4 | sends 3 | has 1=-7.125
    job half-momentum unused=skip | push 0-2 1@1=1 | sends 3 | has 1=-3
    null 0-2 1@2 | sends 3 | has 1=-3 | push 0 1@3=1 | null 1,2 1@3 | sends 3 | has 1=-5.5
    null 0-2 1@4 | sends 3 | has 1=-5.5
  )");
}

// What is too small to change 1 alone does so together with its group, whoever of it is there: one
// of them is null, excluded, gone.
TEST(CoreJob, GroupsOrderTheSum) {
  for (const auto& [groups, sum] : {std::pair("", "1"), std::pair("2,2", "0x1.000002p0"),
                                    std::pair("1,(1,2)", "0x1.000002p0")}) {
    play_core(fmt::format(R"(
      job max=4 ranks=0-3 groups={} nan=exclude
      push 0 0@1=0 | push 1 0@1=1 | push 2,3 0@1=0x1p-24 | run | has 0={}
      null 0 1@1 | push 1 1@1=1 | push 2,3 1@1=0x1p-24 | run | has 1={}
      push 0 2@1=nan | push 1 2@1=1 | push 2,3 2@1=0x1p-24 | told excluded 0 chunk 1 @1 | has 2={}
      hold | commit 2 -0 | push 1 0@2=1 | push 2,3 0@2=0x1p-24 | run | has 0={}
    )",
                          groups, sum, sum, sum, sum));
  }
}

// More ranks than a word has bits, and a boundary in which several go.
TEST(CoreJob, OneOfManyIsLostTwiceOver) {
  play_core(R"(
    job max=70 ranks=0-69 workers-own chunks=1 | push 0-2,4-65,67-69 0@1=1 | run
    hold | commit 1 -66 -3 -69 | last 66 0 | last 3 0 | last 69 0 | sends 67 | has 0=67
  )");
}

TEST(CoreJob, ForWhomTheJobPausesIsAwaitedFromTheNextRoundOn) {
  play_core(R"(
    job workers-own | push 0,1 0@1 | run | hold 1 1 | commit 1 ~1@2 | last 1 0 0 0 0
    # Round 1 is finished without it, and round 2 is not.
    push 2 0@1 | push 0,2 1-3@1 | sent 0,2:0-3@1 | has 0=17 | push 0,2 0@2 | sent
    hold | commit 2 +1.2@2 | posted 1:0-3@1 | push 1 0@2 | sent 0-2:0@2 | has 0=21
  )");
}

TEST(CoreJob, ANewRankEntersTheRoundInProgress) {
  play_core(R"(
    # Chunk 0 is complete in round 3, but for the hold.
    job max=4 | push 0-2 0-2@1 | run | push 0-2 0@2 | sends 12 | push 0-2 0@3 | hold 3 | sent
    # The others are not that far; round 3 waits for the newcomer.
    commit 3 +3.1@3 | posted 3:0@2 | sent
    push 0-2 1-2@2 | sent 0-3:1-2@2 | has 1=21 | push 3 0@3 | sent 0-3:0@3 | has 0=85
    # A round before its first is not its business.
    push 3 3@1 | told violation 3 round 1
  )");
}

TEST(CoreJob, ASuccessorBeginsAfterWhatItsPredecessorGave) {
  play_core(R"(
    job chunks=2 | push 1 0@1 | run | hold | commit 1 -1 | last 1 1 0 | hold | commit 1 +1.2@2
    push 0,2 0,1@1 | sent 0-2:0,1@1 | has 0=21 1=17
    push 0-2 0,1@2 | sends 6 | has 0,1=21
  )");
}

TEST(CoreJob, ARankThatNeverCameIsForgotten) {
  play_core(R"(
    job nobody | hold | commit 1 +0.1@1 +1.1@1 | sends 8 | push 0,1 0-3@1 | sent
    hold | commit 1 x2 | sends 8 | has 3=5
  )");
}

TEST(CoreJob, ResultsAreOwedToAFullQueue) {
  Rig rig({.chunks = 130});
  rig.endpoint.room = 5;
  for (uint32_t chunk = 0; chunk < 130; ++chunk) rig.push_all(kRanks, chunk, 1);
  rig.run();
  EXPECT_TRUE(rig.job->owes());
  std::vector<std::string> posts = rig.take_posts();
  EXPECT_THAT(posts, ::testing::SizeIs(5));
  for (int i = 0; i < 1000 && rig.job->owes(); ++i) {
    rig.endpoint.room = 7;
    rig.run();
    for (std::string& post : rig.take_posts()) posts.push_back(std::move(post));
  }
  EXPECT_FALSE(rig.job->owes());
  EXPECT_THAT(posts, ::testing::SizeIs(3 * 130));
  const std::set<std::string> different(posts.begin(), posts.end());
  EXPECT_THAT(different, ::testing::SizeIs(3 * 130));
  EXPECT_THAT(rig.take_posts(), IsEmpty());
}

// Where one result at a time may go, ranks take turns, each with the most important of its own.
TEST(CoreJob, WhoIsOwedResultsTakesTurns) {
  play_core(R"(
    job priorities=0,3,1,2 | room 0 | push 0-2 0-3@1 | run | owes
    room 1 | sent 0:1@1 | room 1 | sent 1:1@1 | room 1 | sent 2:1@1
    room 1 | sent 0:3@1 | room 1 | sent 1:3@1 | room 1 | sent 2:3@1
    room 1 | sent 0:2@1 | room 1 | sent 1:2@1 | room 1 | sent 2:2@1
    room 1 | sent 0:0@1 | room 1 | sent 1:0@1 | room 1 | sent 2:0@1 | owes-nothing
  )");
}

TEST(CoreJob, NothingIsOwedToTheLost) {
  play_core(R"(
    job | room 0 | push 0-2 0-3@1 | run | hold | commit 2 -0 -1 -2 | owes-nothing
    room 100 | sent
  )");
}

TEST(CoreJob, HigherPriorityCompletesFirst) {
  play_core("job priorities=-1,5,5,7 | push 0-2 0-3@1 | sent 0-2:3@1 0-2:1@1 0-2:2@1 0-2:0@1");
}

TEST(CoreJob, InitialParametersOfFullWidthComeInOnePart) {
  play_core(R"(
    # Sent twice: the result is on its way.
    job sgd initial chunks=2 | initial 0 0=40 | initial 0 0 | sent 0-2:0@0
    # Over a new connection: the result again.
    detach 0 | reattach 0.1 | initial 0 0 | sent 0:0@0 | has 0=40
    push 0-2 0@1 | sends 3 | has 0=19 | told
    # Of chunk 1 there are no parameters yet; only rank 0 sends them.
    push 1 1@1 | told violation 1 round 1 | initial 2 1 | told violation 2 kind 2
  )");
}

TEST(CoreJob, InitialParametersOfHalfWidthComeInTwoParts) {
  play_core(R"(
    # It did not see the answer: what was taken stays.
    job sgd initial chunks=2 bf16 | initial 0 0.0=7 | sent 0:0i0 | initial 0 0.0=9 | sent 0:0i0
    initial 0 0.1=8 | sent 0-2:0@0 | has 0.0-31=7 0.32-63=8
    # The second part first.
    initial 0 1.1 | told violation 0 round 1
  )");
}

// A loss of rank 0 fails the job while the parameters are not there: what counts is what is there
// after the commit.
TEST(CoreJob, InitialParametersThatCompleteBetweenHoldAndCommitAreThere) {
  play_core("job sgd initial chunks=1 | hold | initial 0 0 | run | commit 1 -0 | lowest 1");
}

// What a rank sends next could overtake what it sent again: a result of the chunk must not come
// before that is here, though the box had the contribution.
TEST(CoreJob, AfterAReconnectionAResultFollowsWhatIsSentAgain) {
  play_core(R"(
    job | push 1 0@1 | run | detach 1 | reattach 1.1 | push 0,2 0@1 | sent 0,2:0@1
    # Of chunk 2 it lacks the result of the round before its first.
    push 1 0@1 | control 1 2@0 | sent 1:0@1 1:2@0 | push 0-2 0@2 | sent 0-2:0@2 | told
  )");
}

// It takes the place of an older report of its rank, however many came after that one.
TEST(CoreJob, AViolationAfterAReconnectionIsToldOfItsOwnRank) {
  play_core(R"(
    job | break 1 | break 2 | run | detach 1 | reattach 1.1 | raw 1 data 1@1 4 256
    told violation 1 bytes 4, broken 2
  )");
}

// What a frame did not overwrite would be summed as if it had come. It does not count.
TEST(CoreJob, APayloadOfAnotherSizeOrAtAnotherPlaceIsAViolation) {
  play_core(R"(
    job | raw 1 data 1@1 252 256 | push 0,2 1@1 | sent | told violation 1 bytes 252
    job | raw 1 data 1@1 260 256 | push 0,2 1@1 | sent | told violation 1 bytes 260
    job | raw 1 data 1@1 0 256 | push 0,2 1@1 | sent | told violation 1 bytes 0
    job | raw 1 data 1@1 256 0 | push 0,2 1@1 | sent | told violation 1 place 0
    job | raw 1 data 1@1 256 512 | push 0,2 1@1 | sent | told violation 1 place 512
    job | raw 1 data 1@1 256 4294967295 | push 0,2 1@1 | sent | told violation 1 place 4294967295
    job | raw 1 null 1@1 256 256 | push 0,2 1@1 | sent | told violation 1 bytes 256
    job | raw 1 data 1@1 256 256 | raw 1 null 2@1 0 4711 | told
  )");
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

// Of rows and of pairs there are no more than the limits, also if more would fit into the slot.
TEST(CoreJob, APayloadOfEitherFormHasNoMoreThanTheLimit) {
  struct Case {
    uint32_t first;
    uint32_t limit;
    uint64_t bytes;
    bool fits;
  };
  using kernels::kPairs;
  constexpr uint64_t kRow = 4 + 16 * 4, kPair = (4 + 16) * 4;  // of 4 x 16
  for (const Case& c : {Case{kPairs, 1, 4, true}, Case{kPairs + 1, 1, 4 + kPair, true},
                        Case{kPairs + 2, 1, 4 + 2 * kPair, false}, Case{4, 8, 4 + 4 * kRow, true},
                        Case{5, 8, 4 + 5 * kRow, false}}) {
    SCOPED_TRACE(fmt::format("{:#x}, and the limit is {}", c.first, c.limit));
    Rig rig({.form = kernels::SlotForm::kEither, .columns = 16, .limit = c.limit});
    const uint64_t at = 64 * sizeof(float);  // of chunk 1; those behind it are not used
    std::memcpy(rig.slots[1].data() + at, &c.first, sizeof c.first);
    rig.endpoint.inbox.push_back(
        {.rank = 1, .imm = encode({1, 1, ImmKind::kData}), .bytes = c.bytes, .offset = at});
    for (const uint32_t rank : {0u, 2u}) rig.arrive(rank, {1, 1, ImmKind::kData});
    rig.run();
    CoreReport report;
    ASSERT_EQ(rig.job->next_report(report), !c.fits);
    EXPECT_TRUE(c.fits || report.violation == CoreReport::kBytes);
  }
}

// Who has the result before gets nothing of one that is the same; who comes gets all of it.
TEST(CoreJob, AResultThatIsTheSameIsSentToNobodyWhoHasIt) {
  Rig rig({.parameters = {.max_ranks = 3, .rules = {.optimizer = kernels::Optimizer::kSgd}},
           .chunks = 1,
           .form = kernels::SlotForm::kRows,
           .columns = 16,
           .limit = 3,
           .lazy = true,
           .expected = {0, 1}});
  const kernels::SlotShape shape{64, kernels::DType::kF32, kernels::SlotForm::kRows, 16, 3};
  const std::vector<float> row(16, 2.0f);
  kernels::clear_rows(rig.slots[1].data());
  kernels::append_row(shape, 2, row.data(), rig.slots[1].data());
  const auto round = [&rig](uint32_t number, const std::vector<uint32_t>& ranks, ImmKind of_1) {
    for (const uint32_t rank : ranks) {
      rig.arrive(rank, {0, number, rank == 1 ? of_1 : ImmKind::kNull});
    }
    rig.run();
    return rig.take_posts();
  };
  EXPECT_THAT(round(1, {0, 1}, ImmKind::kData), ElementsAre("0:0@1", "1:0@1"));
  EXPECT_THAT(round(2, {0, 1}, ImmKind::kNull), ElementsAre("0:0@2n", "1:0@2n"));
  rig.job->hold();
  rig.job->commit({.round = 3, .admitted = {rig.admission(2, 1, 3)}});
  EXPECT_THAT(rig.take_posts(), ElementsAre("2:0@2"));
  EXPECT_THAT(round(3, kRanks, ImmKind::kNull), ElementsAre("0:0@3n", "1:0@3n", "2:0@3n"));
}

// A chunk of 64 elements has 256 bytes in f32, 68 in int8 and 32 in topk.
TEST(CoreJob, TheRoundSaysTheFormat) {
  play_core(R"(
    job formats=f32*1,int8*1,f32 chunks=1
    push 0-2 0@1 | sent 0-2:0@1 | has 0=21
    raw 0 data 0@2 68 0
    # Once more, in the format that it was sent in.
    raw 1 data 0@1 256 0 | sent 1:0@1 | raw 1 data 0@2 68 0 | raw 2 data 0@2 68 0 | sent 0-2:0@2
    raw 0 data 0@2 68 0 | sent 0:0@2 | raw 0 data 0@3 256 0
    raw 1 data 0@3 68 0 | told violation 1 bytes 68
    raw 2 data 0@2 256 0 | told violation 2 bytes 256
  )");
  play_core(R"(
    job formats=int8*255,topk chunks=1 ranks=0-2 first=255 nobody
    hold | commit 255 +0.1@255 +1.1@255 +2.1@255 | sends 3
    raw 0 data 0@255 68 0 | raw 1 data 0@255 68 0 | raw 2 data 0@255 68 0 | sent 0-2:0@255
    raw 1 data 0@255 68 0 | sent 1:0@255
    raw 0 data 0@256 32 0 | raw 1 data 0@256 32 0 | raw 2 data 0@256 32 0 | sent 0-2:0@0
    raw 1 data 0@256 32 0 | sent 1:0@0
    raw 1 data 0@257 68 0 | told violation 1 bytes 68
  )");
}

// Their parts are of what a slot has room for, not of the first round's gradient.
TEST(CoreJob, InitialParametersComeAsTheLargestFormatLetsThem) {
  play_core(R"(
    job sgd initial formats=topk*1,int8 chunks=1
    raw 0 initial 0@0 64 0 | sent 0:0i0 | raw 0 initial 0@1 64 0 | sent 0:0i1
    raw 0 initial 0@2 64 0 | sent 0:0i2 | raw 0 initial 0@3 64 0 | sent 0-2:0@0
    raw 0 data 0@1 32 0 | raw 1 data 0@1 68 0 | told violation 1 bytes 68
  )");
}

// 16-bit gradients: the f32 of the initial parameters come in two parts, of the sizes that they
// have.
TEST(CoreJob, PartsOfInitialParametersHaveTheirSize) {
  play_core(R"(
    job sgd initial chunks=2 elements=33 f16 | raw 0 initial 0@0 64 0 | told
    raw 0 initial 0@1 68 0 | told
    job sgd initial chunks=2 elements=33 f16 | raw 0 initial 0@0 68 0 | told violation 0 bytes 68
    job sgd initial chunks=2 elements=33 f16 | initial 0 0 | raw 0 initial 0@1 64 0
    told violation 0 bytes 64
  )");
}

TEST(CoreJob, ASuccessorSendsTheInitialParametersFromTheStart) {
  play_core(R"(
    job sgd initial workers-own chunks=1 f16 | initial 0 0.0 | sent 0:0i0
    hold | commit 1 ~0@1 | lowest 0 | last 0 0 | hold | commit 1 +0.2@1 | sent
    initial 0 0.0=3 | run | initial 0 0.1 | sent 0:0i0 0-2:0@0 | has 0=3
  )");
}

TEST(CoreJob, NonFiniteGradients) {
  play_core(R"(
    # Nothing completes any more.
    job nan=stop | push 0 0@1=2 | push 1 0@1=nan | push 2 0@1=4 | push 0-2 1@1
    told nonfinite 1 chunk 3 @1 | sent
    job nan=exclude mean | push 0 0@1=2 | push 1 0@1=nan | push 2 0@1=4 | push 0-2 1@1
    told excluded 1 chunk 3 @1 | sends 6 | has 0=3
    # All are finite, their sum is not.
    job nan=exclude | push 0,1 0@1=0x1.fffffep127 | push 2 0@1=4
    told nonfinite nobody chunk 3 @1
    job nan=pass | push 0 0@1=2 | push 1 0@1=nan | push 2 0@1=4 | sends 3 | has 0=nan
  )");
}

TEST(CoreJob, AProbeTellsWhoIsWaitedFor) {
  play_core(R"(
    # Where nobody has sent anything, nobody waits.
    job max=70 | open 1 | waits | push 0-2 0@1 | push 0,2 1@1 | sends 3
    waits 1 | arrivals 2 1 2 | completed 1
    hold | commit 2 +65.1@2 | push 0 0@2 | waits 1 2 65
  )");
}

TEST(CoreJob, ItSleepsUntilARankComesWithoutWhomNothingCompletes) {
  play_core(R"(
    job | sleeps 1 0 0 | push 0 0@1 | busy | run | sleeps 0 1 0
    push 0-2 1@1 | push 1 0@1 | run | sleeps 0 0 1
    # Out of turn for chunk 1: round 1 is over there. A report waits to be taken.
    push 2 1@1 | again 2 9@0 | run | busy | told violation 2 chunk 9 | sleeps
  )");
}

// The one that a round waits for may never come: then the others' arrivals are to be seen, too.
TEST(CoreJob, WaitsForOneRankAloneOnceAtMost) {
  play_core(R"(
    job chunks=2 | push 0,1 0@1 | run | activity grows | sleeps 0 0 1 | for-one yes | activity grows
    sleeps 1 1 1 | for-one no | push 0 1@1 | run | sleeps 0 0 1
  )");
}

// The round's low bits come round.
TEST(CoreJob, HyperparametersOfARound) {
  std::string script = R"(
    job sgd chunks=2 | push 0-2 0@1 | run | has 0=-21 | hold 2 | lr 2 0.5 | commit 2
    # Chunk 1 is still in round 1.
    push 0-2 1@1 0@2 | run | has 1=-21 0=-31.5
  )";
  for (int round = 3; round < 600; ++round) {
    script += fmt::format("push 0-2 0@{} | run | has 0={}\n", round, -21 * (1 + 0.5 * (round - 1)));
  }
  play_core(script);
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
  play_core(R"(
    job chunks=2 | activity grows | step 10 | activity stays | push 0 0@1 | run | activity grows
    hold | commit 1 | activity grows
  )");
}

// Each gradient times its weight; a mean divides by the sum of the weights.
TEST(CoreJob, GradientsHaveWeights) {
  play_core(R"(
    job weights chunks=1 | push 0 0@1=1/2 | push 1 0@1=8/0.5 | null 2 0@1/4 | sent 0-2:0@1
    has 0=6
    job weights chunks=1 mean | push 0 0@1=1/2 | push 1 0@1=8/0.5 | null 2 0@1/4 | sent 0-2:0@1
    has 0=12/13
    # What comes again changes nothing.
    push 0 0@2=1/2 | push 0 0@2=1/2 | push 1,2 0@2=4/1 | sent 0-2:0@2 | has 0=10/4
  )");
}

TEST(CoreJob, AWeightIsAFiniteNumberAbove0) {
  for (const char* weight : {"0", "-1", "nan", "inf", "1e-39"}) {
    const uint32_t bits = std::bit_cast<uint32_t>(std::strtof(weight, nullptr));
    for (const char* push : {"push 0 0@1=1/", "null 0 0@1/"}) {
      play_core(fmt::format("job weights chunks=1 | {}{} | told violation 0 weight {} | sent", push,
                            weight, bits));
    }
  }
}

}  // namespace core_job_test
}  // namespace phub

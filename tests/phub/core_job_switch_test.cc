// CoreJob with sums that come through a switch: what counts of them and of what ranks send
// directly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/phub/core_job_parts.h"
#include "tests/phub/core_script.h"

namespace phub::testing {
namespace core_job_switch_test {

using ::testing::ElementsAre;
using ::testing::SizeIs;
using Rig = CoreJobRig;

TEST(CoreJobSwitch, ASumTakesThePlaceOfAllSlots) {
  play_core(R"(
    job switch | sum 2@1=100 | sent 0-2:2@1 | has 2=100 | answered taken
    sum 2@2=200 | sent 0-2:2@2 | has 2=200 | answered taken
    sum 2@3=300 | sent 0-2:2@3 | has 2=300 | answered taken
  )");
}

TEST(CoreJobSwitch, WhoSendsDirectlyAfterTheSumCountsOnceAndGetsNoSecondResult) {
  play_core(R"(
    job switch | sum 0@1=21 | sends 3 | push 1 0@1 | sent | has 0=21 | told switch 1
    # From now on all of them send directly.
    sum 0@2=999 | push 0-2 0@2 | sends 3 | has 0=21
  )");
}

TEST(CoreJobSwitch, AfterADirectContributionNoSumCounts) {
  play_core(R"(
    job switch | push 2 0@1 | sum 0@1=999 | sent | answered ended
    push 0,1 0@1 | sends 3 | has 0=21 | told switch 2
  )");
}

// The first one ends in round 1, and two rounds later another begins with the round after those in
// progress: everybody is told with the results of these.
TEST(CoreJobSwitch, AnotherGenerationBeginsWithARoundThatNobodyCanHaveSent) {
  play_core(R"(
    job switch | pushes 1 | begins 1 2 | pushes 2 | begins 1 3 | told switch 0
    pushes 3 | begins 1 4 0 1 2 | told begun @4
    # This is of the generation that has ended.
    sum 1@4=999 | sent | answered-last ended
    generation 1 4 | sum 0-3@4=100 | sends 12 | has 0-3=100 | sum 0-3@5=100 | sends 12
    sum 0-3@6=100 | sends 12 | sum 0-3@7=100 | sends 12 | sum 0-3@8=100 | sends 12
    sum 0-3@9=100 | sends 12 | answered-last taken
    # This one has lasted: it is waited for two rounds again.
    pushes 10 | told switch 0 | pushes 11 | pushes 12 | begins 2 13 0 1 2
    told begun @13
    # It knows nothing of the turns of the one before.
    generation 2 13 | sum 0-3@13=50 | sends 12 | has 0-3=50
  )");
}

// Those that bring nothing are tried again after twice as many rounds each time.
TEST(CoreJobSwitch, WhatDoesNotLastIsTriedLessAndLessOften) {
  FakeSwitch behind;
  Rig rig(behind.before({}));
  const std::vector<uint32_t> ranks = {0, 1, 2};
  std::vector<uint64_t> begun;
  for (uint64_t round = 1; round <= 120; ++round) {
    for (uint32_t chunk = 0; chunk < 4; ++chunk) {
      rig.push_all(ranks, chunk, round);
      rig.run();
    }
    for (const std::string& report : rig.take_reports()) {
      if (report.starts_with("begun")) begun.push_back(std::stoull(report.substr(7)));
    }
  }
  ASSERT_GE(begun.size(), 4u);
  for (size_t i = 1; i + 1 < begun.size(); ++i) {
    EXPECT_GE(begun[i + 1] - begun[i], 2 * (begun[i] - begun[i - 1]) - 4) << i;
  }
  EXPECT_LE(begun.size(), 7u);
}

// Without one of the ranks there is none, nor where another one is there that the switch does not
// know.
TEST(CoreJobSwitch, AGenerationNeedsItsRanks) {
  play_core(R"(
    job switch max=4 | pushes 1 | detach 2 | told switch 0
    pushes 2 0,1 | hold | commit 2 -2 | run | pushes 3 0,1 | pushes 4 0,1 | pushes 5 0,1 | pushes 6 0,1
    begins 1 8 | hold | commit 7 +2.2@7 | pushes 7 | pushes 8 | begins 1 9 0 1 2 | told begun @9
    # A fourth one comes: it is over, and stays so.
    hold | commit 9 +3.1@9 | told switch nobody
    pushes 9 0-3 | pushes 10 0-3 | pushes 11 0-3 | pushes 12 0-3 | pushes 13 0-3 | pushes 14 0-3
    pushes 15 0-3 | pushes 16 0-3 | pushes 17 0-3 | pushes 18 0-3 | pushes 19 0-3 | begins 1 20
  )");
}

// A queue without room gets the news before the results that it is owed.
TEST(CoreJobSwitch, WhoIsOwedResultsIsToldOfABeginningBefore) {
  play_core(R"(
    job switch | pushes 1 | pushes 2 | sends 24 | told switch 0 | room 0 | pushes 3 | posted
    room 1 | run | room 1 | run | room 1 | run | room 1 | run | room 1 | run | owes
    room 1 | run | room 1 | run | room 1 | run | room 1 | run | room 1 | run | owes
    room 100 | begins 1 4 0 1 2 | owes-nothing | told begun @4
  )");
}

// One that was never there is lost, or one comes that the switch does not know.
TEST(CoreJobSwitch, WhereRanksChangeNoSumCounts) {
  play_core(R"(
    job switch max=4 nobody | hold | commit 1 +0.1@1 +1.1@1 | hold | commit 1 $ | run | forget-posts
    sum 0@1=999 | sent | answered ended | told switch nobody
  )",
            {"+3.1@1", "-2"});
}

// So many ranks that a pass ends before all chunks are closed. Their round is settled: who is lost
// at the boundary is in it, whenever the chunks close.
TEST(CoreJobSwitch, SumsThatCameBeforeABoundaryHaveAllRanksAlsoOneThatIsLostAtIt) {
  for (const bool is_lost : {false, true}) {
    Rig::Options options{.parameters = {.max_ranks = 64}, .chunks = 30, .elements = 256};
    options.expected.clear();
    for (uint32_t rank = 0; rank < 64; ++rank) options.expected.push_back(rank);
    FakeSwitch behind;
    Rig rig(behind.before(options));
    for (uint32_t chunk = 0; chunk < 30; ++chunk) {
      behind.send_sum(chunk, 1, static_cast<int32_t>(100 + chunk));
    }
    rig.job->step();
    const size_t closed = rig.take_posts().size() / 64;
    ASSERT_LT(closed, 30u);
    const CoreReport held = rig.job->hold();
    EXPECT_EQ(held.round, 2u);
    EXPECT_EQ(held.started, 1u);
    Boundary boundary{.round = held.round};
    std::vector<uint64_t> last_rounds(30);
    if (is_lost) {
      boundary.lost = {{.rank = 5, .last_rounds = last_rounds}};
    } else {
      rig.run();  // what was ready at the boundary is completed before it, too
    }
    rig.job->commit(boundary);
    rig.run();
    for (uint32_t chunk = 0; chunk < 30; ++chunk) {
      EXPECT_EQ(rig.result(chunk), 100.0f + static_cast<float>(chunk));
      EXPECT_EQ(last_rounds[chunk], is_lost ? 1u : 0u);
    }
    EXPECT_EQ(rig.take_posts().size(), (30 - closed) * (is_lost ? 63 : 64));
  }
}

TEST(CoreJobSwitch, SumsThatComeDuringABoundaryCountAfterIt) {
  play_core(R"(
    job switch | hold 1 0 | sum 0@1=21 | sent | answered nothing
    commit 1 | sends 3 | has 0=21
  )");
}

// Of a round that is half through the switch nobody may be left out as if it had not begun.
TEST(CoreJobSwitch, ARoundHasStartedWithTheFirstPartThatIsKnownOf) {
  play_core(R"(
    # A chunk has two parts.
    job switch elements=300 | run | hold 1 0
    job switch elements=300 | sum 1@1=5 | run | hold 1 1
    job switch elements=300 | waiting 1@1 0,1 | run | hold 1 1
    # Another chunk is complete: others of its round are on their way.
    job switch | sum 0@1=21 | run | hold 2 1
  )");
}

// A chunk may take long: who does its part of it is not one that sends nothing.
TEST(CoreJobSwitch, AProbeCountsThePartsOfEachRankBeforeAChunkIsComplete) {
  play_core(R"(
    job switch elements=768 | parts 0 0 0 | waiting 0@1 0,2 | parts 1 0 1 | waiting 0@1 0,2
    parts 1 0 1 | sum 0@1=21 | parts 2 1 2 | arrivals
  )");
}

TEST(CoreJobSwitch, AProbeNamesWhoTheSwitchWaitsFor) {
  play_core(R"(
    job switch | waiting 0@1 0,2 | sum 2@1=21 | waits 1 | lacks 1 1
    waiting 3@1 1,2 | waits 0 1 | sum 3@1=21 | waits 1 | lacks 1 1 | sum 0@1=21 | waits | lacks 1 0
  )");
}

}  // namespace core_job_switch_test
}  // namespace phub::testing

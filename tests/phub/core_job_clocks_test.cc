// Cores of jobs that are not in lock-step: clocks, slack, and what losses and newcomers do to them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/phub/core_job_rig.h"
#include "tests/phub/core_script.h"
#include "tests/seeds.h"
#include "transport/error.h"

namespace phub::testing {
namespace core_job_clocks_test {

using ::testing::ElementsAre;

TEST(CoreClocks, AnUpdateIsAppliedWhenItComes) {
  play_core(R"(
    job async | push 1 0@1 | sent 1:0@1 | has 1:0=4 | push 1 0@2 | push 0 0@1 | sent 0:0@1 1:0@2
    has 0:0=9 1:0=9 1:1=0
  )");
}

TEST(CoreClocks, AResultIsWithheldUntilTheSlowestIsNear) {
  play_core(R"(
    # One ahead is within the slack.
    job slack=1 | push 0 0@1 | sent 0:0@1 | push 0 0@2 | push 1 0@1 | sent 1:0@1
    # What rank 1 has was copied when it went out.
    push 2 0@1 | sent 0:0@2 2:0@1 | has 0:0=22 1:0=6
  )");
}

TEST(CoreClocks, ANullUpdateMovesTheClockAlone) {
  play_core("job slack=0 | push 0 0@1=7 | null 1,2 0@1 | sent 0-2:0@1 | has 2:0=7");
}

TEST(CoreClocks, AnUpdateCountsOnce) {
  play_core(R"(
    # Its result was lost on the way.
    job slack=1 | push 0 0@1=3 | push 0 0@1=3 | sent 0:0@1 | again 0 0@1 | sent 0:0@1 | has 0:0=3
    # Withheld: it comes when it may.
    push 0 0@2=3 | run | again 0 0@2 | sent | told
    again 0 0@4 | told violation 0 round 4
  )");
}

// The queue was full when a result was asked for again, and the rank has gone on meanwhile.
TEST(CoreClocks, AnOwedResultIsWithheldToo) {
  play_core(R"(
    job slack=1 chunks=1 | room 1 | push 0 0@1=3 | sent 0:0@1 | again 0 0@1 | run
    push 0 0@2=3 | run | room 100 | sent
    push 1,2 0@1 | sent-mixed 0:0@2 1,2:0@1 | has 0:0=26
  )");
}

TEST(CoreClocks, AResultThatWasDueWhileNobodyWasAttachedComesAfterAReconnection) {
  play_core(R"(
    job slack=0 chunks=1 | push 0 0@1 | run | detach 0 | push 1,2 0@1 | sent 1,2:0@1
    reattach 0.1 | sent | push 0 0@1 | sent 0:0@1 | has 0:0=21
  )");
}

TEST(CoreClocks, ABoundaryStopsEveryClock) {
  play_core(R"(
    # The round is the slowest one's.
    job async | push 0 0@1 | sends 1 | hold 1 1 | push 0 0@2 | sent | hold 1 2
    commit 1 | sent 0:0@2
  )");
}

// More was ready than one pass applies.
TEST(CoreClocks, ABoundaryStopsWhatWasReadyToo) {
  play_core(R"(
    job async chunks=40 elements=8192 | push 0 0-39@1=1 | step | posted 0:0-15@1
    hold | sent | commit 1 | sent 0:16-39@1
  )");
}

TEST(CoreClocks, WhoIsLostIsNotWaitedFor) {
  play_core(R"(
    # What rank 2 sends is accepted, and not yet applied: it counts.
    job slack=0 chunks=1 | push 0,1 0@1 | sent | hold | push 2 0@1 | run
    commit 2 -2 | posted 0,1:0@1 | last 2 1 | has 0:0=21
    push 0,1 0@2 | run | push 0,1 0@3 | run | push 0,1 0@4 | run | has 1:0=36
    # Nothing of it counts any more.
    push 2 0@2 | run | has 1:0=36
  )");
}

TEST(CoreClocks, WhatALostRankCanStillChangeDoesNotCount) {
  play_core(R"(
    job slack=0 workers-own chunks=1 | push 0,1 0@1 | run | hold | push 2 0@1 | run
    commit 2 -2 | last 2 0 | run | has 0:0=5
  )");
}

TEST(CoreClocks, APausedJobGoesNoFurtherThanTheSlack) {
  play_core(R"(
    job slack=1 chunks=1 | hold | commit 1 ~2@1 | push 0,1 0@1 | sent 0,1:0@1 | push 0,1 0@2 | sent
    hold | commit 3 x2 | posted 0,1:0@2
  )");
}

TEST(CoreClocks, ANewcomerBeginsWithTheSlowest) {
  play_core(R"(
    job slack=2 chunks=1 ranks=0,1 | push 0,1 0@1 | run | push 0,1 0@2 | run | push 0,1 0@3 | run
    push 0 0@4 | sends 7 | hold 4 | commit 4 +2.1@4 | posted 2:0@3 | has 2:0=16
    push 2 0@4 | sent 2:0@4 | has 2:0=32
  )");
}

TEST(CoreClocks, TheSlowestIsWhoTheOthersWaitFor) {
  play_core("job slack=0 chunks=2 | waits | push 0,2 1@1 | waits 1 | open 1");
}

TEST(CoreClocks, WhoHasNotComeWaitsForNobody) {
  play_core(R"(
    job slack=0 initial chunks=1 ranks=0,1 nobody | hold | commit 1 +0.1@1
    initial 0 0 | sent 0:0@0 | open 1 | waits
    # Now somebody waits, who is there.
    push 0 0@1 | waits 1
  )");
}

const JobParameters kSsp{.max_ranks = 3, .rules = {.consistency = Consistency::kSsp}, .slack = 0};

// However a boundary ends, nobody writes to the memory of those that it takes out, and the log has
// what they took part in.
struct Failing : FakeEndpoint {
  bool post(QueuePair to, const Write& write) override {
    if (posts_fail) fail(ErrorCode::kInternal, "the device is gone");
    return FakeEndpoint::post(to, write);
  }
  void detach(uint32_t rank) override {
    FakeEndpoint::detach(rank);
    if (detaches_fail) fail(ErrorCode::kInternal, "the device is gone");
  }
  bool posts_fail = false, detaches_fail = false;
};

TEST(CoreClocks, WhoIsLostIsLetGoOfEvenIfTheDeviceFails) {
  for (const bool at_once : {false, true}) {
    SCOPED_TRACE(at_once);
    BasicCoreJobRig<Failing> rig({.parameters = kSsp, .chunks = 1});
    rig.push(0, 0, 1, 1);
    rig.push(2, 0, 1, 16);
    rig.run();
    rig.job->hold();
    std::vector<uint64_t> last1(1), last2(1);
    Boundary boundary{.round = 1};
    boundary.lost.push_back({.rank = 1, .expected_again = kNever, .last_rounds = last1});
    boundary.lost.push_back({.rank = 2, .expected_again = kNever, .last_rounds = last2});
    rig.endpoint.posts_fail = true;
    rig.endpoint.detaches_fail = at_once;
    EXPECT_THROW(rig.job->commit(boundary), Error);  // the loss of rank 1 lets the result of 0 go
    if (!at_once) {
      EXPECT_THAT(rig.endpoint.attached, ElementsAre(0u));
    }
    EXPECT_EQ(last1[0], 0u);
    EXPECT_EQ(last2[0], 1u);
  }
}

TEST(CoreJob, WhatALostRankTookPartInIsKnownEvenIfTheDeviceFails) {
  BasicCoreJobRig<Failing> rig({.parameters = {.max_ranks = 3}, .chunks = 2});
  for (const uint32_t rank : {0u, 1u, 2u}) rig.push(rank, 1, 1, 1);
  rig.run();
  rig.job->hold();
  std::vector<uint64_t> last(2);
  rig.endpoint.detaches_fail = true;
  EXPECT_THROW(rig.job->commit({.round = 2, .lost = {{.rank = 1, .last_rounds = last}}}), Error);
  EXPECT_THAT(last, ElementsAre(1u, 0u)) << "the chunks' numbers are not their indexes";
}

TEST(CoreClocks, NaNIsLeftOutOrStopsTheJob) {
  play_core(R"(
    job async nan=exclude | push 0 0@1=nan | push 1 0@1 | sent 0,1:0@1 | has 0:0=4
    told excluded 0 chunk 3 @1
    job async nan=stop | push 0 0@1=inf | sent | told nonfinite 0 chunk 3 @1
  )");
}

TEST(CoreClocks, InitialParametersComeFirst) {
  play_core(R"(
    job slack=1 initial chunks=1 | initial 0 0=5 | sent 0-2:0@0 | has 2:0=5
    push 1 0@1=2 | run | has 1:0=7
  )");
}

TEST(CoreClocks, AReconnectionBringsWhatMayHaveBeenLost) {
  play_core(R"(
    # The first result is withheld; it awaits that of chunk 1 before its first round.
    job slack=0 chunks=2 | push 0 0@1 | run | detach 0 | reattach 0.1 | push 0 0@1 | control 0 1@0
    sent 0:1@0
  )");
}

// Every update of rank r takes 64^r: a chunk's parameter says how many of each it has.
float weight(uint32_t rank) { return static_cast<float>(1u << (6 * rank)); }

TEST(CoreClocks, ASnapshotSaysWhichUpdatesItsChunksHave) {
  const Seeds seeds = fresh_seeds(100);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const JobParameters parameters{
        .max_ranks = 3,
        .rules = {.optimizer = kernels::Optimizer::kSgd, .consistency = Consistency::kSsp},
        .slack = random() % 2 == 0 ? 3 : kNever};
    constexpr uint32_t kChunks = 5;
    CoreJobRig rig({.parameters = parameters, .chunks = kChunks, .snapshots = true});
    std::vector<uint64_t> clocks(size_t{kChunks} * 3);
    std::set<std::pair<uint32_t, uint32_t>> on_their_way;
    uint64_t round = 0;
    size_t snapshots = 0;
    for (int i = 0; i < 400; ++i) {
      const auto chunk = static_cast<uint32_t>(random() % kChunks);
      const auto rank = static_cast<uint32_t>(random() % 3);
      uint64_t* const of_chunk = &clocks[size_t{chunk} * 3];
      const uint64_t slowest = *std::min_element(of_chunk, of_chunk + 3);
      if (on_their_way.contains({chunk, rank})) {
        rig.run();
        on_their_way.clear();
      }
      if (of_chunk[rank] < 60 && of_chunk[rank] < slowest + 4) {
        rig.push(rank, chunk, ++of_chunk[rank], weight(rank));
        on_their_way.insert({chunk, rank});
      }
      if (round == 0 && random() % 20 == 0) {
        round = rig.job->hold().round;
        rig.job->commit({.round = round, .snapshot = true});
      }
      for (uint64_t steps = random() % 3; steps > 0; --steps) rig.job->step();
      const std::vector<std::string> reports = rig.take_reports();
      if (reports.empty()) continue;
      ASSERT_THAT(reports, ElementsAre(fmt::format("snapped @{}", round)));
      for (uint32_t c = 0; c < kChunks; ++c) {
        const uint32_t id = kChunks - 1 - c;
        const uint64_t* const latest = &rig.copy_clocks[size_t{id} * 3];
        float sum = 0;
        uint64_t updates = 0;
        for (uint32_t r = 0; r < 3; ++r) {
          EXPECT_GE(latest[r] + 1, round);
          sum += static_cast<float>(latest[r]) * weight(r);
          updates += latest[r];
        }
        EXPECT_EQ(rig.copy_parameters[size_t{c} * 64], -sum) << "chunk " << c;
        EXPECT_EQ(rig.copy_steps[id], updates);
      }
      round = 0;
      ++snapshots;
    }
    EXPECT_GT(snapshots, 0u);
  }
}

// A job of two ranks that goes on after round 3; its only chunk has rank 0's updates up to round 5.
const std::string kRestored = R"(
  job slack=3 max=2 sgd first=4 chunks=1 ranks=0,1 nobody snapshots | restore -40 8 5 3
  hold | commit 4 +0.2@4 +1.2@4 | sent 0,1:0@3 | has 0:0=-40
)";

TEST(CoreClocks, WhatAChunkHasSinceTheCheckpointIsAcknowledged) {
  play_core(kRestored + R"(
    push 0 0@4 | sent 0:0@4 | has 0:0=-40 | push 0 0@5 | sent 0:0@5 | has 0:0=-40
    push 0 0@6 | sent 0:0@6 | has 0:0=-41 | push 1 0@4=1 | run | has 1:0=-42
    hold 5 | commit 5 snapshot | copied-clocks 10 6 4 | told snapped @5
  )");
}

// The log tells what the incarnation did; the chunk has its predecessor's until a round that is
// new. What is copied is also of a rank that is lost.
TEST(CoreClocks, WhoComesAfterOneThatWasDoingRoundsAgainDoesTheRest) {
  play_core(kRestored + R"(
    push 0 0@4 | run | hold | commit 4 -0 snapshot | last 0 4 | copied-clocks 8 5 3 | told snapped @4
    hold | commit 4 +0.3@5 | push 0 0@5 | run | has 0:0=-40 | push 0 0@6 | run | has 0:0=-41
  )");
}

// Reports that nobody takes hold up chunks, and nothing else: a rank may break at any time.
TEST(CoreJobClocks, ExclusionsLeaveRoomForRanksThatBreak) {
  JobParameters parameters = {.max_ranks = 3};
  parameters.rules.consistency = Consistency::kSsp;
  parameters.rules.on_nonfinite = OnNonFinite::kExclude;
  CoreJobRig rig({.parameters = parameters, .chunks = 200});
  rig.take_reports();
  for (uint32_t c = 0; c < 200; ++c) {
    rig.push(0, c, 1, std::numeric_limits<float>::quiet_NaN());
  }
  for (int i = 0; i < 300; ++i) rig.job->step();
  for (const uint32_t rank : {0u, 1u, 2u})
    rig.endpoint.inbox.push_back({.rank = rank, .ok = false});
  for (int i = 0; i < 300; ++i) rig.job->step();
  size_t excluded = 0, broken = 0;
  for (int i = 0; i < 10; ++i) {
    for (const std::string& report : rig.take_reports()) {
      excluded += report.starts_with("excluded 0");
      broken += report.starts_with("broken");
    }
    for (int k = 0; k < 300; ++k) rig.job->step();
  }
  EXPECT_EQ(excluded, 200u);
  EXPECT_EQ(broken, 3u);
}

}  // namespace core_job_clocks_test
}  // namespace phub::testing

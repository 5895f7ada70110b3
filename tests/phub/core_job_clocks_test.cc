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
#include "tests/seeds.h"
#include "transport/error.h"

namespace phub {
namespace core_job_clocks_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using Rig = testing::CoreJobRig;

JobParameters ssp(uint64_t slack) { return {.max_ranks = 3, .lock_step = false, .slack = slack}; }
JobParameters async() { return ssp(kNever); }

TEST(CoreClocks, AnUpdateIsAppliedWhenItComes) {
  Rig rig({.parameters = async()});
  rig.push(1, 0, 1, 4);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("1:0@1"));
  EXPECT_EQ(rig.result_of(1, 0), 4);
  rig.push(1, 0, 2, 4);
  rig.push(0, 0, 1, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "1:0@2"));
  EXPECT_EQ(rig.result_of(0, 0), 9);
  EXPECT_EQ(rig.result_of(1, 0), 9);
  EXPECT_EQ(rig.result_of(1, 1), 0) << "of another chunk";
}

TEST(CoreClocks, AResultIsWithheldUntilTheSlowestIsNear) {
  Rig rig({.parameters = ssp(1)});
  rig.push(0, 0, 1, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1")) << "one ahead is within the slack";
  rig.push(0, 0, 2, 1);
  rig.push(1, 0, 1, 4);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("1:0@1"));
  rig.push(2, 0, 1, 16);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@2", "2:0@1"));
  EXPECT_EQ(rig.result_of(0, 0), 2 + 4 + 16);
  EXPECT_EQ(rig.result_of(1, 0), 2 + 4) << "copied when it went out";
}

TEST(CoreClocks, ANullUpdateMovesTheClockAlone) {
  Rig rig({.parameters = ssp(0)});
  rig.push(0, 0, 1, 7);
  rig.arrive(1, {0, 1, ImmKind::kNull});
  rig.arrive(2, {0, 1, ImmKind::kNull});
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "1:0@1", "2:0@1"));
  EXPECT_EQ(rig.result_of(2, 0), 7);
}

TEST(CoreClocks, AnUpdateCountsOnce) {
  Rig rig({.parameters = ssp(1)});
  rig.push(0, 0, 1, 3);
  rig.push(0, 0, 1, 3);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1"));
  rig.arrive(0, {0, 1, ImmKind::kData});  // its result was lost on the way
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1"));
  EXPECT_EQ(rig.result_of(0, 0), 3);
  rig.push(0, 0, 2, 3);
  rig.run();
  rig.arrive(0, {0, 2, ImmKind::kData});  // withheld: it comes when it may
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  EXPECT_THAT(rig.take_reports(), IsEmpty());
  rig.arrive(0, {0, 4, ImmKind::kData});
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("violation 0"));
}

// The queue was full when a result was asked for again, and the rank has gone on meanwhile.
TEST(CoreClocks, AnOwedResultIsWithheldToo) {
  Rig rig({.parameters = ssp(1), .chunks = 1});
  rig.endpoint.room = 1;
  rig.push(0, 0, 1, 3);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1"));
  rig.arrive(0, {0, 1, ImmKind::kData});
  rig.run();
  rig.push(0, 0, 2, 3);
  rig.run();
  rig.endpoint.room = 100;
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty()) << "two ahead of the slowest";
  rig.push(1, 0, 1, 4);
  rig.push(2, 0, 1, 16);
  rig.run();
  EXPECT_THAT(rig.take_posts(), UnorderedElementsAre("0:0@2", "1:0@1", "2:0@1"));
  EXPECT_EQ(rig.result_of(0, 0), 6 + 4 + 16);
}

TEST(CoreClocks, AResultThatWasDueWhileNobodyWasAttachedComesAfterAReconnection) {
  Rig rig({.parameters = ssp(0), .chunks = 1});
  rig.push(0, 0, 1, 1);
  rig.run();
  rig.job->detach(0);
  rig.push(1, 0, 1, 4);
  rig.push(2, 0, 1, 16);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("1:0@1", "2:0@1"));
  rig.job->reattach(0, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  rig.push(0, 0, 1, 1);  // once more
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1"));
  EXPECT_EQ(rig.result_of(0, 0), 21);
}

TEST(CoreClocks, ABoundaryStopsEveryClock) {
  Rig rig({.parameters = async()});
  rig.push(0, 0, 1, 1);
  rig.run();
  rig.take_posts();
  const CoreReport held = rig.job->hold();
  EXPECT_EQ(held.round, 1u) << "of the slowest";
  EXPECT_EQ(held.started, 1u);
  rig.push(0, 0, 2, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  EXPECT_EQ(rig.job->hold().started, 2u);
  rig.job->commit({.round = 1});
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@2"));
}

// More was ready than one pass applies.
TEST(CoreClocks, ABoundaryStopsWhatWasReadyToo) {
  constexpr uint32_t kChunks = 40;
  Rig rig({.parameters = async(), .chunks = kChunks, .elements = 8192});
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) rig.push(0, chunk, 1, 1);
  uint64_t bytes = 0;
  rig.job->step(bytes);
  const size_t before = rig.take_posts().size();
  EXPECT_GT(before, 0u);
  EXPECT_LT(before, kChunks);
  rig.job->hold();
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  rig.job->commit({.round = 1});
  rig.run();
  EXPECT_EQ(before + rig.take_posts().size(), kChunks);
}

TEST(CoreClocks, WhoIsLostIsNotWaitedFor) {
  Rig rig({.parameters = ssp(0), .chunks = 1});
  rig.push(0, 0, 1, 1);
  rig.push(1, 0, 1, 4);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  rig.job->hold();
  rig.push(2, 0, 1, 16);  // accepted, and not yet applied
  rig.run();
  std::vector<uint64_t> last(1);
  const Boundary boundary{.round = 2, .lost = {{.rank = 2, .last_rounds = last}}};
  rig.job->commit(boundary);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "1:0@1"));
  EXPECT_EQ(last[0], 1u) << "what was accepted counts";
  EXPECT_EQ(rig.result_of(0, 0), 21);
  for (uint64_t round = 2; round < 5; ++round) {
    rig.push(0, 0, round, 1);
    rig.push(1, 0, round, 4);
    rig.run();
  }
  EXPECT_EQ(rig.result_of(1, 0), 21 + 3 * 5);
  rig.endpoint.attached.insert(2);
  rig.push(2, 0, 2, 16);
  rig.run();
  EXPECT_EQ(rig.result_of(1, 0), 21 + 3 * 5) << "nothing of it counts any more";
}

TEST(CoreClocks, WhatALostRankCanStillChangeDoesNotCount) {
  JobParameters parameters = ssp(0);
  parameters.slots_belong_to_worker = true;
  Rig rig({.parameters = parameters, .chunks = 1});
  rig.push(0, 0, 1, 1);
  rig.push(1, 0, 1, 4);
  rig.run();
  rig.job->hold();
  rig.push(2, 0, 1, 16);
  rig.run();
  std::vector<uint64_t> last(1, 9);
  rig.job->commit({.round = 2, .lost = {{.rank = 2, .last_rounds = last}}});
  rig.run();
  EXPECT_EQ(last[0], 0u);
  EXPECT_EQ(rig.result_of(0, 0), 5);
}

TEST(CoreClocks, APausedJobGoesNoFurtherThanTheSlack) {
  Rig rig({.parameters = ssp(1), .chunks = 1});
  rig.job->hold();
  rig.job->commit({.round = 1, .lost = {{.rank = 2, .expected_again = 1}}});
  for (const uint32_t rank : {0, 1}) rig.push(rank, 0, 1, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "1:0@1"));
  for (const uint32_t rank : {0, 1}) rig.push(rank, 0, 2, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty()) << "the rank that is missing is expected";
  rig.job->hold();
  rig.job->commit({.round = 3, .forgotten = {2}});
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@2", "1:0@2"));
}

TEST(CoreClocks, ANewcomerBeginsWithTheSlowest) {
  Rig rig({.parameters = ssp(2), .chunks = 1, .expected = {0, 1}});
  for (uint64_t round = 1; round <= 3; ++round) {
    rig.push(0, 0, round, 1);
    rig.push(1, 0, round, 4);
    rig.run();
  }
  rig.push(0, 0, 4, 1);
  rig.run();
  rig.take_posts();
  EXPECT_EQ(rig.job->hold().round, 4u);
  rig.job->commit({.round = 4, .admitted = {rig.admission(2, 1, 4)}});
  EXPECT_THAT(rig.take_posts(), ElementsAre("2:0@3"));
  EXPECT_EQ(rig.result_of(2, 0), 4 * 1 + 3 * 4);
  rig.push(2, 0, 4, 16);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("2:0@4"));
  EXPECT_EQ(rig.result_of(2, 0), 4 * 1 + 3 * 4 + 16);
}

TEST(CoreClocks, TheSlowestIsWhoTheOthersWaitFor) {
  Rig rig({.parameters = ssp(0), .chunks = 2});
  Probe probe;
  probe.arrivals.resize(3);
  probe.waited_for.resize(1);
  rig.job->probe(probe);
  EXPECT_EQ(probe.waited_for[0], 0u) << "nobody waits";
  rig.push(0, 1, 1, 1);
  rig.push(2, 1, 1, 1);
  rig.run();
  rig.job->probe(probe);
  EXPECT_EQ(probe.waited_for[0], 0b010u);
  EXPECT_EQ(probe.min_round, 1u);
}

TEST(CoreClocks, WhoHasNotComeWaitsForNobody) {
  JobParameters parameters = ssp(0);
  parameters.initial_broadcast = true;
  Rig rig({.parameters = parameters, .chunks = 1, .expected = {0, 1}, .admit = false});
  rig.job->hold();
  Boundary boundary{.round = 1};
  boundary.admitted.push_back(rig.admission(0, 1, 1));
  rig.job->commit(boundary);
  rig.arrive(0, {0, 0, ImmKind::kInitial});
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@0"));
  Probe probe;
  probe.arrivals.resize(3);
  probe.waited_for.resize(1);
  rig.job->probe(probe);
  EXPECT_EQ(probe.min_round, 1u);
  EXPECT_EQ(probe.waited_for[0], 0u);
  rig.push(0, 0, 1, 1);  // now somebody waits, who is there
  rig.run();
  rig.job->probe(probe);
  EXPECT_EQ(probe.waited_for[0], 0b010u);
}

// However a boundary ends, nobody writes to the memory of those that it takes out, and the log has
// what they took part in.
struct Failing : testing::FakeEndpoint {
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
    testing::BasicCoreJobRig<Failing> rig({.parameters = ssp(0), .chunks = 1});
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
  testing::BasicCoreJobRig<Failing> rig({.parameters = {.max_ranks = 3}, .chunks = 2});
  for (const uint32_t rank : {0u, 1u, 2u}) rig.push(rank, 1, 1, 1);
  rig.run();
  rig.job->hold();
  std::vector<uint64_t> last(2);
  rig.endpoint.detaches_fail = true;
  EXPECT_THROW(rig.job->commit({.round = 2, .lost = {{.rank = 1, .last_rounds = last}}}), Error);
  EXPECT_THAT(last, ElementsAre(1u, 0u)) << "the chunks' numbers are not their indexes";
}

TEST(CoreClocks, NaNIsLeftOutOrStopsTheJob) {
  JobParameters parameters = async();
  parameters.on_nonfinite = OnNonFinite::kExclude;
  Rig rig({.parameters = parameters});
  rig.push(0, 0, 1, std::numeric_limits<float>::quiet_NaN());
  rig.push(1, 0, 1, 4);
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "1:0@1"));
  EXPECT_EQ(rig.result_of(0, 0), 4);
  EXPECT_THAT(rig.take_reports(), ElementsAre("excluded 0 chunk 3 @1"));

  parameters.on_nonfinite = OnNonFinite::kStop;
  Rig stopping({.parameters = parameters});
  stopping.push(0, 0, 1, std::numeric_limits<float>::infinity());
  stopping.run();
  EXPECT_THAT(stopping.take_posts(), IsEmpty());
  EXPECT_THAT(stopping.take_reports(), ElementsAre("nonfinite 0 chunk 3 @1"));
}

TEST(CoreClocks, InitialParametersComeFirst) {
  JobParameters parameters = ssp(1);
  parameters.initial_broadcast = true;
  Rig rig({.parameters = parameters, .chunks = 1});
  auto* slot = reinterpret_cast<float*>(rig.slots[0].data());
  std::fill_n(slot, 64, 5.0f);
  rig.arrive(0, {0, 0, ImmKind::kInitial});
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@0", "1:0@0", "2:0@0"));
  EXPECT_EQ(rig.result_of(2, 0), 5);
  rig.push(1, 0, 1, 2);
  rig.run();
  EXPECT_EQ(rig.result_of(1, 0), 7);
}

TEST(CoreClocks, AReconnectionBringsWhatMayHaveBeenLost) {
  Rig rig({.parameters = ssp(0), .chunks = 2});
  rig.push(0, 0, 1, 1);  // withheld
  rig.run();
  rig.job->detach(0);
  rig.job->reattach(0, 1);
  rig.push(0, 0, 1, 1);
  rig.arrive(0, {1, 0, ImmKind::kControl});  // it awaits the first result of this one
  rig.run();
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:1@0"));
}

// Every update of rank r takes 64^r: a chunk's parameter says how many of each it has.
float weight(uint32_t rank) { return static_cast<float>(1u << (6 * rank)); }

TEST(CoreClocks, ASnapshotSaysWhichUpdatesItsChunksHave) {
  const testing::Seeds seeds = testing::fresh_seeds(100);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    JobParameters parameters = ssp(random() % 2 == 0 ? 3 : kNever);
    parameters.optimizer = kernels::Optimizer::kSgd;
    constexpr uint32_t kChunks = 5;
    Rig rig({.parameters = parameters, .chunks = kChunks, .snapshots = true});
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
struct Restored : Rig {
  Restored()
      : Rig({.parameters = parameters_from(4),
             .chunks = 1,
             .expected = {0, 1},
             .admit = false,
             .snapshots = true}) {
    copy_steps = {8};
    copy_clocks = {5, 3};
    job->restore(saved_clocks(), {});
    parameters.assign(parameters.size(), -40);
    job->hold();
    job->commit({.round = 4, .admitted = {admission(0, 2, 4), admission(1, 2, 4)}});
    run();
    EXPECT_THAT(take_posts(), ElementsAre("0:0@3", "1:0@3"));
    EXPECT_EQ(result_of(0, 0), -40);
  }
  static JobParameters parameters_from(uint64_t round) {
    JobParameters parameters = ssp(3);
    parameters.max_ranks = 2;
    parameters.optimizer = kernels::Optimizer::kSgd;
    parameters.first_round = round;
    return parameters;
  }
};

TEST(CoreClocks, WhatAChunkHasSinceTheCheckpointIsAcknowledged) {
  Restored rig;
  for (uint64_t round = 4; round <= 6; ++round) {
    rig.push(0, 0, round, 1);
    rig.run();
    EXPECT_THAT(rig.take_posts(), ElementsAre(fmt::format("0:0@{}", round)));
    EXPECT_EQ(rig.result_of(0, 0), round < 6 ? -40 : -41) << round;
  }
  rig.push(1, 0, 4, 1);
  rig.run();
  EXPECT_EQ(rig.result_of(1, 0), -42);
  const uint64_t round = rig.job->hold().round;
  EXPECT_EQ(round, 5u);
  rig.job->commit({.round = round, .snapshot = true});
  rig.run();
  EXPECT_THAT(rig.copy_steps, ElementsAre(10));
  EXPECT_THAT(rig.copy_clocks, ElementsAre(6, 4));
}

// The log tells what the incarnation did; the chunk has its predecessor's until a round that is
// new.
TEST(CoreClocks, WhoComesAfterOneThatWasDoingRoundsAgainDoesTheRest) {
  Restored rig;
  rig.push(0, 0, 4, 1);
  rig.run();
  rig.job->hold();
  std::vector<uint64_t> last(1);
  rig.job->commit({.round = 4, .lost = {{.rank = 0, .last_rounds = last}}, .snapshot = true});
  rig.run();
  EXPECT_EQ(last[0], 4u);
  EXPECT_THAT(rig.copy_clocks, ElementsAre(5, 3)) << "also of a rank that is lost";
  rig.take_reports();
  rig.job->hold();
  rig.job->commit({.round = 4, .admitted = {rig.admission(0, 3, 5)}});
  rig.push(0, 0, 5, 1);
  rig.run();
  EXPECT_EQ(rig.result_of(0, 0), -40);
  rig.push(0, 0, 6, 1);
  rig.run();
  EXPECT_EQ(rig.result_of(0, 0), -41);
}

// Reports that nobody takes hold up chunks, and nothing else: a rank may break at any time.
TEST(CoreJobClocks, ExclusionsLeaveRoomForRanksThatBreak) {
  JobParameters parameters = {.max_ranks = 3};
  parameters.lock_step = false;
  parameters.on_nonfinite = OnNonFinite::kExclude;
  Rig rig({.parameters = parameters, .chunks = 200});
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
}  // namespace phub

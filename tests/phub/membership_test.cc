#include "phub/job/membership.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <span>

#include "tests/phub/membership_driver.h"
#include "tests/seeds.h"

namespace phub {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MembershipDriver;
using ::testing::StartsWith;
using Kind = LogRecord::Kind;

JobSpec spec_of(uint32_t world_size, uint32_t max_ranks = 0, std::string on_loss = "shrink") {
  JobSpec spec;
  spec.name = "job";
  spec.keys = {{.name = "w", .elements = 100}};
  spec.world_size = world_size;
  spec.max_ranks = max_ranks == 0 ? world_size : max_ranks;
  spec.on_loss = std::move(on_loss);
  spec.lease_ms = 1000;
  spec.progress_limit_ms = 5000;
  spec.wait_limit_ms = 8000;
  spec.join_limit_ms = 3000;
  return spec;
}

// Rounds go on and the first ranks are there.
struct Assembled : MembershipDriver {
  explicit Assembled(const JobSpec& spec) : MembershipDriver(spec) {
    if (spec.initial == "broadcast") cores_at(0, 0, 0);
    for (uint32_t rank = 0; rank < spec.world_size; ++rank) join(static_cast<int32_t>(rank));
    settle();
    EXPECT_EQ((*this)->state(), "running");
    take_trace();
  }
};

void lose(MembershipDriver& m, uint32_t rank) {
  m->disconnected(rank, m->ranks()[rank].incarnation, "the process ended");
  m.carry_out();
}

std::vector<std::string> log_of(MembershipDriver& m) {
  static constexpr const char* kNames[] = {"admitted", "lost",     "left",
                                           "hyper",    "excluded", "failed"};
  std::vector<std::string> out;
  for (const LogRecord& r : m.records()) {
    std::string text = fmt::format("{} {}.{} @{}", kNames[static_cast<int>(r.kind)], r.rank,
                                   r.incarnation, r.round);
    for (const ChunkRange& range : r.last_rounds) {
      text += fmt::format(" {}-{}:{}", range.first, range.last, range.round);
    }
    out.push_back(text);
  }
  return out;
}

TEST(Membership, TheFirstRanksAssemble) {
  MembershipDriver m(spec_of(3));
  EXPECT_EQ(m->state(), "assembling");
  const uint64_t first = m.join(1);
  EXPECT_EQ(m.answered(first), "");  // only when every core knows
  m.settle();
  EXPECT_EQ(m.answered(first), "ok");
  EXPECT_EQ(m.reply(first).rank, 1u);
  EXPECT_EQ(m.reply(first).incarnation, 1u);
  EXPECT_EQ(m.reply(first).first_round, 1u);
  EXPECT_THAT(m->missing(), ElementsAre(0, 2));
  EXPECT_EQ(m->state(), "assembling");
  EXPECT_THAT(m.take_trace(), ElementsAre("admit 1.1", "hold", "commit 1: +1.1@1"));
  m.join(0);
  m.join(2);  // while the boundary of rank 0 is under way: it gets one of its own
  m.settle();
  EXPECT_THAT(m.take_trace(), ElementsAre("admit 0.1", "hold", "admit 2.1", "commit 1: +0.1@1",
                                          "hold", "commit 1: +2.1@1"));
  EXPECT_EQ(m->state(), "running");
  EXPECT_THAT(m->missing(), IsEmpty());
  EXPECT_THAT(log_of(m), ElementsAre("admitted 1.1 @1", "admitted 0.1 @1", "admitted 2.1 @1"));
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, OnlyRankZeroSendsInitialParametersAndOnlyOnce) {
  JobSpec spec = spec_of(2, 3);
  spec.initial = "broadcast";
  MembershipDriver m(spec);
  m.cores_at(0, 0, 0);
  const uint64_t one = m.join(1), zero = m.join(0);
  m.settle();
  EXPECT_FALSE(m.reply(one).send_initial);
  EXPECT_TRUE(m.reply(zero).send_initial);
  EXPECT_EQ(m.reply(zero).first_round, 1u);
  m.cores_at(4, 4, 3);
  const uint64_t again = m.join(0, true);
  m.last_round = [](uint32_t, uint32_t) { return 3; };
  m.settle();
  EXPECT_FALSE(m.reply(again).send_initial);
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, RanksThatAreTakenOrNotThere) {
  Assembled m(spec_of(2, 3));
  EXPECT_THAT(m.answered(m.join(1)),
              StartsWith("taken: rank 1 of job 'job' is taken by incarnation 1"));
  EXPECT_THAT(m.answered(m.join(3)), StartsWith("full: rank 3 is out of range: job 'job' has"));
  const uint64_t third = m.join(-1);
  EXPECT_EQ(m.answered(third), "");
  EXPECT_THAT(m.answered(m.join(2)), StartsWith("taken: rank 2"));        // it is joining
  EXPECT_THAT(m.answered(m.join(2, true)), StartsWith("taken: rank 2"));  // even so
  EXPECT_THAT(m.answered(m.join(-1)), StartsWith("full: job 'job' is full: all 3 ranks"));
  m.settle();
  EXPECT_EQ(m.reply(third).rank, 2u);
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, WithoutARankTheOneIsChosenThatIsMissedMost) {
  Assembled m(spec_of(3, 5));
  m.cores_at(7, 7, 7);
  m.leave(0);
  m.settle();
  lose(m, 2);
  m.settle();
  std::vector<uint32_t> ranks;
  for (int i = 0; i < 4; ++i) {
    const uint64_t token = m.join(-1);
    m.settle();
    ranks.push_back(m.reply(token).rank);
  }
  EXPECT_THAT(ranks, ElementsAre(2, 0, 3, 4));  // lost, left, never there
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, AReplacementComesAfterItsPredecessorIsGone) {
  Assembled m(spec_of(2));
  m.cores_at(6, 6, 5);
  m.last_round = [](uint32_t, uint32_t chunk) { return chunk == 1 ? 6 : 5; };
  const uint64_t token = m.join(1, true);
  EXPECT_TRUE(m->is_current(1, 1));
  EXPECT_FALSE(m->is_secure(1, 1));
  EXPECT_THAT(m.answered(m.join(1)), HasSubstr("is being taken by another worker"));
  m.settle();
  EXPECT_THAT(m.take_trace(), ElementsAre("hold", "commit 6: -1", "revoke 1", "admit 1.2", "hold",
                                          "commit 6: +1.2@7"));
  EXPECT_EQ(m.reply(token).first_round, 7u);  // its predecessor is in round 6 of chunk 1
  EXPECT_TRUE(m->is_current(1, 2));
  EXPECT_FALSE(m->is_current(1, 1));
  EXPECT_EQ(m->why_not_current(1, 1), "incarnation 1 of rank 1 was replaced");
  EXPECT_THAT(log_of(m), ElementsAre("admitted 0.1 @1", "admitted 1.1 @1",
                                     "lost 1.1 @0 0-0:5 1-1:6 2-2:5", "admitted 1.2 @7"));
  EXPECT_EQ(m.wrong(), "");
}

// Two in a row go in the same round; the second one had sent nothing.
TEST(Membership, AReplacementComesAfterAllOfItsPredecessors) {
  Assembled m(spec_of(2));
  m.cores_at(6, 6, 6);
  m.last_round = [](uint32_t, uint32_t) { return 6; };
  m.join(1, true);
  m.settle();
  m.last_round = [](uint32_t, uint32_t) { return 0; };
  const uint64_t third = m.join(1, true);
  m.settle();
  EXPECT_EQ(m.reply(third).incarnation, 3u);
  EXPECT_EQ(m.reply(third).first_round, 7u);  // round 6 has a contribution of the first
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, ARankThatIsBeingLostIsFreeForTheNext) {
  Assembled m(spec_of(2));
  lose(m, 1);
  const uint64_t patient = m.join(1);  // no need to replace
  EXPECT_EQ(m.answered(patient), "");
  m.settle();
  EXPECT_EQ(m.reply(patient).incarnation, 2u);
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, ShrinkGoesOn) {
  Assembled m(spec_of(3));
  m.cores_at(5, 5, 4);
  lose(m, 1);
  EXPECT_EQ(m.state_of(1), "live");  // until every core has let go of it
  m.settle();
  EXPECT_THAT(m.take_trace(), ElementsAre("hold", "commit 5: -1", "revoke 1"));
  EXPECT_EQ(m.state_of(1), "lost");
  EXPECT_EQ(m->why_not_current(1, 1), "rank 1 (incarnation 1) is out: the process ended");
  EXPECT_THAT(m->missing(), IsEmpty());
  EXPECT_EQ(m->state(), "running");
  for (int i = 0; i < 100; ++i) {
    m->heartbeat(0, m.now);
    m->heartbeat(2, m.now);
    m.tick(900);
  }
  EXPECT_FALSE(m.over());
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, WaitPausesBeforeTheNextRoundUntilTheRankIsBack) {
  Assembled m(spec_of(2, 0, "wait"));
  m.cores_at(6, 5, 5);
  lose(m, 1);
  m.settle();
  EXPECT_THAT(m.take_trace(), ElementsAre("hold", "commit 6: ~1@6", "revoke 1"));
  EXPECT_EQ(m->state(), "paused");
  EXPECT_THAT(m->missing(), ElementsAre(1));
  m.cores_at(6, 6, 6);
  const uint64_t back = m.join(1);
  m.settle();
  EXPECT_EQ(m.reply(back).first_round, 6u);
  EXPECT_EQ(m->state(), "running");
  m->heartbeat(0, m.now);
  m->heartbeat(1, m.now);
  m.tick(900);
  EXPECT_FALSE(m.over());
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, APauseHasALimitAndTheErrorNamesTheRank) {
  Assembled m(spec_of(3, 0, "wait"));
  m.cores_at(5, 5, 5);
  lose(m, 2);
  m.settle();
  for (int i = 0; i < 10; ++i) {
    m->heartbeat(0, m.now);
    m->heartbeat(1, m.now);
    if (i == 3) lose(m, 1);  // the limit is the last loss's
    m.settle();
    EXPECT_FALSE(m.over()) << i;
    m.tick(900);
  }
  const uint64_t barrier = m.barrier(0);
  EXPECT_EQ(m.answered(barrier), "ok");  // of those who live
  m->heartbeat(0, m.now);
  m.tick(900);
  m->heartbeat(0, m.now);
  m.tick(900);
  m->heartbeat(0, m.now);
  m.tick(900);
  EXPECT_TRUE(m.over());
  EXPECT_THAT(m.records().back().reason, HasSubstr("waited 8000 ms for rank 1, 2 to come back"));
  EXPECT_EQ(m->state(), "failed");
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, FailFinishesTheRoundFirst) {
  Assembled m(spec_of(3, 0, "fail"));
  m.cores_at(5, 5, 4);
  lose(m, 1);
  m.settle();
  EXPECT_THAT(m.take_trace(), ElementsAre("hold", "commit 5: ~1@6", "revoke 1"));
  m.probe(5, {1, 1, 1}, {});
  m.tick(10);
  EXPECT_FALSE(m.over());  // round 5 is not complete
  m.probe(6, {2, 1, 2}, {});
  m.tick(10);
  EXPECT_THAT(m.take_trace(), ElementsAre("fail rank_lost"));
  EXPECT_THAT(m.records().back().reason,
              HasSubstr("rank 1 (incarnation 1) was lost in round 5: the "));
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, FailLetsNobodyThroughABarrierAfterTheLastRound) {
  for (const bool comes_before : {true, false}) {
    Assembled m(spec_of(2, 0, "fail"));
    m.cores_at(5, 5, 5);
    uint64_t barrier = comes_before ? m.barrier(0) : 0;
    lose(m, 1);
    m.settle();
    m.probe(6, {2, 1}, {});
    if (!comes_before) barrier = m.barrier(0);
    EXPECT_EQ(m.answered(barrier), "");
    m.tick(10);
    EXPECT_THAT(m.answered(barrier), StartsWith("rank_lost: rank 1 (incarnation 1) was lost"));
    EXPECT_EQ(m.wrong(), "");
  }
}

TEST(Membership, FailDoesNotWaitForARoundThatNobodyFinishes) {
  Assembled m(spec_of(3, 0, "fail"));
  m.cores_at(5, 5, 5);
  lose(m, 1);
  m.settle();
  const uint64_t late = m.join(1);  // too late
  m->heartbeat(0, m.now + 500);
  m->heartbeat(2, m.now + 500);
  m.tick(1001);
  EXPECT_TRUE(m.over());
  EXPECT_THAT(m.answered(late), StartsWith("rank_lost: rank 1 (incarnation 1) was lost"));
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, WithoutInitialParametersThereIsNothingToGoOnWith) {
  for (const char* policy : {"shrink", "fail"}) {
    JobSpec spec = spec_of(2, 0, policy);
    spec.initial = "broadcast";
    Assembled m(spec);
    const uint64_t barrier = m.barrier(1);
    lose(m, 0);
    m.settle();
    EXPECT_TRUE(m.over());
    EXPECT_THAT(m.answered(barrier), HasSubstr("had not sent the initial parameters"));
    EXPECT_EQ(m.wrong(), "");
  }
  {  // they came between hold and commit
    JobSpec spec = spec_of(2, 0, "shrink");
    spec.initial = "broadcast";
    Assembled m(spec);
    m.committed_at(1);
    lose(m, 0);
    m.settle();
    EXPECT_FALSE(m.over());
    EXPECT_EQ(m.wrong(), "");
  }
  JobSpec spec = spec_of(2, 0, "wait");
  spec.initial = "broadcast";
  Assembled m(spec);
  lose(m, 0);
  m.settle();
  EXPECT_EQ(m->state(), "paused");
  const uint64_t successor = m.join(0);
  m.settle();
  EXPECT_TRUE(m.reply(successor).send_initial);
  EXPECT_EQ(m->state(), "running");
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, TheLastToLeaveEndsTheJob) {
  Assembled m(spec_of(2));
  m.cores_at(9, 8, 9);
  m.last_round = [](uint32_t, uint32_t) { return 8; };
  const uint64_t first = m.leave(1);
  EXPECT_EQ(m.answered(first), "");
  m.settle();
  EXPECT_EQ(m.answered(first), "ok");
  EXPECT_EQ(m.state_of(1), "left");
  EXPECT_EQ(m->why_not_current(1, 1), "rank 1 (incarnation 1) is out: left");
  const uint64_t second = m.leave(0), twice = m.leave(0);
  m.settle();
  EXPECT_EQ(m.answered(second), "ok");
  EXPECT_EQ(m.answered(twice), "ok");
  EXPECT_THAT(m.take_trace(), ElementsAre("hold", "commit 9: -1", "revoke 1", "hold",
                                          "commit 9: -0", "revoke 0", "end"));
  EXPECT_THAT(m.answered(m.join(0)), StartsWith("not_found"));
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, LeavingTriggersNoPolicy) {
  for (const char* policy : {"wait", "fail"}) {
    Assembled m(spec_of(3, 0, policy));
    m.cores_at(3, 3, 3);
    m.leave(2);
    m.settle();
    EXPECT_THAT(m.take_trace(), ElementsAre("hold", "commit 3: -2", "revoke 2"));
    EXPECT_EQ(m->state(), "running");
    EXPECT_EQ(m.wrong(), "");
  }
}

TEST(Membership, ALostRankThatNobodyWaitsForDoesNotKeepTheJobAlive) {
  Assembled m(spec_of(3));
  m.cores_at(4, 4, 4);
  lose(m, 2);
  m.settle();
  m.leave(1);
  m.leave(0);
  m.settle();
  EXPECT_EQ(m.take_trace().back(), "end");
  EXPECT_EQ(m.wrong(), "");
}

// What comes later under its name is another job, whose ranks assemble.
TEST(Membership, AJobThatHasShrunkToNobodyEnds) {
  Assembled m(spec_of(2));
  m.cores_at(4, 4, 4);
  lose(m, 0);
  m.settle();
  EXPECT_EQ(m->state(), "running");
  lose(m, 1);
  m.settle();
  EXPECT_EQ(m.take_trace().back(), "fail rank_lost");
  EXPECT_EQ(m.records().back().reason,
            "every rank was lost, the last one (rank 1): the process ended");
  EXPECT_EQ(m->state(), "failed");
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, ASuccessorOnItsWayKeepsAJobAlive) {
  Assembled m(spec_of(1));
  m.cores_at(4, 4, 4);
  const uint64_t successor = m.join(0, true);
  m.settle();
  EXPECT_EQ(m.reply(successor).incarnation, 2u);
  EXPECT_EQ(m->state(), "running");
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, RanksThatAreWaitedForMayAllComeBack) {
  Assembled m(spec_of(2, 0, "wait"));
  m.cores_at(4, 4, 4);
  lose(m, 0);
  lose(m, 1);
  m.settle();
  EXPECT_EQ(m->state(), "paused");
  EXPECT_THAT(m->missing(), ElementsAre(0, 1));
  m.tick(8000);
  EXPECT_FALSE(m.over());
  const uint64_t back = m.join(0);
  m.settle();
  EXPECT_EQ(m.reply(back).incarnation, 2u);
  EXPECT_EQ(m->state(), "paused");  // until both are back
  m.tick(1);
  EXPECT_EQ(m.take_trace().back(), "fail rank_lost");
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, ARefusedJoinLeavesNoJobBehind) {
  for (const bool memory : {true, false}) {
    MembershipDriver m(spec_of(2));
    m.admissions_work = memory;
    const uint64_t join = m.join(memory ? 2 : 0);
    EXPECT_THAT(m.answered(join), StartsWith(memory ? "full: rank 2 is out" : "full: no memory"));
    EXPECT_TRUE(m.over());
    EXPECT_EQ(m.take_trace().back(), "end");
    EXPECT_EQ(m.wrong(), "");
  }
  // Others do not mind.
  MembershipDriver m(spec_of(2));
  m.admissions_take_time = true;
  const uint64_t right = m.join(1);
  EXPECT_THAT(m.answered(m.join(2)), StartsWith("full: rank 2 is out"));
  m.settle();
  EXPECT_EQ(m.answered(right), "ok");
  EXPECT_THAT(m.answered(m.join(2)), StartsWith("full: rank 2 is out"));
  EXPECT_FALSE(m.over());
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, AnAdmissionThatTakesLongHoldsNobodyUp) {
  Assembled m(spec_of(2, 3));
  m.cores_at(5, 5, 5);
  m.admissions_take_time = true;
  const uint64_t third = m.join(2);
  m.settle();
  EXPECT_EQ(m.answered(third), "ok");
  EXPECT_THAT(m.take_trace(), ElementsAre("admit 2.1", "hold", "commit 5: +2.1@5"));

  // Others come and go meanwhile.
  const uint64_t again = m.join(2, true);
  m.answer();
  m.answer();
  m.answer();
  m.answer();
  EXPECT_THAT(m.take_trace(), ElementsAre("hold", "commit 5: -2", "revoke 2", "admit 2.2"));
  const uint64_t hyper = m.hyper({{"lr", 1}});
  m.leave(1);
  for (int i = 0; i < 8; ++i) m.answer();
  EXPECT_EQ(m.answered(hyper), "ok");
  EXPECT_EQ(m.state_of(1), "left");
  EXPECT_EQ(m.answered(again), "");
  m.settle();
  EXPECT_EQ(m.answered(again), "ok");
  EXPECT_EQ(m.wrong(), "");
}

// Whoever joined and is lost before all are there is still waited for, under every policy.
TEST(Membership, TheFirstRanksAreThereAllAtOneTime) {
  for (const char* policy : {"shrink", "wait", "fail"}) {
    for (const bool leaves : {false, true}) {
      MembershipDriver m(spec_of(3, 0, policy));
      m.join(0);
      m.join(1);
      m.settle();
      m.take_trace();
      if (leaves) {
        EXPECT_EQ(m.answered(m.leave(1)), "");
      } else {
        lose(m, 1);
      }
      m.settle();
      EXPECT_THAT(m.take_trace(), ElementsAre("hold", "commit 1: ~1@1", "revoke 1"));
      m.join(2);
      m.settle();
      EXPECT_EQ(m->state(), "assembling") << policy;
      EXPECT_THAT(m->missing(), ElementsAre(1));
      const uint64_t successor = m.join(1);
      m.settle();
      EXPECT_EQ(m.reply(successor).first_round, 1u);
      EXPECT_EQ(m->state(), "running");
      EXPECT_EQ(m.wrong(), "");
    }
  }
}

// The one with the initial parameters too.
TEST(Membership, RankZeroMayBeLostAndComeBackBeforeAllAreThere) {
  for (const char* policy : {"shrink", "wait", "fail"}) {
    JobSpec spec = spec_of(3, 0, policy);
    spec.initial = "broadcast";
    MembershipDriver m(spec);
    m.cores_at(0, 0, 0);
    m.join(0);
    m.join(1);
    m.settle();
    lose(m, 0);
    m.settle();
    m.join(2);
    m.settle();
    EXPECT_FALSE(m.over()) << policy;
    EXPECT_EQ(m->state(), "assembling") << policy;
    const uint64_t successor = m.join(0);
    m.settle();
    EXPECT_TRUE(m.reply(successor).send_initial) << policy;
    EXPECT_EQ(m->state(), "running") << policy;
    m->heartbeat(0, m.now), m->heartbeat(1, m.now), m->heartbeat(2, m.now);
    m.tick(900);
    EXPECT_FALSE(m.over()) << policy;
    EXPECT_EQ(m.wrong(), "");
  }
}

TEST(Membership, ALeaveBeforeTheJobHasBegunIsALoss) {
  for (const char* policy : {"shrink", "fail", "wait"}) {
    JobSpec spec = spec_of(2, 0, policy);
    spec.initial = "broadcast";
    Assembled m(spec);
    const uint64_t barrier = m.barrier(1), leave = m.leave(0);
    m.settle();
    EXPECT_EQ(m.answered(leave), "ok");
    if (std::string_view(policy) != "wait") {
      EXPECT_TRUE(m.over()) << policy;
      EXPECT_THAT(m.answered(barrier), HasSubstr("left before the job had begun; it had not sent"));
      continue;
    }
    EXPECT_EQ(m->state(), "paused");
    const uint64_t successor = m.join(0);
    m.settle();
    EXPECT_TRUE(m.reply(successor).send_initial);
    EXPECT_EQ(m->state(), "running");
    EXPECT_EQ(m.wrong(), "");
  }
  // Another rank: the policy decides; nobody waits for ever.
  for (const char* policy : {"shrink", "fail", "wait"}) {
    JobSpec spec = spec_of(3, 0, policy);
    spec.initial = "broadcast";
    Assembled m(spec);
    m.leave(1);
    m.settle();
    m.cores_at(1, 1, 1);
    m.probe(1, {1, 0, 1}, {});
    for (int i = 0; i < 12 && !m.over(); ++i) {
      m->heartbeat(0, m.now);
      m->heartbeat(2, m.now);
      m.tick(900);
    }
    EXPECT_EQ(m.over(), std::string_view(policy) != "shrink") << policy;
    EXPECT_EQ(m.wrong(), "");
  }
}

TEST(Membership, ABarrierIsOfTheLiving) {
  MembershipDriver m(spec_of(3, 4));
  m.join(0);
  m.join(1);
  m.settle();
  const uint64_t zero = m.barrier(0), one = m.barrier(1);
  EXPECT_EQ(m.answered(zero), "");  // rank 2 has not come yet
  m.join(2);
  m.settle();
  EXPECT_EQ(m.answered(zero), "");
  const uint64_t twice = m.barrier(0);
  EXPECT_THAT(m.answered(zero), StartsWith("invalid: rank 0 entered the barrier twice"));
  lose(m, 2);
  EXPECT_EQ(m.answered(twice), "");
  m.settle();
  EXPECT_EQ(m.answered(twice), "ok");
  EXPECT_EQ(m.answered(one), "ok");

  // Whoever is lost or leaves inside is told so; a new rank is waited for.
  m.join(3);
  m.settle();
  const uint64_t again = m.barrier(0), lost = m.barrier(1);
  lose(m, 1);
  m.settle();
  EXPECT_THAT(m.answered(lost), StartsWith("fenced: rank 1"));
  EXPECT_EQ(m.answered(again), "");
  EXPECT_EQ(m.answered(m.barrier(3)), "ok");
  EXPECT_EQ(m.answered(again), "ok");
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, WhoGivesUpABarrierIsNotInIt) {
  Assembled m(spec_of(2));
  const uint64_t first = m.barrier(0);
  m->leave_barrier(1);  // was not there
  m->leave_barrier(0);
  m.carry_out();
  EXPECT_THAT(m.answered(first),
              StartsWith("unavailable: the connection over which rank 0 waited"));
  const uint64_t other = m.barrier(1);
  EXPECT_EQ(m.answered(other), "");
  EXPECT_EQ(m.answered(m.barrier(0)), "ok");
  EXPECT_EQ(m.answered(other), "ok");
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, LeasesAreRenewedByHeartbeatsOnly) {
  Assembled m(spec_of(2));
  for (int i = 0; i < 20; ++i) {
    m->heartbeat(0, m.now);
    m.tick(100);
    if (i < 10) {
      EXPECT_THAT(m.take_trace(), IsEmpty()) << i;
    }
  }
  m.settle();
  EXPECT_EQ(m.state_of(0), "live");
  EXPECT_EQ(m.state_of(1), "lost");
  EXPECT_THAT(m->why_not_current(1, 1), HasSubstr("its lease of 1000 ms expired"));
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, WhoeverTheOthersWaitForTooLongIsLost) {
  Assembled m(spec_of(3));
  const auto pass = [&](uint64_t ms, std::vector<uint64_t> arrivals, std::vector<uint32_t> waited) {
    m.now += ms;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      if (m->is_current(rank, 1)) m->heartbeat(rank, m.now);
    }
    m.probe(1, arrivals, waited);
    m.tick(0);
  };
  pass(0, {1, 1, 1}, {1, 2});
  EXPECT_THAT(m->waiting_for(), ElementsAre(1, 2));
  pass(4000, {1, 1, 1}, {1, 2});
  pass(900, {1, 1, 2}, {1, 2});  // rank 2 has sent something
  EXPECT_THAT(m.take_trace(), IsEmpty());
  pass(200, {1, 1, 2}, {1, 2});
  m.settle();
  EXPECT_THAT(m.take_trace(), ElementsAre("hold", "commit 1: -1", "revoke 1"));
  EXPECT_THAT(m->why_not_current(1, 1), HasSubstr("while the others waited for it"));
  pass(100000, {9, 1, 2}, {});  // nobody waits: no limit
  pass(4000, {9, 1, 2}, {2});
  EXPECT_THAT(m.take_trace(), IsEmpty());
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, InitialParametersAreWaitedForToo) {
  JobSpec spec = spec_of(2);
  spec.initial = "broadcast";
  Assembled m(spec);
  for (int i = 0; i < 7 && !m.over(); ++i) {
    m->heartbeat(0, m.now);
    m->heartbeat(1, m.now);
    m.probe(0, {0, 0}, {});
    m.settle();
    m.tick(900);
  }
  EXPECT_THAT(m->waiting_for(), ElementsAre(0));
  EXPECT_TRUE(m.over());
  EXPECT_THAT(m.records().back().reason, HasSubstr("rank 0 (incarnation 1) was lost"));
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, FirstRanksThatDoNotCome) {
  {
    JobSpec spec = spec_of(3);
    spec.min_ranks = 1;
    MembershipDriver m(spec);
    m.join(1);
    m.settle();
    const uint64_t barrier = m.barrier(1);
    for (int i = 0; i < 4; ++i) {
      m->heartbeat(1, m.now);
      m.tick(900);
    }
    m.settle();
    EXPECT_THAT(m.take_trace(),
                ElementsAre("admit 1.1", "hold", "commit 1: +1.1@1", "hold", "commit 1: x0 x2"));
    EXPECT_EQ(m->state(), "running");
    EXPECT_EQ(m.answered(barrier), "ok");
    EXPECT_EQ(m->ranks()[2].reason, "did not join within 3000 ms");
    const uint64_t late = m.join(0);
    m.settle();
    EXPECT_EQ(m.answered(late), "ok");
    EXPECT_EQ(m.wrong(), "");
  }
  // Nobody but rank 0 has the initial parameters: without it, there is nothing to begin with.
  for (const bool lost : {false, true}) {
    JobSpec spec = spec_of(2);
    spec.min_ranks = 1;
    spec.initial = "broadcast";
    MembershipDriver m(spec);
    m.cores_at(0, 0, 0);
    if (lost) {
      m.join(0);
      m.settle();
      lose(m, 0);
    }
    m.join(1);
    m.settle();
    const uint64_t barrier = m.barrier(1);
    for (int i = 0; i < 4; ++i) {
      m->heartbeat(1, m.now);
      m.tick(900);
    }
    m.settle();
    EXPECT_TRUE(m.over());
    EXPECT_EQ(m.answered(barrier),
              "rank_lost: rank 0 did not join within 3000 ms; nobody else has the initial "
              "parameters");
    EXPECT_EQ(m.wrong(), "");
  }
  {  // it came, gave them to all, and went
    JobSpec spec = spec_of(3);
    spec.min_ranks = 1;
    spec.initial = "broadcast";
    MembershipDriver m(spec);
    m.cores_at(0, 0, 0);
    m.join(0);
    m.join(1);
    m.settle();
    m.cores_at(1, 1, 1);
    lose(m, 0);
    m.settle();
    for (int i = 0; i < 4; ++i) {
      m->heartbeat(1, m.now);
      m.tick(900);
    }
    m.settle();
    EXPECT_EQ(m->state(), "running");
    EXPECT_EQ(m.wrong(), "");
  }
  for (const char* policy : {"shrink", "wait", "fail"}) {
    MembershipDriver m(spec_of(3, 0, policy));
    m.join(1);
    m.settle();
    const uint64_t barrier = m.barrier(1);
    for (int i = 0; i < 4; ++i) {
      m->heartbeat(1, m.now);
      m.tick(900);
    }
    EXPECT_TRUE(m.over());
    EXPECT_EQ(m.answered(barrier), "rank_lost: rank 0, 2 did not join within 3000 ms");
    EXPECT_EQ(m.wrong(), "");
  }
}

// What is written down about a thousand of them can be read again.
TEST(Membership, ManyRanksAreNotAllNamed) {
  MembershipDriver m(spec_of(1024));
  m.join(0);
  m.settle();
  const uint64_t barrier = m.barrier(0);
  for (int i = 0; i < 4; ++i) {
    m->heartbeat(0, m.now);
    m.tick(900);
  }
  EXPECT_EQ(m.answered(barrier),
            "rank_lost: rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20 "
            "… and 1003 more did not join within 3000 ms");
  EXPECT_THAT(m.records().back().reason, HasSubstr("… and 1003 more"));
}

TEST(Membership, HyperparametersTakeEffectFromTheBoundaryOn) {
  Assembled m(spec_of(2));
  m.cores_at(12, 12, 11);
  const uint64_t first = m.hyper({{"lr", 0.5}});
  const uint64_t second = m.hyper({{"lr", 0.25}}), third = m.hyper({{"momentum", 0.75}});
  EXPECT_EQ(m.answered(first), "");
  m.answer();
  m.answer();
  EXPECT_EQ(m.answered(first), "");
  m.answer();
  EXPECT_EQ(m.answered(first), "");  // one core does not know yet
  m.answer();
  EXPECT_EQ(m.answered(first), "ok");
  EXPECT_EQ(m.answered(second), "");
  m.cores_at(13, 13, 13);
  m.settle();
  EXPECT_EQ(m.answered(third), "ok");
  EXPECT_THAT(m.take_trace(),
              ElementsAre("hold", "commit 12: lr=0.5", "hold", "commit 13: lr=0.25 momentum=0.75"));
  EXPECT_THAT(log_of(m), ElementsAre("admitted 0.1 @1", "admitted 1.1 @1", "hyper 0.0 @12",
                                     "hyper 0.0 @13", "hyper 0.0 @13"));
  EXPECT_EQ(m.records().back().values, (std::map<std::string, double>{{"momentum", 0.75}}));
  EXPECT_EQ(m.wrong(), "");
}

// Cores may go on behind a snapshot's round before it is told that all have copied their chunks.
TEST(Membership, WhatASnapshotIsToHaveIsKeptUntilItIsSaved) {
  JobSpec spec = spec_of(2);
  spec.optimizer = "momentum";
  spec.branches = 1;
  Assembled m(spec);
  m.cores_at(2, 2, 2);
  m.branches({.action = BranchAction::kFork, .round = 3});
  m.branches({.action = BranchAction::kSchedule, .round = 5, .turns = {{1, 2}, {0, 1}, {1, 0}}});
  m.settle();
  m.cores_at(4, 4, 4);
  ASSERT_TRUE(m->take_snapshot());
  m.carry_out();
  m.settle();
  m->keep_from(4);
  const SavedBranches before = m->saved(3).branches;
  EXPECT_EQ(before.moves.size(), 3u);
  m.cores_at(9, 9, 9);
  const uint64_t token =
      m.branches({.action = BranchAction::kFork, .round = 20});  // the place is taken: no change
  m.settle();
  EXPECT_THAT(m.answered(token), HasSubstr("no room"));
  const uint64_t later = m.branches({.action = BranchAction::kSchedule, .turns = {{0, 0}}});
  m.settle();
  EXPECT_EQ(m.reply(later).first_round, 10u);
  const SavedBranches after = m->saved(3).branches;
  ASSERT_EQ(after.moves.size(), 4u);
  EXPECT_TRUE(std::ranges::equal(before.moves, std::span(after.moves).first(3)));
  EXPECT_EQ(after.shelves, before.shelves);
  EXPECT_EQ(after.runs.front(), (BranchRun{1, 0}));
  m->keep_from(kNever);
  m.cores_at(12, 12, 12);
  m.branches({.action = BranchAction::kSchedule, .turns = {{1, 0}}});
  m.settle();
  EXPECT_EQ(m->saved(12).branches.moves.size(), 0u);
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, RanksThatSetTheSameMakeOneChange) {
  Assembled m(spec_of(3));
  m.cores_at(12, 12, 12);
  m.hyper({{"lr", 0.5}}, 12, 1);
  m.settle();
  const uint64_t same = m.hyper({{"lr", 0.5}}, 12, 0);
  const uint64_t more = m.hyper({{"lr", 0.5}, {"momentum", 0.75}}, 12, 2);
  const uint64_t other = m.hyper({{"momentum", 0.25}}, 12, 1);
  const uint64_t changed = m.hyper({{"lr", 0.25}}, 12, 1);
  m.settle();
  EXPECT_EQ(m.answered(same), "ok");
  EXPECT_EQ(m.answered(more), "ok");
  EXPECT_EQ(m.answered(other),
            "mismatch: rank 1 sets momentum to 0.25 from round 12 on, and rank 2 to 0.75: the "
            "ranks of a job set the same");
  EXPECT_EQ(m.answered(changed),
            "mismatch: rank 1 sets lr to 0.25 from round 12 on, and other ranks to 0.5: the ranks "
            "of a job set the same");
  const uint64_t own = m.hyper({{"momentum", 0.125}}, 12, 2);  // nobody else has set it
  m.settle();
  EXPECT_EQ(m.answered(own), "ok");
  EXPECT_THAT(m.take_trace(),
              ElementsAre("hold", "commit 12: lr=0.5", "hold", "commit 12:", "hold",
                          "commit 12: lr=0.5 momentum=0.75", "hold", "commit 12: momentum=0.125"));
  EXPECT_EQ(m.records().size(), 6u);  // three ranks, three changes
  m.cores_at(13, 13, 13);
  const uint64_t next = m.hyper({{"lr", 0.25}}, 13, 0);
  m.settle();
  EXPECT_EQ(m.answered(next), "ok");
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, OneBoundaryTakesAllThatWaits) {
  Assembled m(spec_of(4, 6));
  m.cores_at(7, 7, 6);
  m.hyper({{"lr", 1}});
  lose(m, 1);
  lose(m, 1);  // known already
  m.leave(3);
  m.join(5);
  m.join(4);
  m.settle();
  EXPECT_THAT(m.take_trace(),
              ElementsAre("hold", "admit 5.1", "admit 4.1", "commit 7: lr=1", "hold",
                          "commit 7: -1 -3 +5.1@7 +4.1@7", "revoke 1", "revoke 3"));
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, AnAdmissionThatFailsChangesNothing) {
  Assembled m(spec_of(2, 3, "wait"));
  m.admissions_work = false;
  EXPECT_EQ(m.state_of(2), "absent");
  const uint64_t third = m.join(2);
  m.settle();
  EXPECT_EQ(m.answered(third), "full: no memory left");
  EXPECT_EQ(m.state_of(2), "absent");
  EXPECT_THAT(m->missing(), IsEmpty());

  m.leave(1);
  m.settle();
  m.join(1);
  m.settle();
  EXPECT_EQ(m.state_of(1), "left");
  EXPECT_EQ(m->why_not_current(1, 1), "incarnation 1 of rank 1 was replaced");
  EXPECT_EQ(m->state(), "running");
  m.admissions_work = true;
  const uint64_t again = m.join(1);
  m.settle();
  EXPECT_EQ(m.reply(again).incarnation, 3u);
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, AFirstRankWhoseAdmissionFailsIsStillBoundByTheJoinLimit) {
  JobSpec spec = spec_of(2);
  spec.min_ranks = 1;
  MembershipDriver m(spec);
  m.join(0);
  m.settle();
  m.admissions_work = false;
  m.join(1);
  m.settle();
  EXPECT_THAT(m->missing(), ElementsAre(1));
  for (int i = 0; i < 4; ++i) {
    m->heartbeat(0, m.now);
    m.tick(900);
  }
  m.settle();
  EXPECT_THAT(m->missing(), IsEmpty());
  EXPECT_EQ(m->state(), "running");
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, AJobWhoseLastSuccessorFindsNoMemoryIsNotThereForEver) {
  Assembled m(spec_of(1));
  lose(m, 0);
  m.admissions_work = false;
  m.join(0);
  m.settle();
  EXPECT_TRUE(m.over());
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, WhatEndsAJobAnswersEverybody) {
  for (int how = 0; how < 3; ++how) {
    Assembled m(spec_of(3, 4));
    const uint64_t hyper = m.hyper({{"lr", 1}});
    const uint64_t join = m.join(3), leave = m.leave(2), barrier = m.barrier(1);
    const uint64_t more = m.hyper({{"lr", 2}});
    if (how == 0) m->remove();
    if (how == 1) m->non_finite(1, "key 'w', elements 0 to 99, in round 4");
    if (how == 2) m->non_finite(CoreReport::kNoRank, "key 'w'");
    m.carry_out();
    for (const uint64_t token : {hyper, join, barrier, more}) {
      EXPECT_THAT(m.answered(token),
                  HasSubstr(how == 0   ? "not_found: the job was deleted"
                            : how == 1 ? "non_finite: rank 1 sent a NaN or an infinity in key 'w'"
                                       : "non_finite: the sum of finite gradients overflowed"));
    }
    EXPECT_EQ(m.answered(leave), "ok");
    EXPECT_EQ(m.wrong(), "");
  }
}

// What the cores are carrying out counts, and comes before the end in the log.
TEST(Membership, AJobThatEndsInABoundaryEndsBehindIt) {
  Assembled m(spec_of(3));
  m->disconnected(1, 1, "the process ended");
  m.carry_out();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(m.answer());  // both hold, one has committed
  m->remove();
  m.carry_out();
  EXPECT_FALSE(m.over());
  EXPECT_NE(m.records().back().kind, Kind::kFailed);
  EXPECT_TRUE(m.answer());
  EXPECT_TRUE(m.over());
  ASSERT_GE(m.records().size(), 2u);
  EXPECT_EQ(m.records()[m.records().size() - 2].kind, Kind::kLost);
  EXPECT_EQ(m.records().back().kind, Kind::kFailed);
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, ExclusionsAreLogged) {
  Assembled m(spec_of(2));
  m->excluded(1, 1, 2, 17);
  EXPECT_EQ(log_of(m).back(), "excluded 1.1 @17");
  EXPECT_EQ(m.records().back().chunks, (std::vector<ChunkSpan>{{2, 2}}));
}

// Of a job that goes on after round 37, the chunks have later updates of some ranks, too.
struct GoesOn : MembershipDriver {
  explicit GoesOn(std::vector<uint64_t> latest, const std::vector<LogRecord>& records = {})
      : MembershipDriver(ssp()), clocks(std::move(latest)) {
    Manifest saved;
    saved.round = 37;
    saved.log = {
        {.kind = Kind::kAdmitted, .round = 1, .rank = 0, .incarnation = 1},
        {.kind = Kind::kAdmitted, .round = 1, .rank = 1, .incarnation = 1},
        {.kind = Kind::kAdmitted, .round = 1, .rank = 2, .incarnation = 1},
        {.kind = Kind::kLost, .rank = 1, .incarnation = 1, .last_rounds = {{0, 0, 40}, {1, 2, 41}}},
        {.kind = Kind::kLost, .rank = 2, .incarnation = 1, .last_rounds = {{0, 2, 38}}},
        {.kind = Kind::kAdmitted, .round = 39, .rank = 2, .incarnation = 2}};
    saved.log.insert(saved.log.end(), records.begin(), records.end());
    saved.live_ranks = {0, 2};
    saved.ranks = {{.incarnation = 1, .expected = true},
                   {.incarnation = 1, .last_round = 41, .expected = false},
                   {.incarnation = 2, .last_round = 38, .expected = true}};
    (*this)->restore(saved, {.latest = clocks.data(), .ranks = 4});
    cores_at(38, 0, 38);
    for (const int32_t rank : {0, 1, 2}) tokens.push_back(join(rank));
    settle();
  }
  static JobSpec ssp() {
    JobSpec spec = spec_of(3);
    spec.consistency = "ssp";
    spec.slack = 4;
    return spec;
  }
  std::vector<uint64_t> clocks;  // [kChunks][4]
  std::vector<uint64_t> tokens;
};

// Who was there begins with the round after the checkpoint's; others, after the last that any chunk
// has of them. So nobody's first updates are taken for another one's.
TEST(Membership, OutOfLockStepRanksGoOnAfterTheRoundsOfOthers) {
  GoesOn m({40, 39, 39, 0, 38, 40, 38, 0, 37, 41, 38, 0});
  EXPECT_EQ(m.reply(m.tokens[0]).first_round, 38u);
  EXPECT_EQ(m.reply(m.tokens[1]).first_round, 42u);
  EXPECT_EQ(m.reply(m.tokens[2]).first_round, 39u) << "its predecessor was in round 38";
  EXPECT_THAT(log_of(m), ElementsAre("admitted 0.1 @1", "admitted 1.1 @1", "admitted 2.1 @1",
                                     "lost 1.1 @0 0-0:39 1-1:40 2-2:41", "lost 2.1 @0 0-2:38",
                                     "admitted 2.2 @39", "lost 0.1 @0 0-0:40 1-1:38 2-2:37",
                                     "lost 2.2 @0 0-0:39 1-2:38", "admitted 0.2 @38",
                                     "admitted 1.2 @42", "admitted 2.3 @39"));
}

TEST(Membership, OutOfLockStepExclusionsCountWhereTheChunkHasTheRound) {
  GoesOn m({40, 39, 39, 0, 38, 40, 38, 0, 37, 41, 38, 0}, {{.kind = Kind::kExcluded,
                                                            .round = 38,
                                                            .rank = 0,
                                                            .incarnation = 1,
                                                            .last_round = 39,
                                                            .chunks = {{0, 2}}}});
  std::vector<LogRecord> excluded = m.records();
  std::erase_if(excluded, [](const LogRecord& r) { return r.kind != Kind::kExcluded; });
  ASSERT_EQ(excluded.size(), 2u);  // of chunk 2 it has neither
  EXPECT_EQ(excluded[0].chunks, (std::vector<ChunkSpan>{{1, 1}}));
  EXPECT_EQ(excluded[0].last_round, 38u);
  EXPECT_EQ(excluded[1].chunks, (std::vector<ChunkSpan>{{0, 0}}));
  EXPECT_EQ(excluded[1].last_round, 39u);
}

// Anything in any order: the driver's rules hold, everybody is answered, and once nobody gives a
// sign of life any more the job is over within its limits.
class RandomMembership {
 public:
  explicit RandomMembership(uint64_t seed)
      : random_(seed), spec_(random_spec()), m_(spec_, cores()) {
    m_.admissions_work = true;
    m_.last_round = [this](uint32_t, uint32_t) {
      const uint64_t back = below(3);
      return back > round_ || round_ == 0 ? 0
             : keeps_                     ? round_ - std::min(round_, back)
                                          : round_ - 1;
    };
  }

  std::string run(uint32_t steps) {
    for (uint32_t i = 0; i < steps && !m_.over(); ++i) step();
    m_.settle();
    // Silence. Every limit may be used up, one after the other.
    const uint64_t limit = 3ull * (spec_.lease_ms + spec_.progress_limit_ms + spec_.wait_limit_ms +
                                   spec_.join_limit_ms);
    for (uint64_t ms = 0; ms < limit && !m_.over(); ms += 100) {
      m_.tick(100);
      m_.settle();
    }
    std::string wrong = m_.wrong();
    if (!m_.over()) wrong += "the job is there for ever, in state " + m_->state() + "\n";
    if (m_.unanswered() > 0) wrong += "requests were not answered\n";
    return wrong;
  }

 private:
  uint64_t below(uint64_t n) { return random_() % n; }
  uint32_t cores() { return 1 + static_cast<uint32_t>(below(3)); }
  JobSpec random_spec() {
    static constexpr const char* kPolicies[] = {"shrink", "wait", "fail"};
    const auto world = 1 + static_cast<uint32_t>(below(4));
    JobSpec spec = spec_of(world, world + static_cast<uint32_t>(below(3)), kPolicies[below(3)]);
    spec.initial = below(2) ? "broadcast" : "zeros";
    spec.min_ranks = static_cast<uint32_t>(below(world + 1));
    keeps_ = below(2);
    round_ = spec.initial == "broadcast" ? 0 : 1;
    return spec;
  }

  void step() {
    const auto rank = static_cast<uint32_t>(below(spec_.max_ranks));
    const uint32_t incarnation = m_->ranks()[rank].incarnation;
    const bool current = m_->is_current(rank, incarnation);
    switch (below(16)) {
      case 0:
        m_.admissions_work = below(8) > 0;
        m_.admissions_take_time = below(2) > 0;
        m_.join(below(3) ? static_cast<int32_t>(below(spec_.max_ranks + 1)) : -1, below(2));
        break;
      case 1:
        m_.join(-1);
        break;
      case 2:
        if (current && below(4) == 0) m_.leave(rank);
        break;
      case 3:
        if (current) m_.barrier(rank);
        break;
      case 4:
        if (current) m_.hyper({{"lr", 0.5}});
        break;
      case 5:
        m_->disconnected(rank, incarnation - static_cast<uint32_t>(below(2)), "gone");
        m_.carry_out();
        break;
      case 6:
        probe();
        break;
      case 7:
        if (below(20) == 0) m_.settle();
        m_.tick(below(10) ? below(200) : below(2000));
        break;
      case 8:
        beat();
        break;
      case 9:
        m_.finish_admission();
        break;
      default:
        round_ += m_->missing().empty() && below(3) == 0;
        m_.cores_at(round_, round_ - (round_ > 0 && below(2)), round_ - (round_ > 0 && below(2)));
        m_.answer();
    }
    if (below(4)) beat();
  }

  void beat() {
    for (const RankStatus& rank : m_->ranks()) {
      if (m_->is_current(rank.rank, rank.incarnation) && below(4)) m_->heartbeat(rank.rank, m_.now);
    }
  }

  void probe() {
    std::vector<uint64_t> arrivals(spec_.max_ranks);
    for (uint64_t& n : arrivals) n = round_ + below(2);
    std::vector<uint32_t> waited;
    for (uint32_t rank = 0; rank < spec_.max_ranks; ++rank) {
      if (below(2)) waited.push_back(rank);
    }
    m_.probe(round_, arrivals, waited);
  }

  std::mt19937_64 random_;
  uint64_t round_ = 1;
  bool keeps_ = false;
  const JobSpec spec_;
  MembershipDriver m_;
};

TEST(Membership, RandomSequences) {
  const testing::Seeds seeds = testing::fresh_seeds(testing::scaled(5000));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    ASSERT_EQ(RandomMembership(seed).run(400), "") << "PHUB_SEED=" << seed;
  }
}

// A rack is a rank that nobody replaces by hand: what another box asks for is a mistake.
TEST(MembershipOfRacks, ASecondBoxForAGroupIsToldWhatIsWrong) {
  JobSpec spec = spec_of(2);
  spec.rack_ranks = {4, 3};
  Assembled m(spec);
  const std::string said = m.answered(m.join(1));
  EXPECT_THAT(said, HasSubstr("another box already sums rank 4 to 6 of job 'job', which are group "
                              "1 of its 'groups'"));
  EXPECT_THAT(said, HasSubstr("all join the same"));
  EXPECT_THAT(said, ::testing::Not(HasSubstr("replace")));
}

}  // namespace
}  // namespace phub

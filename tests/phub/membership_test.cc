#include "phub/job/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "tests/phub/membership_script.h"

namespace phub {
namespace membership_test {

using testing::Assembled;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::log_of;
using testing::membership_spec;
using testing::MembershipDriver;
using testing::play;
using Kind = LogRecord::Kind;

const std::vector<std::string> kPolicies = {"shrink", "wait", "fail"};

TEST(Membership, TheFirstRanksAssemble) {
  play(R"(
    job 3 | state assembling
    a = join 1 | a: -
    settle | a: ok 1.1 @1 | missing 0 2 | state assembling
    trace admit 1.1, hold, commit 1: +1.1@1
    # Rank 2 comes while the boundary of rank 0 is under way: it gets one of its own.
    join 0 | join 2 | settle | state running | missing
    trace admit 0.1, hold, admit 2.1, commit 1: +0.1@1, hold, commit 1: +2.1@1
    log admitted 1.1 @1, admitted 0.1 @1, admitted 2.1 @1
  )");
}

TEST(Membership, OnlyRankZeroSendsInitialParametersAndOnlyOnce) {
  play(R"(
    job 2 max 3 broadcast
    one = join 1 | zero = join 0 | settle | one: ok waits | zero: ok @1 sends
    cores 4 4 3 | again = join 0 replace | last 3 | settle | again: ok waits
  )");
}

TEST(Membership, RanksThatAreTakenOrNotThere) {
  play(R"(
    assembled 2 max 3
    a = join 1 | a: taken: rank 1 of job 'job' is taken by incarnation 1...
    b = join 3 | b: full: rank 3 is out of range: job 'job' has...
    third = join -1 | third: -
    c = join 2 | c: taken: rank 2...
    d = join 2 replace | d: taken: rank 2...
    e = join -1 | e: full: job 'job' is full: all 3 ranks...
    settle | third: ok 2.1
  )");
}

TEST(Membership, WithoutARankTheOneIsChosenThatIsMissedMost) {
  play(R"(
    assembled 3 max 5 | cores 7 7 7 | leave 0 | settle | lose 2 | settle
    a = join -1 | settle | a: ok 2.2
    b = join -1 | settle | b: ok 0.2
    c = join -1 | settle | c: ok 3.1
    d = join -1 | settle | d: ok 4.1
  )");
}

TEST(Membership, AReplacementComesAfterItsPredecessorIsGone) {
  play(R"(
    assembled 2 | cores 6 6 5 | last 5 6 5
    a = join 1 replace | current 1.1 | insecure 1.1
    b = join 1 | b: ...is being taken by another worker
    # Its predecessor is in round 6 of chunk 1.
    settle | a: ok 1.2 @7 | trace hold, commit 6: -1, revoke 1, admit 1.2, hold, commit 6: +1.2@7
    current 1.2 | out 1.1 incarnation 1 of rank 1 was replaced
    log admitted 0.1 @1, admitted 1.1 @1, lost 1.1 @0 0-0:5 1-1:6 2-2:5, admitted 1.2 @7
  )");
}

TEST(Membership, AReplacementComesAfterAllOfItsPredecessors) {
  play(R"(
    # Two in a row go in the same round; the second one had sent nothing.
    assembled 2 | cores 6 6 6 | last 6 | join 1 replace | settle
    last 0 | third = join 1 replace | settle | third: ok 1.3 @7
  )");
}

TEST(Membership, ARankThatIsBeingLostIsFreeForTheNext) {
  play("assembled 2 | lose 1 | patient = join 1 | patient: - | settle | patient: ok 1.2");
}

TEST(Membership, ShrinkGoesOn) {
  play(R"(
    assembled 3 | cores 5 5 4 | lose 1 | of 1 live
    # Only when every core has let go of it.
    settle | trace hold, commit 5: -1, revoke 1
    of 1 lost | out 1.1 rank 1 (incarnation 1) is out: the process ended
    missing | state running | beats 100 900 0 2 | alive
  )");
}

TEST(Membership, WaitPausesBeforeTheNextRoundUntilTheRankIsBack) {
  play(R"(
    assembled 2 wait | cores 6 5 5 | lose 1 | settle
    trace hold, commit 6: ~1@6, revoke 1 | state paused | missing 1
    cores 6 6 6 | back = join 1 | settle | back: ok @6 | state running | beats 1 900 0 1 | alive
  )");
}

TEST(Membership, APauseHasALimitAndTheErrorNamesTheRank) {
  play(R"(
    assembled 3 wait | cores 5 5 5 | lose 2 | settle | beats 3 900 0 1
    # The limit is the last loss's.
    beat 0 1 | lose 1 | settle | alive | tick 900 | beats 6 900 0 | alive
    # It is of those who live.
    a = barrier 0 | a: ok
    beats 1 900 0 | alive | beats 1 900 0 | over
    reason ...waited 8000 ms for rank 1, 2 to come back
    state failed
  )");
}

TEST(Membership, FailFinishesTheRoundFirst) {
  play(R"(
    assembled 3 fail | cores 5 5 4 | lose 1 | settle | trace hold, commit 5: ~1@6, revoke 1
    probe 5 1 1 1 | tick 10 | alive
    probe 6 2 1 2 | tick 10 | trace fail rank_lost
    reason ...rank 1 (incarnation 1) was lost in round 5: the
  )");
}

TEST(Membership, FailLetsNobodyThroughABarrierAfterTheLastRound) {
  play(R"(
    assembled 2 fail | cores 5 5 5 | a = barrier 0 | lose 1 | settle | probe 6 2 1
    a: - | tick 10 | a: rank_lost: rank 1 (incarnation 1) was lost...
    assembled 2 fail | cores 5 5 5 | lose 1 | settle | probe 6 2 1 | a = barrier 0
    a: - | tick 10 | a: rank_lost: rank 1 (incarnation 1) was lost...
  )");
}

TEST(Membership, FailDoesNotWaitForARoundThatNobodyFinishes) {
  play(R"(
    assembled 3 fail | cores 5 5 5 | lose 1 | settle | late = join 1
    tick 500 | beat 0 2 | tick 501 | over
    late: rank_lost: rank 1 (incarnation 1) was lost...
  )");
}

TEST(Membership, StopCompletesNothing) {
  play(R"(
    assembled 3 stop | cores 5 5 5 | a = barrier 0 | lose 1 | over
    a: rank_lost: job 'job' ended: rank 1 (incarnation 1) was lost...
    trace fail rank_lost
    # Another boundary is under way.
    assembled 3 max 4 stop | cores 5 5 5 | late = join 3 | lose 1 | over | late: rank_lost: ...
    # Before the job has begun somebody else may come.
    job 3 stop | join 0 | join 1 | settle | lose 0 | settle | state assembling
    join 0 | join 2 | settle | state running
    assembled 2 stop | leave 1 | settle | state running
  )");
}

TEST(Membership, WithoutInitialParametersThereIsNothingToGoOnWith) {
  play(R"(
    assembled 2 broadcast $ | a = barrier 1 | lose 0 | settle | over
    a: ...had not sent the initial parameters
  )",
       {"shrink", "fail"});
  play(R"(
    # They came between hold and commit.
    assembled 2 broadcast | committed 1 | lose 0 | settle | alive
    assembled 2 broadcast wait | lose 0 | settle | state paused
    a = join 0 | settle | a: ok sends | state running
  )");
}

TEST(Membership, TheLastToLeaveEndsTheJob) {
  play(R"(
    assembled 2 | cores 9 8 9 | last 8 | first = leave 1 | first: -
    settle | first: ok | of 1 left | out 1.1 rank 1 (incarnation 1) is out: left
    second = leave 0 | twice = leave 0 | settle | second: ok | twice: ok
    trace hold, commit 9: -1, revoke 1, hold, commit 9: -0, revoke 0, end
    late = join 0 | late: not_found...
  )");
}

TEST(Membership, LeavingTriggersNoPolicy) {
  play(R"(
    assembled 3 $ | cores 3 3 3 | leave 2 | settle
    trace hold, commit 3: -2, revoke 2 | state running
  )",
       {"wait", "fail"});
}

TEST(Membership, ALostRankThatNobodyWaitsForDoesNotKeepTheJobAlive) {
  play(R"(
    assembled 3 | cores 4 4 4 | lose 2 | settle | leave 1 | leave 0 | settle | last-traced end
  )");
}

// What comes later under its name is another job, whose ranks assemble.
TEST(Membership, AJobThatHasShrunkToNobodyEnds) {
  play(R"(
    assembled 2 | cores 4 4 4 | lose 0 | settle | state running
    lose 1 | settle | last-traced fail rank_lost | state failed
    reason every rank was lost, the last one (rank 1): the process ended
  )");
}

TEST(Membership, ASuccessorOnItsWayKeepsAJobAlive) {
  play("assembled 1 | cores 4 4 4 | a = join 0 replace | settle | a: ok 0.2 | state running");
}

TEST(Membership, RanksThatAreWaitedForMayAllComeBack) {
  play(R"(
    assembled 2 wait | cores 4 4 4 | lose 0 | lose 1 | settle | state paused | missing 0 1
    # Until both are back.
    tick 8000 | alive | back = join 0 | settle | back: ok 0.2 | state paused
    tick 1 | last-traced fail rank_lost
  )");
}

TEST(Membership, ARefusedJoinLeavesNoJobBehind) {
  play(R"(
    job 2 | a = join 2 | a: full: rank 2 is out... | over | last-traced end
    job 2 | memory none | a = join 0 | a: full: no memory... | over | last-traced end
    # Others do not mind.
    job 2 | memory slow | right = join 1 | a = join 2 | a: full: rank 2 is out...
    settle | right: ok | b = join 2 | b: full: rank 2 is out... | alive
  )");
}

TEST(Membership, AnAdmissionThatTakesLongHoldsNobodyUp) {
  play(R"(
    assembled 2 max 3 | cores 5 5 5 | memory slow | third = join 2 | settle | third: ok
    trace admit 2.1, hold, commit 5: +2.1@5
    # Others come and go meanwhile.
    again = join 2 replace | answer 4 | trace hold, commit 5: -2, revoke 2, admit 2.2
    a = hyper lr=1 | leave 1 | answer 8 | a: ok | of 1 left | again: - | settle | again: ok
  )");
}

// Whoever joined and is lost before all are there is still waited for, under every policy.
TEST(Membership, TheFirstRanksAreThereAllAtOneTime) {
  for (const char* goes : {"lose 1", "gone = leave 1 | gone: -"}) {
    play(std::string("job 3 $ | join 0 | join 1 | settle | forget-trace | ") + goes + R"(
      settle | trace hold, commit 1: ~1@1, revoke 1
      join 2 | settle | state assembling | missing 1
      a = join 1 | settle | a: ok @1 | state running
    )",
         kPolicies);
  }
}

// The one with the initial parameters too.
TEST(Membership, RankZeroMayBeLostAndComeBackBeforeAllAreThere) {
  play(R"(
    job 3 broadcast $ | join 0 | join 1 | settle | lose 0 | settle | join 2 | settle
    alive | state assembling | a = join 0 | settle | a: ok sends | state running
    beats 1 900 0 1 2 | alive
  )",
       kPolicies);
}

TEST(Membership, ALeaveBeforeTheJobHasBegunIsALoss) {
  play(R"(
    assembled 2 broadcast $ | a = barrier 1 | b = leave 0 | settle | b: ok | over
    a: ...left before the job had begun; it had not sent
  )",
       {"shrink", "fail"});
  play(R"(
    assembled 2 broadcast wait | barrier 1 | b = leave 0 | settle | b: ok | state paused
    a = join 0 | settle | a: ok sends | state running
    # Another rank: the policy decides; nobody waits for ever.
    assembled 3 broadcast | leave 1 | settle | cores 1 1 1 | probe 1 1 0 1 | beats 12 900 0 2 | alive
  )");
  play(R"(
    assembled 3 broadcast $ | leave 1 | settle | cores 1 1 1 | probe 1 1 0 1 | beats 12 900 0 2 | over
  )",
       {"wait", "fail"});
}

TEST(Membership, ABarrierIsOfTheLiving) {
  play(R"(
    job 3 max 4 | join 0 | join 1 | settle | zero = barrier 0 | one = barrier 1
    # Rank 2 has not come yet.
    zero: - | join 2 | settle | zero: -
    twice = barrier 0 | zero: invalid: rank 0 entered the barrier twice...
    lose 2 | twice: - | settle | twice: ok | one: ok
    # Whoever is lost or leaves inside is told so; a new rank is waited for.
    join 3 | settle | again = barrier 0 | lost = barrier 1 | lose 1 | settle
    lost: fenced: rank 1... | again: - | three = barrier 3 | three: ok | again: ok
  )");
}

TEST(Membership, WhoGivesUpABarrierIsNotInIt) {
  play(R"(
    assembled 2 | first = barrier 0 | give-up 1 | give-up 0
    first: unavailable: the connection over which rank 0 waited...
    one = barrier 1 | one: - | zero = barrier 0 | zero: ok | one: ok
  )");
}

TEST(Membership, LeasesAreRenewedByHeartbeatsOnly) {
  play(R"(
    assembled 2 | beats 10 100 0 | trace | beats 10 100 0 | settle | of 0 live | of 1 lost
    out 1.1 ...its lease of 1000 ms expired
  )");
}

TEST(Membership, WhoeverTheOthersWaitForTooLongIsLost) {
  play(R"(
    assembled 3 | beat 0 1 2 | probe 1 1 1 1 waited 1 2 | tick 0 | waiting 1 2
    at +4000 | beat 0 1 2 | probe 1 1 1 1 waited 1 2 | tick 0
    # Rank 2 has sent something.
    at +900 | beat 0 1 2 | probe 1 1 1 2 waited 1 2 | tick 0 | trace
    at +200 | beat 0 1 2 | probe 1 1 1 2 waited 1 2 | tick 0 | settle
    trace hold, commit 1: -1, revoke 1 | out 1.1 ...while the others waited for it
    # Nobody waits: no limit.
    at +100000 | beat 0 2 | probe 1 9 1 2 | tick 0
    at +4000 | beat 0 2 | probe 1 9 1 2 waited 2 | tick 0 | trace
  )");
}

TEST(Membership, InitialParametersAreWaitedForToo) {
  JobSpec spec = membership_spec(2);
  spec.initial = "broadcast";
  Assembled m(spec);
  for (int i = 0; i < 7 && !m.over(); ++i) {
    m->leases().renew(0, m.now);
    m->leases().renew(1, m.now);
    m.probe(0, {0, 0}, {});
    m.settle();
    m.tick(900);
  }
  EXPECT_THAT(m->leases().waiting_for(), ElementsAre(0));
  EXPECT_TRUE(m.over());
  EXPECT_THAT(m.records().back().reason, HasSubstr("rank 0 (incarnation 1) was lost"));
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, FirstRanksThatDoNotCome) {
  play(R"(
    job 3 min 1 | join 1 | settle | a = barrier 1 | beats 4 900 1 | settle
    trace admit 1.1, hold, commit 1: +1.1@1, hold, commit 1: x0 x2
    state running | a: ok | never-came 2 did not join within 3000 ms
    late = join 0 | settle | late: ok
  )");
  // Nobody but rank 0 has the initial parameters: without it, there is nothing to begin with.
  play(R"(
    job 2 min 1 broadcast $ | join 1 | settle | a = barrier 1 | beats 4 900 1 | settle | over
    a: rank_lost: rank 0 did not join within 3000 ms; nobody else has the initial parameters
  )",
       {"", "| join 0 | settle | lose 0"});
  play(R"(
    # It came, gave them to all, and went.
    job 3 min 1 broadcast | join 0 | join 1 | settle | cores 1 1 1 | lose 0 | settle
    beats 4 900 1 | settle | state running
  )");
  play(R"(
    job 3 $ | join 1 | settle | a = barrier 1 | beats 4 900 1 | over
    a: rank_lost: rank 0, 2 did not join within 3000 ms
  )",
       kPolicies);
}

// What is written down about a thousand of them can be read again.
TEST(Membership, ManyRanksAreNotAllNamed) {
  play(R"(
    job 1024 | join 0 | settle | a = barrier 0 | beats 4 900 0
    a: rank_lost: rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20 … and 1003 more did not join within 3000 ms
    reason ...… and 1003 more
  )");
}

TEST(Membership, HyperparametersTakeEffectFromTheBoundaryOn) {
  play(R"(
    assembled 2 | cores 12 12 11
    first = hyper lr=0.5 | second = hyper lr=0.25 | third = hyper momentum=0.75
    # Until both cores know.
    first: - | answer 2 | first: - | answer | first: - | answer | first: ok | second: -
    cores 13 13 13 | settle | third: ok
    trace hold, commit 12: lr=0.5, hold, commit 13: lr=0.25 momentum=0.75
    log admitted 0.1 @1, admitted 1.1 @1, hyper 0.0 @12 lr=0.5, hyper 0.0 @13 lr=0.25, hyper 0.0 @13 momentum=0.75
  )");
}

// Out of lock-step. The rank had asked for the batches of its rounds, whoever is behind it.
TEST(Membership, ABatchChangesAfterAllRoundsOfARankThatIsGone) {
  play(R"(
    assembled 2 ssp | cores 3 8 3 | last 8 | lose 1 | settle
    cores 3 4 3 | hyper batch=5 | settle
    log admitted 0.1 @1, admitted 1.1 @1, lost 1.1 @0 0-2:8, hyper 0.0 @10 batch=5
  )");
}

// Cores may go on behind a snapshot's round before it is told that all have copied their chunks.
TEST(Membership, WhatASnapshotIsToHaveIsKeptUntilItIsSaved) {
  JobSpec spec = membership_spec(2);
  spec.optimizer = "momentum";
  spec.branches = 1;
  Assembled m(spec);
  m.cores_at(2, 2, 2);
  m.branches({.action = BranchAction::kFork, .round = 3});
  m.branches({.action = BranchAction::kSchedule, .round = 5, .turns = {{1, 2}, {0, 1}, {1, 0}}});
  m.settle();
  m.cores_at(4, 4, 4);
  ASSERT_TRUE(m->changes().ask(&Boundary::snapshot));
  m.carry_out();
  m.settle();
  m->rounds().keep_from(4);
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
  m->rounds().keep_from(kNever);
  m.cores_at(12, 12, 12);
  m.branches({.action = BranchAction::kSchedule, .turns = {{1, 0}}});
  m.settle();
  EXPECT_EQ(m->saved(12).branches.moves.size(), 0u);
  EXPECT_EQ(m.wrong(), "");
}

TEST(Membership, RanksThatSetTheSameMakeOneChange) {
  play(R"(
    assembled 3 | cores 12 12 12 | hyper lr=0.5 from 12 by 1 | settle
    same = hyper lr=0.5 from 12 by 0 | more = hyper lr=0.5 momentum=0.75 from 12 by 2
    other = hyper momentum=0.25 from 12 by 1 | changed = hyper lr=0.25 from 12 by 1
    settle | same: ok | more: ok
    other: mismatch: rank 1 sets momentum to 0.25 from round 12 on, and rank 2 to 0.75: the ranks of a job set the same
    changed: mismatch: rank 1 sets lr to 0.25 from round 12 on, and other ranks to 0.5: the ranks of a job set the same
    # Nobody else has set it.
    own = hyper momentum=0.125 from 12 by 2 | settle | own: ok
    trace hold, commit 12: lr=0.5, hold, commit 12:, hold, commit 12: lr=0.5 momentum=0.75, hold, commit 12: momentum=0.125
    log admitted 0.1 @1, admitted 1.1 @1, admitted 2.1 @1, hyper 0.0 @12 lr=0.5, hyper 0.0 @12 lr=0.5 momentum=0.75, hyper 0.0 @12 momentum=0.125
    cores 13 13 13 | next = hyper lr=0.25 from 13 by 0 | settle | next: ok
  )");
}

TEST(Membership, OneBoundaryTakesAllThatWaits) {
  play(R"(
    assembled 4 max 6 | cores 7 7 6 | hyper lr=1 | lose 1
    # It is known already.
    lose 1 | leave 3 | join 5 | join 4 | settle
    trace hold, admit 5.1, admit 4.1, commit 7: lr=1, hold, commit 7: -1 -3 +5.1@7 +4.1@7, revoke 1, revoke 3
  )");
}

TEST(Membership, AnAdmissionThatFailsChangesNothing) {
  play(R"(
    assembled 2 max 3 wait | memory none | of 2 absent | third = join 2 | settle
    third: full: no memory left
    of 2 absent | missing | leave 1 | settle | join 1 | settle
    of 1 left | out 1.1 incarnation 1 of rank 1 was replaced
    state running | memory there | again = join 1 | settle | again: ok 1.3
  )");
}

TEST(Membership, AFirstRankWhoseAdmissionFailsIsStillBoundByTheJoinLimit) {
  play(R"(
    job 2 min 1 | join 0 | settle | memory none | join 1 | settle | missing 1
    beats 4 900 0 | settle | missing | state running
  )");
}

TEST(Membership, AJobWhoseLastSuccessorFindsNoMemoryIsNotThereForEver) {
  play("assembled 1 | lose 0 | memory none | join 0 | settle | over");
}

TEST(Membership, WhatEndsAJobAnswersEverybody) {
  const std::vector<std::pair<std::string, std::string>> kCases = {
      {"remove", "not_found: the job was deleted"},
      {"nonfinite 1 key 'w', elements 0 to 99, in round 4",
       "non_finite: rank 1 sent a NaN or an infinity in key 'w'"},
      {"nonfinite - key 'w'", "non_finite: the sum of finite gradients overflowed"}};
  for (const auto& [how, why] : kCases) {
    play(
        "assembled 3 max 4 | a = hyper lr=1 | b = join 3 | c = leave 2 | d = barrier 1\n"
        "e = hyper lr=2\n" +
            how + "\nc: ok\na: ...$\nb: ...$\nd: ...$\ne: ...$",
        {why});
  }
}

// What the cores are carrying out counts, and comes before the end in the log.
TEST(Membership, AJobThatEndsInABoundaryEndsBehindIt) {
  Assembled m(membership_spec(3));
  m->changes().lose(1, "the process ended");
  m.carry_out();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(m.answer());  // both hold, one has committed
  m->fail(ErrorCode::kNotFound, "the job was deleted");
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
  Assembled m(membership_spec(2));
  m->log().exclude(1, 1, 2, 17);
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
    JobSpec spec = membership_spec(3);
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

// A rack is a rank that nobody replaces by hand: what another box asks for is a mistake.
TEST(MembershipOfRacks, ASecondBoxForAGroupIsToldWhatIsWrong) {
  JobSpec spec = membership_spec(2);
  spec.rack_ranks = {4, 3};
  Assembled m(spec);
  const std::string said = m.answered(m.join(1));
  EXPECT_THAT(said, HasSubstr("another box already sums rank 4 to 6 of job 'job', which are group "
                              "1 of its 'groups'"));
  EXPECT_THAT(said, HasSubstr("all join the same"));
  EXPECT_THAT(said, ::testing::Not(HasSubstr("replace")));
}

}  // namespace membership_test
}  // namespace phub

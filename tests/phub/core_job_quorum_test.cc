// Rounds that end with a quorum: who takes part in them, with what, and who gets their results.
#include <gtest/gtest.h>

#include "tests/phub/core_script.h"

namespace phub::testing {
namespace core_job_quorum_test {

TEST(CoreJobQuorum, WithAllRanksARoundEndsAtOnceAndEachHasACopy) {
  play_core(R"(
    job quorum=2 chunks=2 | push 0-2 0@1 | sent | push 0,1 1@1 | told quorum @1 | sent
    push 2 1@1 | sent 0-2:0@1 0-2:1@1 | has 0:0=21 1:0=21 2:0=21 2:1=21
    pushes 2 | sent 0-2:0@2 0-2:1@2 | told quorum @2
  )");
}

// No chunk closes before it is known who takes part, and a late rank does so with none of its
// chunks, though one of them was there in time.
TEST(CoreJobQuorum, ARankThatIsLateTakesPartInTheNextRoundWithAllOfItsChunks) {
  play_core(R"(
    job quorum=2 chunks=2 | push 0,1 0,1@1 | push 2 0@1=100 | told quorum @1 | sent | waits
    grace-over 0-2 | sent 0,1:0@1 0,1:1@1 | has 0:0=5 1:1=5
    # The others go on, and wait for their next quorum: rank 2 is one of it once it has sent all.
    push 0 0,1@2=7 | sent | told | waits 1 2 | push 2 1@1=200 | told quorum @2 | sent
    grace-over 0-2 | sent 0,2:0@2 0,2:1@2 | has 0:0=107 2:0=107 2:1=207
    # Rank 1 is late now, and rank 2 goes on with round 3.
    push 0,2 0,1@3=1 | push 1 0,1@2=50 | sent 0-2:0@3 0-2:1@3 | told quorum @3 | has 1:0=52
  )");
}

TEST(CoreJobQuorum, ARankMayBeLateForManyRounds) {
  play_core(R"(
    job quorum=1 chunks=1 ranks=0,1 | push 0 0@1=1 | told quorum @1 | grace-over 0,1 | sent 0:0@1
    push 0 0@2=1 | told quorum @2 | grace-over 0,1 | sent 0:0@2
    push 0 0@3=1 | told quorum @3 | grace-over 0,1 | sent 0:0@3
    push 1 0@1=10 | told quorum @4 | push 0 0@4=1 | sent 0,1:0@4 | has 0:0=11 1:0=11
    # What it sent for round 1 is done, and comes once more after a reconnection; then it goes on.
    detach 1 | reattach 1.1 | again 1 0@1 | sent 1:0@4 | push 1 0@5=3 | told quorum @5
    push 0 0@5=1 | sent 0,1:0@5 | has 1:0=4
    push 1 0@7 | told violation 1 round 7
  )");
}

// A mean is divided by the ranks that take part; a null counts as a contribution.
TEST(CoreJobQuorum, AMeanIsOfTheRanksThatTakePart) {
  play_core(R"(
    job quorum=2 chunks=1 mean | push 0,2 0@1 | told quorum @1 | grace-over 0-2 | sent 0,2:0@1
    has 0:0=17/2 | null 1 0@1 | push 0,2 0@2=3 | sent 0-2:0@2 | told quorum @2 | has 1:0=6/3
  )");
}

TEST(CoreJobQuorum, TheOptimizerMakesAStepPerRoundAndAllCopiesAreOfIt) {
  play_core(R"(
    job quorum=1 chunks=1 sgd ranks=0,1 | push 0 0@1=2 | told quorum @1 | grace-over 0,1
    sent 0:0@1 | has 0:0=-2 1:0=0 | push 0 0@2=3 | push 1 0@1=10 | told quorum @2
    sent 0,1:0@2 | has 0:0=-15 1:0=-15 | is 0=-15/0/0
  )");
}

// Rank 2 has sent some of the round when it is lost; what rank 1 has put aside is not its.
TEST(CoreJobQuorum, ALostRankCountsAsFarAsItCameAndIsWaitedForNoLonger) {
  play_core(R"(
    job quorum=3 chunks=2 | push 0,1 0,1@1 | push 2 0@1 | sent | hold 1 1 1 | commit 1 -2
    last 2 1 0 | sent 0,1:0@1 0,1:1@1 | has 0:0=21 0:1=5
    # With fewer ranks than the quorum all that are there make a round.
    push 0 0,1@2 | sent | push 1 0,1@2 | sent 0,1:0@2 0,1:1@2
  )");
}

// Its log says that it was late in round 1: then it has no part in that, nor has its successor.
TEST(CoreJobQuorum, WhatALateRankPutAsideIsDroppedWithIt) {
  play_core(R"(
    job quorum=1 chunks=2 ranks=0,1 max=2 | push 1 0@1=100 | push 0 0,1@1=1 | told quorum @1
    grace-over 0,1 | hold 2 | commit 2 -1 +1.2@2 | last 1 0 0 | sent-mixed 0,1:0@1 0,1:1@1
    has 1:0=1 0:1=1 | push 0 0,1@2=5 | told quorum @2 | push 1 0,1@2=5
    sent 0,1:0@2 0,1:1@2 | has 0:0=10
  )");
}

// What was brought back is its contribution to round 2, as far as it came.
TEST(CoreJobQuorum, ALostRankCountsWithWhatWasBroughtBack) {
  play_core(R"(
    job quorum=1 chunks=2 ranks=0,1 max=2 | push 1 0@1=100 | push 0 0,1@1=1 | told quorum @1
    grace-over 0,1 | sent 0:0@1 0:1@1 | hold 2 | commit 2 -1 +1.2@3 | last 1 2 0
    push 0 0,1@2=5 | sent-mixed 0,1:0@2 0,1:1@2 | has 0:0=105 0:1=5 1:1=5
  )");
}

// Between hold and commit nobody decides; a decided round goes on, and newcomers begin behind it.
TEST(CoreJobQuorum, ANewcomerBeginsWithTheFirstRoundThatIsNotDecided) {
  play_core(R"(
    job quorum=1 chunks=1 max=3 ranks=0,1 | push 0 0@1 | told quorum @1 | hold 1 | push 1 0@1
    sent | commit 1 +2.1@1 | sent 2:0@0 | push 2 0@1 | sent 0-2:0@1 | has 2:0=21
    push 0 0@2=1 | told quorum @2 | grace-over 0-2 | hold 3 | sent 0:0@2 | commit 3 -2
    last 2 1 | push 1 0@2=1 | told quorum @3 | push 0 0@3=1 | sent 0,1:0@3 | has 1:0=2
  )");
}

// Those that take part in a decided round are lost before it closes: over shared memory their
// gradients are gone, and the round passes without anybody.
TEST(CoreJobQuorum, ARoundThatNobodyIsLeftInIsPassedOver) {
  play_core(R"(
    job quorum=1 chunks=1 ranks=0,1 workers-own | push 0 0@1 | told quorum @1 | grace-over 0,1
    hold 2 | commit 2 -0 | last 0 0 | sent | push 1 0@1=9 | sent 1:0@2
    has 1:0=9
  )");
}

TEST(CoreJobQuorum, ARankThatReconnectsGetsWhatItLacks) {
  play_core(R"(
    job quorum=1 chunks=1 ranks=0,1 | push 1 0@1=1 | told quorum @1 | detach 1 | push 0 0@1=1
    sent 0:0@1 | push 0 0@2=1 | told quorum @2 | grace-over 0,1 | sent 0:0@2
    reattach 1.1 | again 1 0@1 | sent 1:0@1 | has 1:0=2 | push 1 0@2=5 | told quorum @3
    push 0 0@3=1 | sent 0,1:0@3 | has 1:0=6
  )");
}

TEST(CoreJobQuorum, InitialParametersGoToAll) {
  play_core(R"(
    job quorum=1 chunks=1 sgd initial ranks=0,1 | initial 0 0=4 | sent 0,1:0@0 | has 0:0=4 1:0=4
    push 0 0@1=1 | told quorum @1 | grace-over 0,1 | sent 0:0@1 | has 0:0=3 1:0=4
  )");
}

// Rank 1's gradients are one and two rounds late.
TEST(CoreJobQuorum, WhatIsLateCountsLess) {
  play_core(R"(
    job quorum=1 chunks=1 ranks=0,1 late-decay=0.5 | push 0 0@1=1 | told quorum @1
    grace-over 0,1 | sent 0:0@1 | has 0:0=1 | push 0 0@2=1 | told quorum @2 | push 1 0@1=10
    sent 0,1:0@2 | has 1:0=6 | push 0 0@3=1 | told quorum @3 | grace-over 0,1 | sent 0:0@3
    push 0 0@4=1 | told quorum @4 | grace-over 0,1 | sent 0:0@4 | push 0 0@5=1 | told quorum @5
    push 1 0@3=8 | sent 0,1:0@5 | has 1:0=3 | push 0,1 0@6=4 | told quorum @6 | sent 0,1:0@6
    has 0:0=8
  )");
}

// A mean divides by the sum of the weights; what is dropped has none.
TEST(CoreJobQuorum, AMeanIsByTheWeightsThatAreLeft) {
  play_core(R"(
    job quorum=1 chunks=1 ranks=0,1 late-decay=0.5 mean weights | push 0 0@1=1/2
    told quorum @1 | grace-over 0,1 | sent 0:0@1 | has 0:0=1 | push 0 0@2=3/2 | told quorum @2
    push 1 0@1=9/8 | sent 0,1:0@2 | has 1:0=42/6
    job quorum=1 chunks=1 ranks=0,1 late-decay=0 mean weights | push 0 0@1=1/2
    told quorum @1 | grace-over 0,1 | sent 0:0@1 | push 0 0@2=3/2 | told quorum @2
    push 1 0@1=9/8 | sent 0,1:0@2 | has 1:0=3
  )");
}

// The only gradient of a round comes too late: no step is made, as in a round that is skipped.
TEST(CoreJobQuorum, ARoundOfWhichAllIsDroppedIsNoStep) {
  play_core(R"(
    job quorum=1 chunks=1 ranks=0,1 late-decay=0 momentum | push 0 0@1=1 | told quorum @1
    grace-over 0,1 | sent 0:0@1 | is 0=-1/1/0 | push 1 0@1=9 | told quorum @2 | grace-over 0,1
    sent 1:0@2 | has 1:0=-1 | is 0=-1/1/0 | push 0 0@2=1 | told quorum @3 | push 1 0@3=0
    sent 0,1:0@3 | is 0=-1.9/0.9/0
  )");
}

// Rank 1 is lost when its gradient, which is a round late, is there; the round takes it.
TEST(CoreJobQuorum, WhatALostRankSentLateCountsLess) {
  play_core(R"(
    job quorum=1 chunks=1 ranks=0,1 late-decay=0.5 | push 0 0@1=1 | told quorum @1
    grace-over 0,1 | sent 0:0@1 | push 1 0@1=10 | told quorum @2 | hold 2 2 | commit 2 -1
    last 1 2 | push 0 0@2=1 | sent 0:0@2 | has 0:0=6
  )");
}

// One of its chunks had come when the others went on, and counts less; its successor is new.
TEST(CoreJobQuorum, WhatWasBroughtBackOfALostRankCountsLess) {
  play_core(R"(
    job quorum=1 chunks=2 ranks=0,1 max=2 late-decay=0.5 | push 1 0@1=100 | push 0 0,1@1=1
    told quorum @1 | grace-over 0,1 | sent 0:0@1 0:1@1 | hold 2 | commit 2 -1 +1.2@3 | last 1 2 0
    push 0 0,1@2=5 | sent-mixed 0,1:0@2 0,1:1@2 | has 0:0=55 0:1=5 1:1=5
  )");
}

// Rank 1 is lost in a decided round: that it was late is counted once. Then rank 0 is late, too.
TEST(CoreJobQuorum, ALateRankThatIsLostInADecidedRoundCountsLessOnce) {
  play_core(R"(
    job quorum=1 chunks=1 sgd ranks=0,1 late-decay=0.5 | push 0 0@1=1 | told quorum @1
    grace-over 0,1 | sent 0:0@1 | push 1 0@1=8 | told quorum @2 | grace-over 0,1 | hold 3
    commit 3 -1 | last 1 2 | push 0 0@2=1 | sent 0:0@3 | has 0:0=-5.5
  )");
}

// The successor of rank 1 is lost while what that had sent late is not summed up yet.
TEST(CoreJobQuorum, WhatALostRankSentLateCountsLessOnceWhoeverFollowsIt) {
  play_core(R"(
    job quorum=1 chunks=1 ranks=0,1 max=2 late-decay=0.5 | push 0 0@1=1 | told quorum @1
    grace-over 0,1 | sent 0:0@1 | push 1 0@1=10 | told quorum @2 | hold 2 2 | commit 2 -1
    last 1 2 | hold 2 | commit 2 +1.2@3 | hold 2 | commit 2 -1 | last 1 0
    push 0 0@2=1 | sent 0:0@2 | has 0:0=6
  )");
}

// Rank 2 is late in round 1 of fragment 0, and then in time in that of fragment 1.
TEST(CoreJobQuorum, WhoTakesPartIsDecidedForEachFragment) {
  play_core(R"(
    job quorum=2 chunks=3 fragments=0,1,0 | push 0,1 0,2@1 | push 2 2@1=100 | told quorum @1
    sent | grace-over 0:0-2 | sent 0,1:0@1 0,1:2@1 | has 0:0=5 1:2=5
    push 2 1@1=100 | push 0 1@1 | told quorum @1 | sent | push 1 1@1 | sent 0-2:1@1 | has 2:1=105 0:1=105
    # Fragment 1 goes on by a round while rank 2 has not sent the rest of fragment 0.
    push 0-2 1@2=1 | told quorum @2 | sent 0-2:1@2 | push 2 0@1=200 | sent | push 0 0,2@2=7
    told quorum @2 | grace-over 0:0-2 | sent 0,2:0@2 0,2:2@2 | has 2:0=207 0:2=107
  )");
}

// Rank 2 is late in both, whose rounds are decided at once, and is expected in the next of each.
TEST(CoreJobQuorum, ARankIsLateInFragmentsThatAreAtDifferentRounds) {
  play_core(R"(
    job quorum=2 chunks=2 fragments=0,1 | push 0-2 0@1 | told quorum @1 | sent 0-2:0@1
    push 0,1 0@2=1 | told quorum @2 | push 0,1 1@1=1 | told quorum @1
    grace-over 0:0-2 | grace-over 1:0-2 | sent 0,1:0@2 0,1:1@1 | has 0:0=2 0:1=2
    push 2 0@2=10 | push 2 1@1=20 | push 0,1 0@3=1 | told quorum @3 | sent 0-2:0@3 | has 2:0=12
    push 0,1 1@2=1 | told quorum @2 | sent 0-2:1@2 | has 2:1=22
  )");
}

// A rank that waits at another fragment is not to blame for not being at this one.
TEST(CoreJobQuorum, WhoWaitsAtAnotherFragmentIsNotWaitedFor) {
  play_core(R"(
    job quorum=2 chunks=2 fragments=0,1 ranks=0,1 max=2 | push 0 0@1 | sent | waits 1
    push 1 1@1 | sent | waits | push 0 1@1 | sent 0,1:1@1 | waits 1
  )");
}

// Rank 2 joins between rounds of fragment 0 and of fragment 1, which is a round behind: it gets the
// result of round 1 from either when that is there.
TEST(CoreJobQuorum, ABoundaryHoldsAllFragments) {
  play_core(R"(
    job quorum=2 chunks=2 fragments=0,1 max=3 ranks=0,1 | push 0,1 0@1
    sent 0,1:0@1 | hold 2 | push 0,1 1@1 | sent | commit 1 +2.1@2 | sent-mixed 0-2:1@1 2:0@1
    push 0-2 0@2=1 | told quorum @2 | sent 0-2:0@2 | has 2:0=3
    push 0-2 1@2=2 | told quorum @2 | sent 0-2:1@2 | has 2:1=6
  )");
}

// Rank 1 waits for round 2 of fragment 1, in which nobody is left: it is passed over, and the core
// sends its result before it sleeps.
TEST(CoreJobQuorum, WhatARoundGivesThatIsPassedOverIsSent) {
  play_core(R"(
    job quorum=1 chunks=2 fragments=0,1 max=2 ranks=0 | push 0 0@1 | sent 0:0@1
    push 0 0@2 | sent 0:0@2 | hold 3 | commit 1 +1.1@3 | sent 1:0@2
    hold 3 | commit 1 -0 | last 0 2 0 | run | flushed 1 | sent 1:1@2
  )");
}

// It had sent fragment 1, which counts, and was late in fragment 0, which is dropped with it.
TEST(CoreJobQuorum, ALostRankEndsInEachFragmentByItself) {
  play_core(R"(
    job quorum=1 chunks=2 fragments=0,1 ranks=0,1 max=2 | push 1 1@1=100 | told quorum @1
    push 0 0@1=1 | told quorum @1 | grace-over 0:0,1 | sent 0:0@1 | hold 2 | commit 1 -1
    last 1 0 1 | push 0 1@1=2 | sent 0:1@1 | has 0:1=102 | push 0 0@2=4 | sent 0:0@2 | has 0:0=4
  )");
}

// As many as it has cores; a core that sleeps is woken by a decision.
TEST(CoreJobQuorum, ItSleepsForAllRanksAndForTheDecision) {
  play_core(R"(
    job quorum=2 chunks=1 | push 0,1 0@1 | told quorum @1 | sleeps 1 1 1 | for-one no
    grace-over 0-2 | busy | sent 0,1:0@1 | sleeps 1 1 1
  )");
}

}  // namespace core_job_quorum_test
}  // namespace phub::testing

// Racks at a core: of the parent, whose ranks are racks, and of a rack, whose results come from
// above.
#include <gtest/gtest.h>

#include "tests/phub/core_script.h"

namespace phub::testing {
namespace core_job_racks_test {

// --- the parent ----------------------------------------------------------------------------------

TEST(Parent, AMeanCountsTheRanksOfTheRacks) {
  play_core(R"(
    # What was sent twice is counted once.
    job mean parent=2,4,1 | push 0 0@1=6/2 | push 0 0@1=6/2 | push 1 0@1=8/4 | push 2 0@1=0/1
    sent 0-2:0@1 | has 0=14/7
    # The others of rack 0 were lost; nobody is there in rack 2.
    push 0 0@2=6/1 | null 1 0@2/3 | null 2 0@2/0 | run | has 0=6/4
  )");
}

TEST(Parent, NobodysRoundChangesNothing) {
  play_core(R"(
    job mean parent=2,4,1 | null 0-2 0@1/0 | sent 0-2:0@1 | has 0=0
    push 0 0@2=6/2 | null 1,2 0@2/0 | run | has 0=3 | null 0-2 0@3/0 | run | has 0=3
  )");
}

// As in one box, where the last rank's NaN ends the job.
TEST(Parent, ARoundOfWhichAllAreLeftOutStopsTheJob) {
  play_core(R"(
    job mean parent=2,4,1 nan=$ | null 0 0@1/0 | null 1 0@1/none-left | null 2 0@1/0
    told nonfinite 1 chunk 3 @1 | sent
  )",
            {"stop", "exclude"});
}

// Ranks are to be left out in no rack of such a job.
TEST(Parent, ARackThatLeavesItsRanksOutStopsAJobThatIsToStop) {
  play_core(R"(
    job mean parent=2,4,1 nan=$ | push 0 0@1=6/2 | null 1 0@1/none-left | null 2 0@1/1
    told nonfinite 1 chunk 3 @1 | sent
  )",
            {"stop", "pass"});
}

// It has found whose gradient it was, and left that out: what is not finite now is a sum.
TEST(Parent, ARackIsNotLeftOut) {
  play_core(R"(
    job mean parent=2,4,1 nan=exclude | push 0 0@1=6/2 | push 1 0@1=inf/4 | push 2 0@1=1/1
    told nonfinite 1 chunk 3 @1
  )");
}

TEST(Parent, OthersGoOnWithoutARackOfWhichAllAreLeftOut) {
  play_core(R"(
    job mean parent=2,4,1 nan=exclude | null 1 0@1/none-left | push 0 0@1=6/2 | null 2 0@1/1
    run | has 0=6/3
  )");
}

TEST(Parent, NumbersOfRanksThatCannotBeAreViolations) {
  play_core("job parent=2,4,1 | push 0 1@1=1/$ | told violation 0 participants $",
            {"0", "3", "4294967295"});
  play_core("job parent=2,4,1 | null 2 1@1/2 | told violation 2 participants 2");
}

TEST(Parent, AGradientWithoutItsTrailerIsAViolation) {
  play_core(R"(
    job parent=2,4,1 | raw 0 data 0@1 256 0 | told violation 0 bytes 256
    raw 1 null 0@1 0 0 | told violation 1 bytes 0 | raw 2 null 0@1 4 0 | told violation 2 place 0
  )");
}

// --- the rack ------------------------------------------------------------------------------------

// Nobody rings when there are tokens: the core sleeps as long as the bucket says. Where a queue has
// no room, the endpoint rings, and the core also looks by itself.
TEST(Rack, WhatHasNoBudgetWaitsAndTheCoreSleeps) {
  play_core(R"(
    job rack | answer 0-3@0=1 | up | up-room 1 | push 0-2 0,1@1 | run | owes | retries-in 1 | sleeps
    up-refused 2300000 | owes | retries-in 3 | sleeps | up 0@1=21/3
    up-room 1 | up 1@1=21/3 | owes-nothing | sleeps
  )");
}

// Chunks 3 and 2 are of the first queue.
TEST(Rack, WhatWaitsGoesByPriority) {
  play_core(R"(
    job rack priorities=0,7,2,5 | answer 0-3@0=1 | up-room 0 | push 0-2 0-3@1 | run
    up-room 100 | up 3@1=21/3 2@1=21/3 1@1=21/3 0@1=21/3
  )");
}

TEST(Rack, AQueueThatWaitsHoldsUpNoOther) {
  play_core(R"(
    job rack | answer 0-3@0=1 | up-full 0 | push 0-2 0-3@1 | up 0@1=21/3 1@1=21/3
    # Nor one that waits for the same reason as another, which goes on before it.
    up-room 0 | answer 0,1@1=5 | push 0-2 0,1@2 | run | up-room 100 | up 0@2=21/3 1@2=21/3
    up-full 4294967295 | up 2@1=21/3 3@1=21/3
  )");
}

TEST(Rack, ASumGoesUpAndTheResultComesDown) {
  play_core(R"(
    job rack | answer 0-3@0=0 | sends 12 | push 0-2 2@1 | run | up-flushed 1 | up 2@1=21/3
    sent | sleeps | answer 2@1=42 | sent 0-2:2@1 | has 2=42
    # No parent sends it twice.
    senseless 0 1@1 data 256 384
  )");
}

TEST(Rack, NothingIsThereBeforeTheParentsFirstResult) {
  play_core(R"(
    job rack first=300 | posted | answer 1@299=7 | sent 0-2:1@43 | has 1=7
    push 0-2 1@300 | up 1@44=21/3
  )");
}

TEST(Rack, NullOnlyIfNobodySentAGradient) {
  play_core(R"(
    job rack | answer 0-3@0=0 | null 0-2 0@1 | null 0,1 1@1 | push 2 1@1=-0 | up 0@1n/3 1@1=-0/3
  )");
}

TEST(Rack, ALostRankCountsWhereItTookPart) {
  play_core(R"(
    job rack | answer 0-3@0=0 | push 2 0@1 | run | hold | commit 1 -2 | push 0,1 0,1@1
    up 0@1=21/3 1@1=5/2
  )");
}

// Everybody who knew the round is gone: the parent still waits for it.
TEST(Rack, ARoundThatNobodyIsInAnyMoreIsCompletedAllTheSame) {
  play_core(R"(
    job rack ranks=0 | answer 0-3@0=0 | push 0 0@1=1 | up 0@1=1/1 | hold | commit 3 -0 +1.1@3
    up 1@1n/0 2@1n/0 3@1n/0 | answer 0-3@1=5 | up 0@2n/0 1@2n/0 2@2n/0 3@2n/0 | sends 4
    # What its first round begins with.
    answer 0@2=6 | sent 1:0@2 | push 1 0@3 | up 0@3=4/1
  )");
}

TEST(Rack, ANaNIsReportedAndGoesUp) {
  play_core(R"(
    job rack | answer 0-3@0=0 | push 0,2 0@1=1 | push 1 0@1=nan | up 0@1=nan/3
    told nonfinite 1 chunk 3 @1
  )");
}

TEST(Rack, WhoseGradientsAreExcludedIsNotCounted) {
  play_core(R"(
    job rack nan=exclude | answer 0-3@0=0 | push 0,2 0@1 | push 1 0@1=inf | push 0-2 1@1=nan
    up 0@1=17/2 1@1n/none-left
    told excluded 1 chunk 3 @1, excluded 0 chunk 2 @1, excluded 1 chunk 2 @1, excluded 2 chunk 2 @1
  )");
}

TEST(Rack, InitialParametersGoUpOnce) {
  play_core(R"(
    # The result is the answer.
    job rack initial | initial 0 1=9 | up 1i=9 | sent | initial 0 1 | up | sent
    answer 1@0=9 | sent 0-2:1@0
  )");
}

TEST(Rack, AfterABrokenConnectionWhatWasNotAnsweredIsSentAgain) {
  play_core(R"(
    job rack | answer 0-3@0=0 | push 0-2 0,1@1 | up 0@1=21/3 1@1=21/3 | answer 0@1=1 | sends 15
    up-breaks | push 0-2 2@1 | up | told parent nobody | sleeps
    # Queue by queue.
    up-again | up 2@1=21/3 1@1=21/3 | answer 2@1=3 | sent 0-2:2@1
  )");
}

TEST(Rack, AfterABrokenConnectionFirstResultsAreAskedFor) {
  play_core(R"(
    job rack first=300 | answer 1@299=7 | up-breaks | run | up-again | up 2?43 3?43 0?43
    told parent nobody
  )");
}

TEST(Rack, WhatFindsNoRoomWaits) {
  play_core(R"(
    # What waits is tried again, whoever rings.
    job rack | answer 0-3@0=0 | up-room 1 | push 0-2 0-2@1 | up 0@1=21/3 | owes
    up-room 2 | up 2@1=21/3 1@1=21/3
  )");
}

TEST(Rack, AnAnswerThatMakesNoSenseEndsTheJob) {
  play_core("job rack | answer 0-3@0=0 | senseless $",
            {"7 0@0 data", "0 9@0 data", "0 0@5 data 256 0", "0 0@0 data 8 0", "0 0@0 data 256 128",
             "0 0@0 control 0"});
  play_core("job rack | answer 0-3@0=0 | up-violates");
}

}  // namespace core_job_racks_test
}  // namespace phub::testing

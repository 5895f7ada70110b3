// Ranks that are idle at a chunk, or do not read it; and chunks at which all are.
#include <gtest/gtest.h>

#include "tests/phub/core_script.h"

namespace phub::testing {
namespace core_job_interest_test {

TEST(CoreJobInterest, WhoIsIdleIsCountedAndNotWaitedFor) {
  play_core(R"(
    job chunks=2 mean interest=w,wr/r,wr/-,wr | sent-mixed 0,2:0@0n 1:0@0 0-2:1@0
    # The reader may be reading.
    push 0 0@1=12 | sent | null 1 0@1 | sent 0:0@1n 1:0@1 | has 0=12/3
    null 2 0@2 | told violation 2 interest 2
  )");
}

// Who could not be told that he is in, as his queue was full, is told so later.
TEST(CoreJobInterest, WhoIsIdleIsToldOfTheRoundBeforeHisFirst) {
  play_core(R"(
    job chunks=2 interest=wr,wr/-,wr/-,wr | sends 6 | hold | room 0 | commit 1 -1 +1.2@1
    push 0 0@1=1 | run | push 0 0@2=1 | run | push 0 0@3=1 | run
    room 100 | sent-mixed 0:0@3 1:0@0n 1:1@0
  )");
}

// At a boundary, and then step by step: momentum goes on without gradients.
TEST(CoreJobInterest, WhatIsLeftAloneFollows) {
  play_core(R"(
    job chunks=2 half-momentum interest=wr,wr/-,wr/-,wr | push 0 0@1=1 | run | has 0=-1
    # Its only writer is lost; the others go on elsewhere, and nobody is concerned.
    hold | commit 2 -0 | last 0 1 0
    push 1,2 1@1=1 | run | push 1,2 1@2=1 | run | push 1,2 1@3=1 | run | push 1,2 1@4=1 | run
    has 0=-1 | hold 5 4 5
    # All that were idle are lost at one time: they were in the rounds before this one.
    sends 15 | commit 5 -1 -2 +0.2@5 | last 1 4 4 | last 2 4 4
    sent-mixed 0:0,1@4 | has 0=-1.875
  )");
}

// The job pauses for a rank that is lost, also where it was idle.
TEST(CoreJobInterest, WhoIsToComeBackIsWaitedForEverywhere) {
  play_core(R"(
    job chunks=2 interest=wr,wr/-,wr/-,wr | hold | commit 1 ~1@2 | sends 6
    push 0 0@1=1 | run | push 0 0@2=1 | sent 0:0@1
    hold 2 | commit 2 +1.2@2 | sent-mixed 1:0@1n 0:0@2
  )");
}

// Nobody is there for whom a chunk is: it does not go past the first round of who comes.
TEST(CoreJobInterest, WhatFollowsWaitsForWhoComes) {
  play_core(R"(
    job chunks=2 mean interest=wr,-/-,wr/wr,-
    push 0,2 0@1 | run | push 0,2 0@2 | run | push 0,2 0@3 | run
    push 0,2 0@4 | run | push 0,2 0@5 | run | push 0,2 0@6 | run
    hold 7 | commit 7 -1 | run | hold 7 | commit 7 +1.2@9 | forget-posts
    # Nobody comes into what it follows to.
    hold 9 | commit 9 | sent 1:1@8 | push 1 1@9=6 | run | has 1=6/3
  )");
}

}  // namespace core_job_interest_test
}  // namespace phub::testing

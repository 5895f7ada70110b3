// Chunks that close now and are done later: a way whose results come from elsewhere, here from the
// test, in any order.
#include <gtest/gtest.h>

#include "tests/phub/core_script.h"

namespace phub::testing {
namespace core_job_pending_test {

TEST(CoreJobPending, ResultsGoOutWhenTheyAreDoneInAnyOrder) {
  play_core(R"(
    # Nothing is to be done until a result comes.
    job pending | push 0-2 0-3@1 | sent | is-pending 0 1 2 3 | sleeps
    # Its slot has been read: what is there now changes nothing, and is not counted again.
    push 1 2@1=1000 | done 2,0 | sent 0-2:2@1 0-2:0@1 | has 2=21
    # The others go on, and overtake what is pending still.
    push 0-2 2@2 | is-pending 1 2 3 | done 2 | sent 0-2:2@2 | told
    # Nobody has the result of round 1 of chunk 3 yet.
    push 0 3@2 | told violation 0 round 2
  )");
}

// Rank 1 is lost and rank 3 comes while chunk 0 is closed, chunk 1 is open, and others are not
// begun.
TEST(CoreJobPending, BoundariesAndLossesLookAtWhatIsClosed) {
  play_core(R"(
    job pending max=4 workers-own | push 0-2 0@1 | push 0,1 1@1 | is-pending 0
    # No newcomer can take part in a round that is closed; hyperparameters of what is not done are
    # needed still.
    hold 2 1 1 | commit 2 -1 +3.1@2 | last 1 1 0 0 0 | sent
    push 2 1@1 | is-pending 0 1 | done 1,0 | sent 0,2,3:1@1 0,2,3:0@1 | has 1=17 0=21
    # Round 2 waits for the newcomer.
    push 0,2 0@2 | is-pending | push 3 0@2 | run | done 0 | sent 0,2,3:0@2 | has 0=81
  )");
}

TEST(CoreJobPending, WhatIsPendingIsDoneDuringAHoldAndTheNextRoundWaits) {
  play_core(R"(
    job pending chunks=2 | push 0-2 0@1 | run | hold 2 | done 0 | sent 0-2:0@1
    # Chunk 1 is of an earlier round.
    push 0-2 0@2 1@1 | is-pending 1 | commit 2 | is-pending 0 1
    done 0,1 | sent 0-2:0@2 0-2:1@1
  )");
}

TEST(CoreJobPending, WhoTookPartIsGoneWhenTheResultComes) {
  play_core(R"(
    job pending chunks=1 ranks=0 | push 0 0@1=5 | run | hold 2 | commit 2 -0 +1.1@2 | posted
    done 0 | sent 1:0@1 | push 1 0@2=7 | run | done 0 | sent 1:0@2 | has 0=7
  )");
}

TEST(CoreJobPending, AfterANaNNothingIsFinishedAnyMore) {
  play_core(R"(
    job pending chunks=2 | push 0-2 0@1 | run | push 0 1@1=nan | push 1,2 1@1
    told nonfinite 0 chunk 0 @1 | done 0 | sent
  )");
}

}  // namespace core_job_pending_test
}  // namespace phub::testing

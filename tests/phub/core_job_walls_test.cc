// Branches on a core that is not in lock-step: a copy is a wall in the branches that it is about,
// and who waits in one branch goes on with another. (In any order of what comes: rack_sim.)
#include <gtest/gtest.h>

#include "tests/phub/core_script.h"

namespace phub {
namespace core_job_walls_test {

using testing::play_core;

TEST(CoreWalls, NobodyGetsTheLastResultBeforeAllHavePushed) {
  play_core(R"(
    job async sgd chunks=1 shelves=2 | order copy@3:0>1 swap@4:0>1 | push 0 0@1=1 | sent 0:0@1
    # Rank 0 stands before the fork.
    push 0 0@2=1 | push 1 0@1=8 | sent 1:0@1 | push 1 0@2=8 | push 2 0@1=64 | sent 2:0@1 | at 1 0=0
    # The child has all updates before its round.
    push 2 0@2=64 | sent 0-2:0@2 | at 1 0=-146 | steps 0 6
    # Behind round 3 another one runs.
    push 0-2 0@3 | sent 0-2:0@3 | has 0:0=-146 1:0=-146 2:0=-146 | push 1 0@4=8 | run | has 1:0=-154
  )");
}

TEST(CoreWalls, WhoIsLostIsNotWaitedFor) {
  play_core(R"(
    job async sgd chunks=1 shelves=2 | order copy@2:0>1 | push 0 0@1=1 | push 1 0@1=8 | sent
    hold | commit 1 -2 | sent 0,1:0@1 | at 1 0=-9
  )");
}

// By the same boundary: nobody passes the wall between the two.
TEST(CoreWalls, WhoComesAsAnotherGoesIsWaitedFor) {
  play_core(R"(
    job async sgd chunks=1 shelves=2 | order copy@3:0>1 | push 0-2 0@1=1 | run | push 0,1 0@2=8
    sends 3 | hold 2 | commit 2 -2 +2.2@2 | sent 2:0@1
    push 2 0@2=64 | sent 0-2:0@2 | at 1 0=-83
  )");
}

// Who comes while a wall is ahead of a chunk stands before it as the others do.
TEST(CoreWalls, WhoJoinsBeforeAWallGetsWhatIsBehindIt) {
  play_core(R"(
    job async sgd chunks=1 shelves=2 ranks=0,1 | order copy@2:0>1 swap@2:0>1 | push 0 0@1=1 | sent
    hold | commit 2 +2.1@2 | sent | push 1 0@1=8 | sent 0-2:0@1 | has 2:0=-9
    # The parent does not run any more.
    push 0 0@2=100 | run | at 1 0=-9
  )");
}

// Rounds 1, 4, 5 are of one branch, and 2, 3 of another: with slack 0 round 2 waits for nobody.
TEST(CoreWalls, WhoWaitsInOneBranchGoesOnWithAnother) {
  play_core(R"(
    job slack=0 sgd chunks=1 shelves=2 | shelf 0 500 | order swap@2:0>1 swap@4:0>1
    push 0 0@1=1 | sent 0:0@1 | has 0:0=500
    # Round 3 is of the branch of round 2, and round 1 is in progress.
    push 0 0@2=2 | sent | at 0 0=-1 | at 1 0=498 | steps 0 1
    push 1,2 0@1=8 | sent 1,2:0@1 | has 2:0=498 | push 1,2 0@2=16 | sent 0-2:0@2
    # Round 4 needs no more than round 1.
    push 2 0@3=32 | sent 2:0@3 | has 2:0=-17
  )");
}

TEST(CoreWalls, ABranchHasASlackOfItsOwn) {
  play_core(R"(
    job slack=3 sgd chunks=1 shelves=2 | slack 2 1 | order swap@2:0>1 | push 0-2 0@1 | sent 0-2:0@1
    # One ahead, then two.
    push 0 0@2=1 | sent 0:0@2 | push 0 0@3=1 | sent
    # There is more from round 4 on.
    slack 4 2 | slack 6 0 | order swap@6:0>1 | sent 0:0@3
  )");
}

}  // namespace core_job_walls_test
}  // namespace phub

// The place in the sequence: what is expected, what is left out, what is put in.
#include "worker/geeps/follower.h"

#include <gtest/gtest.h>

namespace phub::geeps {
namespace follower_test {

using Keys = std::vector<uint64_t>;

const Keys kAll = {0, 1, 2};
const Keys kSome = {1};

// 0 Read a, 1 PostRead, 2 Read b, 3 PostRead, 4 PreUpdate b, 5 Update, 6 clock b, 7 PreUpdate a,
// 8 Update, 9 clock a
Follower two_layers() {
  Recorder recorder({{"a", 4, false}, {"b", 4, false}});
  recorder.post_read(recorder.read(0, kAll));
  recorder.post_read(recorder.read(1, kAll));
  recorder.update(recorder.pre_update(1, kAll));
  recorder.table_clock(1);
  recorder.update(recorder.pre_update(0, kAll));
  recorder.table_clock(0);
  return Follower(recorder.finish());
}

TEST(Follower, GoesRound) {
  Follower follower = two_layers();
  for (uint64_t iteration = 0; iteration < 3; ++iteration) {
    EXPECT_EQ(follower.follow(Call::kRead, 0, kAll), iteration * 10);
    EXPECT_EQ(follower.follow(Call::kRead, 1, kAll), iteration * 10 + 2);
    EXPECT_EQ(follower.follow(Call::kPreUpdate, 1, kAll), iteration * 10 + 4);
    EXPECT_EQ(follower.clock(1), iteration * 10 + 6);
    EXPECT_EQ(follower.follow(Call::kPreUpdate, 0, kAll), iteration * 10 + 7);
    EXPECT_EQ(follower.clock(0), iteration * 10 + 9);
  }
}

TEST(Follower, WhatIsPutInLeavesThePlace) {
  Follower follower = two_layers();
  EXPECT_EQ(follower.follow(Call::kRead, 0, kAll), 0);
  EXPECT_EQ(follower.follow(Call::kRead, 0, kSome), std::nullopt);  // other keys
  EXPECT_EQ(follower.follow(Call::kRead, 1, kAll), 2);
}

TEST(Follower, TheSecondCallAfterAGapIsFoundAgain) {
  Follower follower = two_layers();
  EXPECT_EQ(follower.follow(Call::kRead, 0, kAll), 0);
  EXPECT_EQ(follower.follow(Call::kPreUpdate, 1, kAll), std::nullopt);  // Read b is left out
  EXPECT_EQ(follower.follow(Call::kPreUpdate, 0, kAll), 7);
  EXPECT_EQ(follower.follow(Call::kRead, 0, kAll), 10);
}

TEST(Follower, TheStepOfACallIsKnownWhereItIsOutsideToo) {
  Follower follower = two_layers();
  EXPECT_EQ(follower.last(), std::nullopt);
  follower.follow(Call::kRead, 0, kAll);
  EXPECT_EQ(follower.last(), 0);
  follower.follow(Call::kPreUpdate, 1, kAll);  // Read b is left out
  EXPECT_EQ(follower.last(), 4);
  follower.follow(Call::kPreUpdate, 0, kAll);
  EXPECT_EQ(follower.last(), 7);
  follower.follow(Call::kRead, 0, kSome);
  EXPECT_EQ(follower.last(), std::nullopt);
}

TEST(Follower, ClocksThatAreStillToCome) {
  Follower follower = two_layers();
  EXPECT_EQ(follower.clocks_before(0, 9), 0U);
  EXPECT_EQ(follower.clocks_before(0, 10), 1U);
  EXPECT_EQ(follower.clocks_before(0, 25), 2U);
  follower.follow(Call::kRead, 0, kAll);
  EXPECT_EQ(follower.clock(0), 9);  // early
  EXPECT_EQ(follower.clocks_before(0, 10), 0U);
  EXPECT_EQ(follower.clocks_before(0, 20), 1U);
  EXPECT_EQ(follower.clocks_before(1, 12), 1U);
}

TEST(Follower, WithoutASequenceEverythingIsOutside) {
  Follower none;
  EXPECT_EQ(none.follow(Call::kRead, 0, kAll), std::nullopt);
  EXPECT_EQ(none.clocks_before(0, 100), 0U);
}

}  // namespace follower_test
}  // namespace phub::geeps

// Which ranks are not read from for a moment.
#include "transport/tcp/in_step.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace phub {
namespace in_step_test {

constexpr uint64_t kMs = 1'000'000;

class InStepTest : public ::testing::Test {
 protected:
  // Both have delivered each millisecond for long.
  void warm_up(uint32_t first, uint32_t second) {
    for (int i = 0; i < 200; ++i) {
      now_ += kMs;
      look();
      step_.delivered(first);
      step_.delivered(second);
    }
    look();
  }
  void look() { step_.look(now_, live_); }
  void take(uint32_t qp, uint32_t gradients) {
    for (uint32_t i = 0; i < gradients; ++i) step_.took_gradient(qp);
  }

  static constexpr uint32_t kLead = 4;
  InStep step_{2, 3, kLead};  // pairs 0 to 2 are of the first queue, 3 to 5 of the second
  std::vector<uint32_t> live_ = {0, 1, 3, 4};
  uint64_t now_ = 1000 * kMs;
};

TEST_F(InStepTest, WhoIsAheadIsHeldUntilTheOthersFollow) {
  warm_up(0, 1);
  take(0, kLead);
  look();
  EXPECT_FALSE(step_.holds(0));
  take(0, 1);
  look();
  EXPECT_TRUE(step_.holds(0));
  EXPECT_FALSE(step_.holds(1));
  take(1, 1);
  look();
  EXPECT_FALSE(step_.holds(0));
  take(0, 1);
  step_.answered(0);
  step_.answered(1);
  look();
  EXPECT_TRUE(step_.holds(0)) << "an answer to all brings nobody nearer";
}

TEST_F(InStepTest, AnswersThatNoGradientWasSentForCountForNothing) {
  warm_up(0, 1);
  for (int i = 0; i < 100; ++i) step_.answered(0);
  take(0, kLead + 1);
  look();
  EXPECT_TRUE(step_.holds(0));
}

TEST_F(InStepTest, WhoStandsStillHoldsNobodyForLong) {
  warm_up(0, 1);
  take(0, 100);
  look();
  ASSERT_TRUE(step_.holds(0));
  const uint64_t wait = step_.holds_for_ns();
  EXPECT_GE(wait, 4 * kMs);
  EXPECT_LE(wait, 16 * kMs);
  now_ += wait - 1;
  look();
  EXPECT_TRUE(step_.holds(0));
  now_ += 1;
  look();
  EXPECT_FALSE(step_.holds(0));
}

TEST_F(InStepTest, WhoHasNeverDeliveredHoldsNobody) {
  look();
  step_.delivered(0);
  take(0, 100);
  now_ += kMs;
  look();
  EXPECT_FALSE(step_.holds(0));
}

// A pause of computing would otherwise be one in which the others may have to wait as long.
TEST_F(InStepTest, ALongPauseIsSoonForgotten) {
  warm_up(0, 1);
  now_ += 10'000 * kMs;
  look();
  step_.delivered(1);
  warm_up(0, 1);
  take(0, 100);
  look();
  EXPECT_LE(step_.holds_for_ns(), 16 * kMs);
}

TEST_F(InStepTest, APauseInWhichItWasHeldIsNoneOfItsOwn) {
  warm_up(0, 1);
  take(0, 100);
  look();
  ASSERT_TRUE(step_.holds(0));
  for (int i = 0; i < 45; ++i) {
    now_ += kMs;
    step_.delivered(1);
    look();
  }
  step_.delivered(0);
  for (int i = 0; i < 100; ++i) step_.answered(0);
  take(1, 100);
  look();
  EXPECT_TRUE(step_.holds(1));
  EXPECT_LE(step_.holds_for_ns(), 16 * kMs);
}

TEST_F(InStepTest, RanksOfOtherQueuesAreNotCompared) {
  warm_up(0, 3);
  take(0, 100);
  look();
  EXPECT_FALSE(step_.holds(0));
}

TEST_F(InStepTest, ANewConnectionBeginsAnew) {
  warm_up(0, 1);
  take(0, 100);
  look();
  ASSERT_TRUE(step_.holds(0));
  step_.begin(0);
  look();
  EXPECT_FALSE(step_.holds(0));
}

// Only those that are live count.
TEST_F(InStepTest, WhoHasLeftHoldsNobody) {
  warm_up(0, 1);
  take(0, 100);
  live_ = {0};
  look();
  EXPECT_FALSE(step_.holds(0));
  live_ = {0, 1};
  look();
  EXPECT_TRUE(step_.holds(0));
}

}  // namespace in_step_test
}  // namespace phub

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/zerocompute/verdict.h"

namespace phub {
namespace zerocompute_verdict_test {

using ::testing::HasSubstr;

// A round of 1000 µs in which nothing is near its limit.
Measured unlimited() {
  return {.workers = 4,
          .round_us = 1000,
          .memory_us = 200,
          .network_us = 200,
          .core_busy = {0.3, 0.3},
          .machine_busy = 0.4,
          .wakeups = 2,
          .wakeup_us = 5,
          .done_us = {900, 950, 920, 930},
          .pushed_us = {10, 12, 11, 13}};
}

double share_of(const Verdict& verdict, Bound bound) {
  for (const Share& s : verdict.shares) {
    if (s.bound == bound) return s.share;
  }
  ADD_FAILURE() << "no share of " << name_of(bound);
  return -1;
}

TEST(VerdictTest, NothingAlone) {
  const Verdict verdict = judge(unlimited());
  EXPECT_EQ(verdict.bound, Bound::kUnknown);
  EXPECT_EQ(verdict.shares.size(), 6u);
  EXPECT_DOUBLE_EQ(share_of(verdict, Bound::kMemory), 0.2);
  EXPECT_DOUBLE_EQ(share_of(verdict, Bound::kWakeups), 0.01);
  EXPECT_DOUBLE_EQ(share_of(verdict, Bound::kCores), 0.3);
  // The median of four is 925; the last is 25 behind.
  EXPECT_DOUBLE_EQ(share_of(verdict, Bound::kStraggler), 0.025);
  for (size_t i = 1; i < verdict.shares.size(); ++i) {
    EXPECT_GE(verdict.shares[i - 1].share, verdict.shares[i].share);
  }
}

TEST(VerdictTest, Memory) {
  Measured m = unlimited();
  m.memory_us = 820;
  m.machine_busy = 0.99;  // processors that wait for memory are busy
  m.core_busy = {0.99, 0.98};
  const Verdict verdict = judge(m);
  EXPECT_EQ(verdict.bound, Bound::kMemory);
  EXPECT_THAT(verdict.because, HasSubstr("82%"));
}

TEST(VerdictTest, Network) {
  Measured m = unlimited();
  m.network_us = 930;
  const Verdict verdict = judge(m);
  EXPECT_EQ(verdict.bound, Bound::kNetwork);
  EXPECT_THAT(verdict.because, HasSubstr("93%"));
}

TEST(VerdictTest, AStragglerIsNamed) {
  Measured pushing = unlimited();
  pushing.pushed_us = {10, 12, 600, 13};
  pushing.memory_us = 700;  // whatever else there is
  const Verdict verdict = judge(pushing);
  EXPECT_EQ(verdict.bound, Bound::kStraggler);
  EXPECT_THAT(verdict.because, HasSubstr("rank 2 has pushed 588 µs after"));

  Measured receiving = unlimited();
  receiving.done_us = {1300, 900, 900, 900};
  EXPECT_EQ(judge(receiving).bound, Bound::kStraggler);
  EXPECT_THAT(judge(receiving).because, HasSubstr("rank 0 has its results 400 µs after"));
}

TEST(VerdictTest, OneOfTwoRanksIsNoStraggler) {
  Measured m = unlimited();
  m.done_us = {500, 1000};
  m.pushed_us = {10, 500};
  EXPECT_EQ(judge(m).bound, Bound::kUnknown);
}

TEST(VerdictTest, WakingUpFromTheBarrierIsNoStraggler) {
  Measured m = unlimited();
  m.round_us = 100;
  m.memory_us = m.network_us = 10;
  m.pushed_us = {10, 12, 11, 55};
  m.done_us = {90, 92, 91, 93};
  EXPECT_GT(share_of(judge(m), Bound::kStraggler), 0.4);
  EXPECT_EQ(judge(m).bound, Bound::kUnknown);
  m.wakeup_us = 3;
  EXPECT_EQ(judge(m).bound, Bound::kStraggler);
}

TEST(VerdictTest, Wakeups) {
  Measured m = unlimited();
  m.wakeups = 3;
  m.wakeup_us = 200;
  const Verdict verdict = judge(m);
  EXPECT_EQ(verdict.bound, Bound::kWakeups);
  EXPECT_THAT(verdict.because, HasSubstr("3.0 wake-ups of 200.0 µs"));
  EXPECT_THAT(verdict.because, HasSubstr("60%"));
}

TEST(VerdictTest, ProcessorsOrTheServersCoresOnly) {
  Measured m = unlimited();
  m.core_busy = {0.95, 0.2, 0.2, 0.25};
  EXPECT_EQ(judge(m).bound, Bound::kCores);
  EXPECT_THAT(judge(m).because, HasSubstr("95% of a round, on average they do 40%"));
  m.machine_busy = 0.97;
  EXPECT_EQ(judge(m).bound, Bound::kProcessors) << "the machine has no others";
  EXPECT_THAT(judge(m).because, HasSubstr("97%"));
}

TEST(VerdictTest, OthersTakeTheProcessors) {
  Measured m = unlimited();
  m.core_busy = {0.4, 0.45};
  m.core_waited = {0.1, 0.5};
  const Verdict verdict = judge(m);
  EXPECT_EQ(verdict.bound, Bound::kProcessors);
  EXPECT_DOUBLE_EQ(share_of(verdict, Bound::kProcessors), 0.95);
  EXPECT_THAT(verdict.because, HasSubstr("waits for a processor for 50%"));
  m.core_busy = {0.84, 0.3};
  m.core_waited = {0.1, 0.1};
  EXPECT_EQ(judge(m).bound, Bound::kUnknown) << "hardly ever";
}

TEST(VerdictTest, WhatWasNotMeasuredDoesNotBind) {
  const Verdict verdict = judge({.workers = 2, .round_us = 100});
  EXPECT_EQ(verdict.bound, Bound::kUnknown);
  EXPECT_TRUE(verdict.shares.empty());
  EXPECT_THAT(advice(verdict.bound), HasSubstr("Measure what is missing"));
}

TEST(VerdictTest, SharesAreOfOneRound) {
  Measured m = unlimited();
  m.memory_us = 2000;  // measured in a slower moment
  EXPECT_DOUBLE_EQ(share_of(judge(m), Bound::kMemory), 1);
}

TEST(VerdictTest, EveryBoundHasItsWords) {
  for (int i = 0; i <= static_cast<int>(Bound::kUnknown); ++i) {
    const auto bound = static_cast<Bound>(i);
    EXPECT_FALSE(name_of(bound).empty());
    EXPECT_FALSE(word_of(bound).empty());
    EXPECT_GT(advice(bound).size(), 30u) << name_of(bound);
  }
}

}  // namespace zerocompute_verdict_test
}  // namespace phub

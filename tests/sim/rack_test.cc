// A thousand racks. PHUB_TEST_SCALE (a number, 1 if unset) multiplies their count.
#include "tests/sim/rack.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace phub::sim {
namespace {

uint64_t current_seed = 0;

extern "C" void on_signal(int number) {
  std::fprintf(stderr, "signal %d in seed %llu; replay: rack_sim --seed %llu --verbose\n", number,
               static_cast<unsigned long long>(current_seed),
               static_cast<unsigned long long>(current_seed));
  std::signal(number, SIG_DFL);
  std::raise(number);
}

uint64_t scaled(uint64_t count) {
  const char* text = std::getenv("PHUB_TEST_SCALE");
  const double scale = text ? std::atof(text) : 1.0;
  return std::max<uint64_t>(1, static_cast<uint64_t>(static_cast<double>(count) * scale));
}

class RackTest : public testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override {
    for (int number : {SIGABRT, SIGSEGV, SIGALRM, SIGFPE}) std::signal(number, on_signal);
  }
  void TearDown() override { alarm(0); }
  static RackResult run(uint64_t seed) {
    current_seed = seed;
    alarm(120);
    return run_rack(make_rack_plan(seed));
  }
};

// Ten batches, so that they can run beside each other.
TEST_P(RackTest, EveryContributionCountsOnceAndNobodyHangs) {
  const uint64_t count = scaled(100), first = 1 + GetParam() * count;
  RackResult all;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const RackResult result = run(seed);
    ASSERT_EQ(result.failure, "") << "seed " << seed << "; replay: rack_sim --seed " << seed
                                  << " --verbose\n"
                                  << describe(make_rack_plan(seed));
    all.observations += result.observations;
    all.admitted += result.admitted;
    all.lost += result.lost;
    all.net.breaks += result.net.breaks;
  }
  if (count < 100) return;
  // The racks are no idle ones.
  EXPECT_GT(all.observations, 100 * count);
  EXPECT_GT(all.admitted, 4 * count);
  EXPECT_GT(all.lost, count / 4);
  EXPECT_GT(all.net.breaks, count / 10);
}
INSTANTIATE_TEST_SUITE_P(Seeds, RackTest, testing::Range<uint64_t>(0, 10));

TEST_F(RackTest, TheSameSeedGivesTheSameTrace) {
  uint64_t before = 0;
  for (uint64_t seed = 1; seed <= scaled(50); ++seed) {
    const uint64_t hash = run(seed).trace_hash;
    EXPECT_EQ(run(seed).trace_hash, hash) << "seed " << seed;
    EXPECT_NE(hash, before) << "seed " << seed;
    before = hash;
  }
}

}  // namespace
}  // namespace phub::sim

// Six hundred racks and thirty jobs of learners, others in every run (scripts/proof racks and
// outer run ten thousand). PHUB_TEST_SCALE (a number, 1 if unset) multiplies their count;
// PHUB_SEED=N runs one alone, and so does rack_sim --seed N --verbose (with --outer for learners),
// which tells what happens in it.
#include "tests/sim/rack.h"

#include <gtest/gtest.h>
#include <sys/time.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <string>

#include "tests/seeds.h"

namespace phub::sim {
namespace rack_test {

uint64_t current_seed = 0;
bool current_is_outer = false;

extern "C" void on_signal(int number) {
  std::fprintf(stderr, "signal %d in seed %llu; replay: rack_sim%s --seed %llu --verbose\n", number,
               static_cast<unsigned long long>(current_seed), current_is_outer ? " --outer" : "",
               static_cast<unsigned long long>(current_seed));
  std::signal(number, SIG_DFL);
  std::raise(number);
}

class RackTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    for (int number : {SIGABRT, SIGSEGV, SIGPROF, SIGFPE}) std::signal(number, on_signal);
  }
  void TearDown() override { limit(0); }
  // So many seconds of the CPU: the machine may be busy. The largest rack takes a minute of it,
  // with sanitizers on a machine that is idle.
  static void limit(time_t seconds) {
    const itimerval timer = {.it_interval = {}, .it_value = {.tv_sec = seconds, .tv_usec = 0}};
    setitimer(ITIMER_PROF, &timer, nullptr);
  }
  static RackResult run(uint64_t seed) {
    current_seed = seed;
    current_is_outer = false;
    limit(240);
    return run_rack(make_rack_plan(seed));
  }
  static RackResult run_outer(uint64_t seed) {
    current_seed = seed;
    current_is_outer = true;
    limit(240);
    return run_rack(make_outer_plan(seed));
  }
};

// Seeds in which something was found once. Whatever changes the racks' plans changes what happens
// in them, too: they are a sample that stays.
constexpr uint64_t kKept[] = {
    1,         2,        3,         5,         8,         13,        21,        34,
    55,        89,       1016,      2796,      36284493,  355469281, 900050,    900147,
    900386,    900937,   31802,     60094,     80882,     85629,     86140,     217349620,
    249607814, 85053570, 700000087, 700001723, 800002167, 518181222, 351245713, 901000501};

void expect_success(uint64_t seed, const RackResult& result) {
  ASSERT_EQ(result.failure, "") << "seed " << seed << "; replay: rack_sim --seed " << seed
                                << " --verbose\n"
                                << describe(make_rack_plan(seed));
}

TEST_F(RackTest, SeedsThatStay) {
  for (const uint64_t seed : kKept) {
    ASSERT_NO_FATAL_FAILURE(expect_success(seed, run(seed)));
  }
}

// Three batches, so that they can run beside each other.
TEST_P(RackTest, EveryContributionCountsOnceAndNobodyHangs) {
  const testing::Seeds seeds = testing::fresh_seeds(testing::scaled(200));
  RackResult all;
  uint64_t windowed = 0;  // racks
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const RackResult result = run(seed);
    ASSERT_NO_FATAL_FAILURE(expect_success(seed, result));
    all.observations += result.observations;
    all.admitted += result.admitted;
    all.lost += result.lost;
    all.net.breaks += result.net.breaks;
    all.net.overtakes += result.net.overtakes;
    all.net.near_links += result.net.near_links;
    all.net.mixed_links += result.net.mixed_links;
    all.net.near_writes += result.net.near_writes;
    windowed += result.net.window_writes > 0;
    all.net.window_growths += result.net.window_growths;
    all.net.taken += result.net.taken;
    all.dead_devices += result.dead_devices;
    all.box_deaths += result.box_deaths;
    all.restored += result.restored;
    all.states += result.states;
    all.parts_restored += result.parts_restored;
    all.coded_jobs += result.coded_jobs;
    all.jobs_of_schedules += result.jobs_of_schedules;
    all.jobs_of_factors += result.jobs_of_factors;
    all.jobs_of_rows += result.jobs_of_rows;
    all.jobs_of_interest += result.jobs_of_interest;
    all.jobs_of_differences += result.jobs_of_differences;
    all.spread_jobs += result.spread_jobs;
    all.forks += result.forks;
    all.switches += result.switches;
    all.racked_jobs += result.racked_jobs;
    all.racks_admitted += result.racks_admitted;
    all.racks_lost += result.racks_lost;
    all.boxes_below_died += result.boxes_below_died;
    all.switched_jobs += result.switched_jobs;
    all.switch_chunks += result.switch_chunks;
    all.switch_generations += result.switch_generations;
  }
  if (seeds.count < 200) return;
  // The racks are no idle ones. (The rarest of these is in one rack of 15.)
  EXPECT_GT(all.observations, 100 * seeds.count);
  EXPECT_GT(all.admitted, 4 * seeds.count);
  EXPECT_GT(all.lost, seeds.count / 4);
  EXPECT_GT(all.net.breaks, seeds.count / 10);
  EXPECT_GT(all.net.overtakes, 100 * seeds.count);
  EXPECT_GT(all.net.near_links, seeds.count / 2);
  EXPECT_GT(all.net.mixed_links, 0u);
  EXPECT_GT(all.net.near_writes, 10 * seeds.count);
  EXPECT_GT(windowed, 0u);
  EXPECT_GT(all.net.window_growths, 0u);
  EXPECT_GT(all.net.taken, 10 * seeds.count);
  EXPECT_GT(all.dead_devices, 0u);
  EXPECT_GT(all.box_deaths, seeds.count / 10);
  EXPECT_GT(all.restored, 0u);
  EXPECT_GT(all.states, 0u);
  EXPECT_GT(all.parts_restored, 0u);
  EXPECT_GT(all.coded_jobs, 0u);
  EXPECT_GT(all.jobs_of_schedules, 0u);
  EXPECT_GT(all.jobs_of_factors, 0u);
  EXPECT_GT(all.jobs_of_rows, 0u);
  EXPECT_GT(all.jobs_of_interest, 0u);
  EXPECT_GT(all.jobs_of_differences, 0u);
  EXPECT_GT(all.spread_jobs, 0u);
  EXPECT_GT(all.forks, 0u);
  EXPECT_GT(all.switches, 0u);
  EXPECT_GT(all.racked_jobs, 0u);
  EXPECT_GT(all.racks_admitted, 0u);
  EXPECT_GT(all.switched_jobs, 0u);
  EXPECT_GT(all.switch_chunks, 0u);
}
INSTANTIATE_TEST_SUITE_P(Batch, RackTest, ::testing::Range(0, 3));

// Of learners in which something was found once.
constexpr uint64_t kKeptOuter[] = {1051, 1065, 200086, 200087};

void expect_outer_success(uint64_t seed, const RackResult& result) {
  ASSERT_EQ(result.failure, "") << "seed " << seed << "; replay: rack_sim --outer --seed " << seed
                                << " --verbose\n"
                                << describe(make_outer_plan(seed));
}

TEST_F(RackTest, LearnersAgreeAndNobodyWaitsForLongerThanTheGrace) {
  for (const uint64_t seed : kKeptOuter) {
    ASSERT_NO_FATAL_FAILURE(expect_outer_success(seed, run_outer(seed)));
  }
  const testing::Seeds seeds = testing::fresh_seeds(testing::scaled(30));
  OuterCounts all;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const RackResult result = run_outer(seed);
    ASSERT_NO_FATAL_FAILURE(expect_outer_success(seed, result));
    all.add(result.outer);
  }
  if (seeds.count < 30) return;
  EXPECT_GT(all.learners, 10 * seeds.count);
  EXPECT_GT(all.rounds, 5 * seeds.count);
  EXPECT_GT(all.sent, 100 * seeds.count);
  EXPECT_GT(all.late, 10 * seeds.count);
  EXPECT_GT(all.ended, seeds.count / 2);
  EXPECT_GT(all.partitions, seeds.count / 4);
  EXPECT_GT(all.cut_off, seeds.count / 2);
  EXPECT_GT(all.joined_again, seeds.count / 4);
  EXPECT_GT(all.waits, 100 * seeds.count);
}

TEST_F(RackTest, TheSameSeedGivesTheSameTrace) {
  const testing::Seeds seeds = testing::fresh_seeds(testing::scaled(50));
  uint64_t before = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const uint64_t hash = run(seed).trace_hash;
    EXPECT_EQ(run(seed).trace_hash, hash) << "seed " << seed;
    EXPECT_NE(hash, before) << "seed " << seed;
    before = hash;
  }
}

}  // namespace rack_test
}  // namespace phub::sim

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "bench/zerocompute/measures.h"

namespace phub {
namespace zerocompute_usage_test {

void spin_for(int64_t ns) {
  const int64_t until = own_run_ns() + ns;
  while (own_run_ns() < until) {
  }
}

TEST(UsageTest, ARunningProcessRuns) {
  const int64_t before = own_run_ns();
  spin_for(2'000'000);
  const int64_t ran = own_run_ns() - before;
  EXPECT_GE(ran, 2'000'000);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LT(own_run_ns() - before - ran, 40'000'000) << "who sleeps does not run";
}

// Others may keep the machine busier than this test does, not less.
TEST(UsageTest, AMachineIsAsBusyAsItsProcesses) {
  MachineUse machine;
  EXPECT_TRUE(std::isnan(machine.busy()));
  machine.start();
  spin_for(200'000'000);
  machine.stop();
  EXPECT_LE(machine.busy(), 1);
  EXPECT_GE(machine.busy(), 0.7 / std::thread::hardware_concurrency());
  const double spinning = machine.busy();
  // What lies between stop() and start() does not count.
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  machine.start();
  machine.stop();
  EXPECT_NEAR(machine.busy(), spinning, 0.2);
}

// Threads that are called as the server's are: in order of their numbers, not of their starts.
TEST(UsageTest, CoresAreFoundByName) {
  EXPECT_TRUE(core_times(getpid()).empty());
  std::atomic<int> ready = 0;
  std::atomic<bool> stop = false;
  std::thread busy, idle;
  idle = std::thread([&] {
    pthread_setname_np(pthread_self(), "phub-core-10");
    ++ready;
    while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  busy = std::thread([&] {
    pthread_setname_np(pthread_self(), "phub-core-9");
    spin_for(50'000'000);
    ++ready;
    while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  while (ready < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const std::vector<ThreadTimes> times = core_times(getpid());
  stop = true;
  idle.join();
  busy.join();
  ASSERT_EQ(times.size(), 2u);
  EXPECT_GT(times[0].run_ns, 10'000'000);
  EXPECT_LT(times[1].run_ns, times[0].run_ns);
}

TEST(UsageTest, NoProcessHasNoCores) { EXPECT_TRUE(core_times(-1).empty()); }

TEST(UsageTest, AWakeupTakesTime) { EXPECT_GT(measure_wakeup_us(), 0.0); }

}  // namespace zerocompute_usage_test
}  // namespace phub

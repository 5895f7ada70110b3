#include "worker/progress/spin.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>
#include <thread>

#include "worker/worker.h"

namespace phub {
namespace spin_test {

TEST(Spin, WhatTheApplicationAsksForIsDone) {
  EXPECT_EQ(spin_us_of({.asked_us = 0, .cpus = 64, .transport = "tcp"}), 0);
  EXPECT_EQ(spin_us_of({.asked_us = 7, .cpus = 1, .transport = "shm", .world_size = 9}), 7);
}

// Over shared memory all ranks and the server share the CPUs.
TEST(Spin, OverSharedMemoryTheWholeJobIsHere) {
  EXPECT_GT(spin_us_of({.cpus = 6, .transport = "shm", .world_size = 4}), 0);
  EXPECT_EQ(spin_us_of({.cpus = 5, .transport = "shm", .world_size = 4}), 0);
  EXPECT_EQ(spin_us_of({.cpus = 8, .transport = "shm", .world_size = 64}), 0);
}

// A world of 512 ranks on 64 hosts leaves a host with 96 CPUs plenty of them.
TEST(Spin, RanksOfOtherHostsTakeNoCpuOfThisOne) {
  EXPECT_GT(
      spin_us_of({.cpus = 96, .transport = "verbs", .world_size = 512, .local_world_size = 8}), 0);
  EXPECT_EQ(spin_us_of({.cpus = 8, .transport = "verbs", .world_size = 512, .local_world_size = 8}),
            0);
  EXPECT_GT(spin_us_of({.cpus = 2, .transport = "tcp", .world_size = 512}), 0) << "nobody said";
  EXPECT_EQ(spin_us_of({.cpus = 1, .transport = "tcp", .world_size = 2}), 0);
}

TEST(Spin, CpusAreThoseThatTheThreadMayRunOn) {
  std::thread([] {
    const uint32_t before = usable_cpus();
    EXPECT_GE(before, 1u);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(sched_getcpu()), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(usable_cpus(), 1u);
  }).join();
}

TEST(Spin, LaunchersSayHowManyRanksAreHere) {
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    unsetenv("LOCAL_WORLD_SIZE");
    unsetenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    EXPECT_EQ(options_from_environment().local_world_size, 0u);
    setenv(name, "8", 1);
    EXPECT_EQ(options_from_environment().local_world_size, 8u);
    setenv(name, "eight", 1);
    EXPECT_THROW(options_from_environment(), Error);
    unsetenv(name);
  }
}

}  // namespace spin_test
}  // namespace phub

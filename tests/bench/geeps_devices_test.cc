// Several devices of one process as geeps_bench trains them: that results are compared, and that a
// device that fails ends the training.
#include "bench/geeps_devices.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>

namespace phub::geeps_bench {
namespace geeps_devices_test {

Net small_net() { return part_of(alexnet(), 1 << 10); }

// Times are short: only what is computed counts.
Machine fast() { return {.flops_per_second = 1e15, .memory_bytes_per_second = 1e14}; }

TEST(GeepsDevices, ParametersAreThoseOfTheSums) {
  for (const Style& style : {Style{}, Style{.one_table = true, .whole = true}}) {
    for (const uint32_t devices : {1u, 3u}) {
      const DevicesResult result =
          train({.devices = devices, .warmup = 1, .iterations = 3}, small_net(), fast(), style);
      EXPECT_GT(result.seconds, 0);
    }
  }
}

// Before the barrier, and behind it: nobody waits for the device.
TEST(GeepsDevices, WhatADeviceThrowsEndsTheTraining) {
  for (const uint32_t at : {0u, 1u, 2u, 4u}) {
    std::atomic<uint32_t> calls = 0;
    const Devices devices{.devices = 3,
                          .warmup = 2,
                          .iterations = 3,
                          .before = [&](uint32_t device, uint32_t iteration) {
                            ++calls;
                            if (device == 1 && iteration == at)
                              throw std::runtime_error("device 1");
                          }};
    try {
      train(devices, small_net(), fast(), {});
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()), "device 1") << "iteration " << at;
    }
    EXPECT_GE(calls, at + 1);
  }
}

}  // namespace geeps_devices_test
}  // namespace phub::geeps_bench

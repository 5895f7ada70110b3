// The devices that the suite runs over.
#include <unistd.h>

#include "tests/device/device_suite.h"
#include "worker/device/cuda_device.h"
#include "worker/device/host_device.h"

namespace phub {
namespace device_test {

std::unique_ptr<Device> make_host(size_t budget) {
  return make_host_device({.budget_bytes = budget});
}

std::unique_ptr<Device> make_slow_host(size_t budget) {
  return make_host_device({.name = "slow host",
                           .budget_bytes = budget,
                           .copy_bytes_per_second = 2e9,
                           .copy_latency = std::chrono::microseconds(10),
                           .poison_copies = true});
}

std::unique_ptr<Device> make_cuda(size_t budget) {
  return make_cuda_device({.ordinal = 0, .budget_bytes = budget});
}

std::string no_cuda() {
  const CudaDevices found = cuda_devices();
  return found.devices.empty() ? "no CUDA device: " + found.none_because : "";
}

std::string nothing_missing() { return ""; }

INSTANTIATE_TEST_SUITE_P(
    Devices, DeviceSuite,
    ::testing::Values(DeviceFactory{"host", make_host, nothing_missing},
                      DeviceFactory{"slow_host", make_slow_host, nothing_missing},
                      DeviceFactory{"cuda", make_cuda, no_cuda}),
    [](const ::testing::TestParamInfo<DeviceFactory>& info) { return info.param.name; });

TEST(CudaDevices, AreThereOrSayWhyNot) {
  const CudaDevices found = cuda_devices();
  EXPECT_EQ(found.devices.empty(), !found.none_because.empty());
  EXPECT_EQ(code_of([] { make_cuda_device({.ordinal = 1000, .budget_bytes = 1}); }),
            ErrorCode::kUnavailable);
}

TEST(CudaDevices, HandOutTheirMemoryToNics) {
  if (const std::string missing = no_cuda(); !missing.empty()) GTEST_SKIP() << missing;
  const auto device = make_cuda(1 << 20);
  const DeviceMemory before(*device, 5000, "before"), memory(*device, 10000, "memory");
  device->flush_nic_writes();
  try {
    const DmaBuf handed_out = device->dma_buf(memory.data(), memory.bytes());
    EXPECT_GE(handed_out.fd.get(), 0);
    EXPECT_EQ(handed_out.offset,
              reinterpret_cast<uintptr_t>(memory.data()) % static_cast<uintptr_t>(getpagesize()));
  } catch (const Error& error) {
    ASSERT_EQ(error.code(), ErrorCode::kInvalid) << error.what();
    GTEST_SKIP() << error.what();
  }
}

}  // namespace device_test
}  // namespace phub

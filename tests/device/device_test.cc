// The devices that the suite runs over.
#include "tests/device/device_suite.h"
#include "worker/device/cuda_device.h"
#include "worker/device/host_device.h"

namespace phub {
namespace {

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
    testing::Values(DeviceFactory{"host", make_host, nothing_missing},
                    DeviceFactory{"slow_host", make_slow_host, nothing_missing},
                    DeviceFactory{"cuda", make_cuda, no_cuda}),
    [](const testing::TestParamInfo<DeviceFactory>& info) { return info.param.name; });

TEST(CudaDevices, AreThereOrSayWhyNot) {
  const CudaDevices found = cuda_devices();
  EXPECT_EQ(found.devices.empty(), !found.none_because.empty());
  EXPECT_EQ(code_of([] { make_cuda_device({.ordinal = 1000, .budget_bytes = 1}); }),
            ErrorCode::kUnavailable);
}

}  // namespace
}  // namespace phub

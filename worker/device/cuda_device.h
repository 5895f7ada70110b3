// NVIDIA GPUs: one allocation of the whole budget, streams, events and pinned memory of the CUDA
// runtime. Programs with this start without a driver; a build without nvcc has no such device.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "worker/device/device.h"

namespace phub {

struct CudaDeviceInfo {
  int ordinal = 0;
  std::string name;
  size_t memory_bytes = 0, free_bytes = 0;
  int copy_engines = 0;
};
struct CudaDevices {
  std::vector<CudaDeviceInfo> devices;
  std::string none_because;  // if there are none: why, and what to do
};
CudaDevices cuda_devices();

struct CudaDeviceOptions {
  int ordinal = 0;
  size_t budget_bytes = 0;
};
// Throws Error: kUnavailable, there is no such device; kFull, it has less free memory.
std::unique_ptr<Device> make_cuda_device(const CudaDeviceOptions& options);

}  // namespace phub

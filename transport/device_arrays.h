// A worker's gradients and results in memory of a device, which its NICs read and write themselves:
// nothing of them goes through memory of the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "transport/memory_device.h"
#include "transport/transport.h"

namespace phub {

// Both arrays of a link. They outlive what is registered of them.
class DeviceArrays {
 public:
  // Throws Error(kFull). REQUIRES: `device` outlives this.
  DeviceArrays(MemoryDevice& device, uint64_t gradients_bytes, uint64_t results_bytes);
  ~DeviceArrays();
  DeviceArrays(const DeviceArrays&) = delete;
  DeviceArrays& operator=(const DeviceArrays&) = delete;

  MemoryDevice& device() const { return device_; }
  bool in_host_memory() const { return device_.cuda_ordinal() < 0; }
  std::span<std::byte> gradients() const { return gradients_; }
  std::span<std::byte> results() const { return results_; }

 private:
  MemoryDevice& device_;
  std::span<std::byte> gradients_, results_;
};

// Of the sizes that the layout of a worker has. Null: there is no device.
std::unique_ptr<DeviceArrays> arrays_on(MemoryDevice* device, const LinkLayout& layout);

}  // namespace phub

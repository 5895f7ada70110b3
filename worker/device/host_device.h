// A device for workers without a GPU: host memory within a budget, with threads for kernels and
// copies. Copies are as fast as the machine, or slowed down to a bandwidth and a latency.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "worker/device/device.h"

namespace phub {

struct HostDeviceOptions {
  std::string name = "host";
  size_t budget_bytes = 0;
  double copy_bytes_per_second = 0;          // per direction; 0: as fast as this machine copies
  std::chrono::nanoseconds copy_latency{0};  // added to each copy
  // Poisons the destination of a copy while it is in progress, which shows reads before the event.
  // Costs a pass over the destination.
  bool poison_copies = false;
  uint32_t numa_node = 0;  // the node of the memory
  // All memory of the process counts as memory that others allocated on this device.
  bool holds_all_memory = false;
  // For tests: a driver for pin_host(), which outlives the device (null: it accepts all memory),
  // and the limit of allocate_host() (0: none).
  HostPages* pages = nullptr;
  size_t host_budget_bytes = 0;
};

class HostDevice : public Device {
 public:
  // For tests: skips `copies` copies in this direction, and lets the next one fail after `bytes`.
  enum class Direction : bool { kToHost, kToDevice };
  virtual void fail_copy(Direction direction, uint64_t copies, size_t bytes) = 0;

 protected:
  using Device::Device;
};

// Throws Error(kFull) if the memory is not available.
std::unique_ptr<HostDevice> make_host_device(const HostDeviceOptions& options);

}  // namespace phub

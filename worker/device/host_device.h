// The device of workers without a GPU: memory of this machine within a budget, kernels and copies
// in threads of their own, as fast as the machine is or slowed down to a bandwidth and a latency.
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
  std::chrono::nanoseconds copy_latency{0};  // of each copy
  // The destination of a copy is poisoned from its beginning to its end, so that a read before the
  // event is seen. Costs a pass over the destination.
  bool poison_copies = false;
  uint32_t numa_node = 0;  // where the memory comes from
  // For tests of what a GPU's driver refuses: what pin_host() asks (it outlives the device; null:
  // every memory is as good), and the most that allocate_host() gives out (0: what there is).
  HostPages* pages = nullptr;
  size_t host_budget_bytes = 0;
};

class HostDevice : public Device {
 public:
  // For tests: the copy in this direction that follows after `copies` more fails after `bytes`.
  enum class Direction : bool { kToHost, kToDevice };
  virtual void fail_copy(Direction direction, uint64_t copies, size_t bytes) = 0;

 protected:
  using Device::Device;
};

// Throws Error(kFull) where there is no such memory.
std::unique_ptr<HostDevice> make_host_device(const HostDeviceOptions& options);

}  // namespace phub

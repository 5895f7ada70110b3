// Several devices of one process behind one exchange. CPU threads sum the gradients of a key when
// the last device has pushed it, and push the sum. This is the lower level of Poseidon (001), and
// accumulation on CPUs (003, Algorithm 7); the first gradient is assigned, the others are added in
// rank order.
//
//   StandaloneExchange exchange(spec, initial);          // or WorkerExchange
//   DeviceGroup group(exchange, {.members = 2});
//   Cache first(*devices[0], group.member(0), tables), second(*devices[1], group.member(1),
//   tables);
#pragma once

#include <cstdint>
#include <memory>

#include "worker/geeps/exchange.h"

namespace phub::geeps {

struct DeviceGroupOptions {
  uint32_t members = 1;
  // Multiplies sums by float(1 / members), counting members that push null. For jobs that take the
  // mean, so that it is the mean over all devices.
  bool mean = false;
  uint32_t threads = 0;  // threads that sum; 0: two, or one if there is one CPU
};

// Factors (TableSpec::samples) are not multiplied here: those of the devices, in their order, are
// those of the process. Each has room for an equal part of the key's.
//
// Each member has its own gradient memory; all read the parameters of `downstream`, the exchange
// below. When the downstream returns a key, every member gets it. Members that push null are left
// out of the sum; if all do, the group pushes null.
//
// After an error of the downstream every call of every member throws it. The same holds for
// kRankLost, which occurs when a key waits for a member that has left. A member's rank and
// world_size count the devices of all processes, assuming that all have equally many.
class DeviceGroup {
 public:
  // From now on only the group may call push(), next() and stop() of the downstream. REQUIRES: no
  // push is in progress there; the downstream outlives this. Throws Error(kInvalid) if the
  // downstream's worker has a saver, unless there is one member: several have no common save point.
  DeviceGroup(Exchange& downstream, const DeviceGroupOptions& options);
  ~DeviceGroup();  // stops the downstream. REQUIRES: no member is in use
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  uint32_t members() const;
  Exchange& member(uint32_t i);

 private:
  class Member;
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phub::geeps

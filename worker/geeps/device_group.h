// Several devices of one process behind one exchange: their gradients are summed by threads of the
// CPU, key by key as soon as the last device has pushed, and go on as one. From Poseidon (001), the
// lower of its levels, and accumulation on CPUs (003), Algorithm 7, with the first gradient
// assigned and the others added in rank order.
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
  // Sums are multiplied by float(1 / members), members that push null included. For jobs that take
  // the mean, so that it is the mean over all devices.
  bool mean = false;
  uint32_t threads = 0;  // that sum; 0: two, or one where there is one CPU
};

// A member has gradient memory of its own; parameters are the downstream's. A key is here again for
// every member when the downstream has it again. A member that pushes null is left out of the sum;
// if all do, the group does.
//
// An error of the downstream is every member's from then on, and so is kRankLost when a key waits
// for a member that has left. A member's rank and world_size count the devices of all processes, if
// these have as many.
class DeviceGroup {
 public:
  // From now on only the group may push to the downstream or call its next() and stop().
  // REQUIRES: every key is here; the downstream outlives this.
  DeviceGroup(Exchange& downstream, const DeviceGroupOptions& options);
  ~DeviceGroup();  // stops the downstream. REQUIRES: nobody uses the members any more
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

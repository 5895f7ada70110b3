// What a call of a cache costs its caller when all rows are in device memory and nothing is
// computed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "worker/device/device.h"
#include "worker/phub.h"

namespace phub::geeps_bench {

// Microseconds of processor time of the calling thread per call.
struct CallTimes {
  double in_thread = 0;       // the caller computes in its thread; a GPU's is waited for
  double in_stream = 0;       // in a stream of the device
  double in_stream_c = 0;     // the same over the C interface
  double round_stream_c = 0;  // over it, with updates and clocks: a whole iteration's calls
};

// The same device, for C++ and for C, with this budget.
struct CallDevices {
  static constexpr uint64_t kBudget = 1 << 20;
  std::function<std::unique_ptr<Device>()> make;
  std::function<phub_code(phub_device** device)> open;
};

// Of reads and their releases, in `iterations` of eight tables of one number each.
CallTimes time_calls(uint32_t iterations, const CallDevices& devices);

// Processor time of the calling thread so far, in microseconds.
double own_processor_us();

}  // namespace phub::geeps_bench

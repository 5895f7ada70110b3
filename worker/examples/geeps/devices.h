// Makes the devices of an application, according to its options.
#pragma once

#include <cstdint>
#include <memory>

#include "worker/device/device.h"
#include "worker/examples/geeps/device_math.h"
#include "worker/examples/geeps/training.h"
#include "worker/geeps/cache.h"

namespace phub::examples {

// Members are destroyed in reverse order.
struct ComputeDevice {
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> compute;  // null: the calling thread computes
  std::unique_ptr<Math> math;
};

// The placement of a cache with these options, on a device of its budget, once an iteration has
// been recorded as `gather` says (TrainingOptions); "none": nothing is placed. Nothing is computed.
// Throws Error(kFull): the budget is too small.
geeps::Placement plan(Model& model, const geeps::CacheOptions& options, const std::string& gather);

// "64M", "35%" of the memory for everything (nothing is moved, buffers are double), or "least" of
// those with which an iteration can be gathered as the options say.
uint64_t budget_bytes(const TrainingOptions& options, const MakeModel& make);
// The number-th of this process.
ComputeDevice make_device(const TrainingOptions& options, uint32_t number, uint64_t budget_bytes);

}  // namespace phub::examples

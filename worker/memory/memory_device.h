// Checks for a worker whose gradients and parameters lie in memory of a device
// (WorkerOptions::memory_device).
#pragma once

#include <string_view>

#include "transport/memory_device.h"
#include "worker/worker.h"

namespace phub {

// Throws Error(kInvalid) if the options need the host to compute from gradients or parameters.
void check_memory_device(const WorkerOptions& options);
// Throws Error(kInvalid): this transport reads and writes memory of the host.
void check_reaches(std::string_view transport, const MemoryDevice& device);

}  // namespace phub

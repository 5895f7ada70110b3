// Starting kernels on a CUDA stream. Apart from the rest, since only this is compiled by nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "worker/device/kernel.h"

namespace phub {

// All kinds but kCopy.
cudaError_t launch_on_cuda(const Kernel& kernel, cudaStream_t stream);
// A kernel that does nothing for so long.
cudaError_t launch_sleep(uint64_t nanoseconds, cudaStream_t stream);

}  // namespace phub

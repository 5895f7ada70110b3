// Starting kernels on a CUDA stream. Apart from the rest, since only this is compiled by nvcc.
#pragma once

#include <cstdint>

#include "worker/device/kernel.h"

struct CUstream_st;  // of the CUDA runtime, whose headers not every machine has

namespace phub {

// Both answer with a cudaError_t. All kinds but kCopy:
int launch_on_cuda(const Kernel& kernel, CUstream_st* stream);
// A kernel that does nothing for so long.
int launch_sleep(uint64_t nanoseconds, CUstream_st* stream);

}  // namespace phub

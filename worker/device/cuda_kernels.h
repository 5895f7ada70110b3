// Launches kernels on a CUDA stream: the only part of the device that nvcc compiles.
#pragma once

#include <cstdint>

#include "worker/device/kernel.h"

struct CUstream_st;  // a type of the CUDA runtime, whose headers not every machine has

namespace phub {

// Both return a cudaError_t. REQUIRES: the kind is not kCopy.
int launch_on_cuda(const Kernel& kernel, CUstream_st* stream);
// For kind kEncode: launch_on_cuda() calls it. Scaled formats only.
int launch_encode(const Kernel& kernel, CUstream_st* stream);
// A kernel that sleeps for so long.
int launch_sleep(uint64_t nanoseconds, CUstream_st* stream);
// Launches every kernel with nothing to do. CUDA loads a kernel when it is first launched, and may
// wait for all streams of the device to do so: for ever, if one of them waits for the host.
int load_on_cuda(CUstream_st* stream);

}  // namespace phub

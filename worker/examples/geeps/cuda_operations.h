// Operations as CUDA kernels: the functions that cuda_math.cc calls of the part that nvcc compiles.
#pragma once

#include <cstddef>

#include "worker/examples/geeps/operations.h"

struct CUstream_st;  // a type of the CUDA runtime, whose headers not every machine has

namespace phub::examples {

// Runs the operation for every row and column, with a thread each. Returns a cudaError_t.
int launch_on_cuda(size_t rows, size_t columns, const Operation& operation, CUstream_st* stream);

}  // namespace phub::examples

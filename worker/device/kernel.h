// An operation over arrays in device memory, as plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/encode.h"
#include "kernels/kernels.h"

namespace phub {

struct Kernel {
  enum class Kind : uint8_t {
    kGather,      // to row i = from row index[i]
    kScatter,     // to row index[i] = from row i
    kScatterAdd,  // to row index[i] += from row i
    kGatherAdd,   // to row i += from row index[i]
    kAddScaled,   // to[i] += factor · from[i], two roundings
    kFill,        // to[i] = factor
    kConvert,     // to[i] = factor · from[i] in another format, as kernels::convert_scaled
    kEncode,      // slots of chunks of factor · from[i], as kernels::convert_scaled and encode
    kCopy,        // bytes
    kPoisonIf,    // bytes become poison if the number at `from`, in pinned memory, is not 0
  };
  Kind kind;
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;       // rows, elements, or (kCopy) bytes
  size_t row_floats = 0;  // gather and scatter
  const uint32_t* index = nullptr;
  float factor = 0;
  kernels::DType from_dtype = kernels::DType::kF32;
  kernels::DType to_dtype = kernels::DType::kF32;
  // kEncode. The slots of successive chunks begin chunk_bytes apart.
  float* residual = nullptr;
  size_t chunk_elements = 0;
  size_t chunk_bytes = 0;
  kernels::Rounding rounding = {};  // of the first element
};

// Runs a kernel in the calling thread, over host memory. REQUIRES: an index is inside its table,
// and arrays do not overlap.
void run_on_host(const Kernel& kernel);

}  // namespace phub

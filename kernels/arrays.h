// The arguments of kernels::optimize, the same type for every instruction set.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace phub::kernels {

struct Arrays {
  const float* g;
  float* params;
  float* state0;
  float* state1;
  size_t elements;
  void* out;
  DType out_dtype;
  Store store;
};

}  // namespace phub::kernels

// Converts between number formats and scales, in one pass.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace phub::kernels {

// to[i] = from[i] * scale, rounded once to f32 and once to `to_dtype`. A scale of 1 changes
// nothing: then it is convert().
void convert_scaled(const void* from, DType from_dtype, float scale, void* to, DType to_dtype,
                    size_t elements);

}  // namespace phub::kernels

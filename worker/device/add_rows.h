// Adds rows in host memory; compiled once per instruction set.
#pragma once

#include <cstddef>

namespace phub {

// to[i] += from[i]
void add_floats(float* to, const float* from, size_t elements);
// to[i] += factor · from[i], two roundings
void add_scaled_floats(float* to, float factor, const float* from, size_t elements);

}  // namespace phub

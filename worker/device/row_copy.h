// Copies and adds rows in host memory; compiled once per instruction set.
#pragma once

#include <cstddef>

namespace phub {

// memcpy with stores that bypass the caches, for batches larger than these. Other threads see the
// bytes after finish_streaming() and a lock.
void stream_copy(void* to, const void* from, size_t bytes);
void finish_streaming();

// to[i] += from[i]
void add_floats(float* to, const float* from, size_t elements);
// to[i] += factor · from[i], two roundings
void add_scaled_floats(float* to, float factor, const float* from, size_t elements);

}  // namespace phub

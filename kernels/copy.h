// Copies memory past the caches; compiled once per instruction set.
#pragma once

#include <cstddef>

namespace phub::kernels {

// memcpy with stores that bypass the caches: for more bytes than are read again before other data
// has displaced them. Other threads see the bytes after finish_streaming() and a lock. Any thread.
void stream_copy(void* to, const void* from, size_t bytes);
void finish_streaming();

}  // namespace phub::kernels

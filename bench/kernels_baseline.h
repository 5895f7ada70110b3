// What the kernels are compared with in kernels_bench: loops written by hand with intrinsics.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace phub::bench {

// The loop of the kernels' sum for 8 slots of f32: sums in order, times factor, finite or not.
// n must be a multiple of 64. Only for machines that have the instruction set.
using Sum8 = bool (*)(const float* const* slots, float factor, float* out, size_t n);
bool sum8_avx512(const float* const* slots, float factor, float* out, size_t n);
bool sum8_avx2(const float* const* slots, float factor, float* out, size_t n);

// A plain mix of memory accesses, with AVX-512 or else AVX2: reads every array of `reads` and
// updates every array of `updates` in place, all of n floats (a multiple of 64), with one addition
// per read. At most 8 reads and 3 updates.
void mix_streams(std::span<const float* const> reads, std::span<float* const> updates, size_t n);

bool has_avx512();
bool has_avx2();

}  // namespace phub::bench

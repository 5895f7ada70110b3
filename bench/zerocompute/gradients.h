// Gradients that are cheap to make and to check: small integers that depend on rank, round and
// element.
//
// Every element is an integer in [-8, 7], so it is the same number in f32, bf16 and f16, and sums
// over up to a million ranks are exact in f32 in any order. One 32-bit hash of (round, element)
// holds the values of eight ranks, four bits each: the sum over the ranks, which the checker needs
// for every element of every round, costs one hash per eight ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace phub {

// The gradient of one element. `element` counts through the whole model, key after key, without
// padding (modulo 2^32).
int gradient_value(uint32_t rank, uint64_t round, uint64_t element);

// Writes the gradients of elements [first, first + n) as `dtype`. `out` needs no alignment beyond
// its element's.
void fill_gradients(uint32_t rank, uint64_t round, uint64_t first, size_t n, kernels::DType dtype,
                    void* out);

// Writes the sums over ranks 0 … ranks-1 of elements [first, first + n).
void sum_of_gradients(uint32_t ranks, uint64_t round, uint64_t first, size_t n, float* out);

}  // namespace phub

// What the slots of a chunk hold, and what they add up to: an array of elements in some format
// (kernels.h), or the factors of a matrix's gradient, whose outer products it is the sum of
// (products.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/kernels.h"

namespace phub::kernels {

struct SlotShape {
  size_t elements = 0;
  DType dtype = DType::kF32;  // of the elements; factors are f32
  // Factors: of rows of so many columns, which have `elements` elements together, at most so many
  // pairs of vectors. 0: the elements themselves.
  size_t columns = 0;
  size_t rank_limit = 0;

  constexpr bool is_factors() const { return columns > 0; }
  constexpr size_t rows() const { return elements / columns; }
};

// The factors in a slot, all f32: rank_limit left vectors of `rows`, rank_limit right vectors of
// `columns`, and a uint32, of how many pairs they are; the others are not read.
constexpr size_t right_offset(const SlotShape& s) { return s.rank_limit * s.rows(); }  // in floats
constexpr size_t count_offset(const SlotShape& s) {
  return right_offset(s) + s.rank_limit * s.columns;
}

constexpr size_t slot_bytes(const SlotShape& s) {
  if (!s.is_factors()) return slot_bytes(s.dtype, s.elements);
  return count_offset(s) * sizeof(float) + sizeof(uint32_t);
}

// As sum() and find_nonfinite() of kernels.h. The sum of factors begins at +0; then each slot's
// outer products are added in the order of their pairs, as add_products() does:
//
//   out[i][j] = std::fma(left[pair][i], right[pair][j], out[i][j])
//
// A slot that says it has more pairs than rank_limit holds a NaN. A sum of finite factors that is
// too large has no slot that is to blame: find_nonfinite() returns -1.
bool sum(std::span<const void* const> slots, const SlotShape& shape, float factor, float* out);
int find_nonfinite(std::span<const void* const> slots, const SlotShape& shape);

// How many pairs a slot says it has: perhaps more than there is room for.
// REQUIRES: shape.is_factors().
uint32_t factor_pairs(const void* slot, const SlotShape& shape);
// Writes a slot: the first `pairs` left vectors, whose elements for these rows are at
// left[pair · stride], and right ones, at right[pair · columns], as pairs from `first` on. The
// number of pairs becomes first + pairs. REQUIRES: that is at most rank_limit; shape.is_factors().
void store_factors(const SlotShape& shape, const float* left, size_t stride, const float* right,
                   size_t first, size_t pairs, void* slot);

}  // namespace phub::kernels

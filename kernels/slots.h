// The content of a chunk's slots, and their sum: an array of elements in some format (kernels.h);
// or a compact form of a matrix's gradient: the factors whose outer products it is the sum of
// (products.h), or those of its rows that are not zero.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "kernels/fold.h"
#include "kernels/kernels.h"

namespace phub::kernels {

enum class SlotForm : uint8_t {
  kElements,
  kFactors,
  kRows,
  kEither,  // rows, or factors in their place: each slot says which
};

struct SlotShape {
  size_t elements = 0;
  DType dtype = DType::kF32;  // the format of the elements; factors and rows are f32
  SlotForm form = SlotForm::kElements;
  // For a matrix, whose rows have so many columns, and `elements` elements together: at most so
  // many pairs of vectors, or rows; of either form so many pairs, or all rows.
  size_t columns = 0;
  size_t limit = 0;
  Fold fold = {};  // for elements and rows: folded in place of an addition; elements are words

  constexpr size_t rows() const { return elements / columns; }
  constexpr size_t most_rows() const {  // in a slot
    return form == SlotForm::kEither ? rows() : std::min(limit, rows());
  }
};

// The factors in a slot, all f32: `limit` left vectors of `rows`, `limit` right vectors of
// `columns`, and a uint32, of how many pairs they are; the others are not read.
constexpr size_t right_offset(const SlotShape& s) { return s.limit * s.rows(); }  // in floats
constexpr size_t count_offset(const SlotShape& s) { return right_offset(s) + s.limit * s.columns; }

// The rows in a slot: a uint32, how many; then of each a uint32, which one of the matrix's it is,
// and its elements, f32. The bytes behind them are neither sent nor read.
constexpr size_t row_bytes(size_t columns) { return sizeof(uint32_t) + columns * sizeof(float); }
constexpr size_t bytes_of_rows(size_t columns, size_t rows) {
  return sizeof(uint32_t) + rows * row_bytes(columns);
}

// Of either form: rows as above; or kPairs + a number of pairs, so many left vectors, and so many
// right ones.
inline constexpr uint32_t kPairs = uint32_t{1} << 31;
// What is sent of such a slot, or of rows, whose first number this is.
constexpr size_t bytes_behind(uint32_t first, size_t rows, size_t columns) {
  if ((first & kPairs) == 0) return bytes_of_rows(columns, first);
  return sizeof first + (first - kPairs) * (rows + columns) * sizeof(float);
}

// The size of a slot.
constexpr size_t slot_bytes(const SlotShape& s) {
  switch (s.form) {
    case SlotForm::kFactors:
      return count_offset(s) * sizeof(float) + sizeof(uint32_t);
    case SlotForm::kRows:
      return bytes_of_rows(s.columns, s.most_rows());
    case SlotForm::kEither:
      return std::max(bytes_of_rows(s.columns, s.rows()),
                      bytes_behind(kPairs + static_cast<uint32_t>(s.limit), s.rows(), s.columns));
    case SlotForm::kElements:
      break;
  }
  return slot_bytes(s.dtype, s.elements);
}

// They do what sum() and find_nonfinite() of kernels.h do. The sum of factors begins at +0; then
// each slot's outer products are added in the order of their pairs, as add_products() does:
//
//   out[i][j] = std::fma(left[pair][i], right[pair][j], out[i][j])
//
// Each row is the sum of those slots that have it, as if it were a chunk by itself of which the
// others were null: the first is assigned, and a row that no slot has is +0. But where some slot of
// either form has factors, the sum begins at +0, and each slot's rows or outer products are added.
//
// A slot that says it has more pairs or rows than there is room for, or a row that the matrix does
// not have, holds a NaN. A sum of finite factors that is too large has no slot that is to blame:
// find_nonfinite() returns -1.
//
// With a fold, out begins with its identity, and each slot's elements, or rows, are folded into it,
// in this order; there is no factor. It does not look at the values: it returns true, also if a
// slot has rows that it cannot have, of which none counts.
bool sum(std::span<const void* const> slots, const SlotShape& shape, float factor, float* out);
int find_nonfinite(std::span<const void* const> slots, const SlotShape& shape);

// Does what sum() does with each slot's values times its weight: every slot's sum alone is
// multiplied, with one rounding, and these are added in this order. Where no slot has a row, it is
// +0. `weights` are of the slots; `scratch` has room for the elements. REQUIRES: there is no fold.
bool weighted_sum(std::span<const void* const> slots, std::span<const float> weights,
                  const SlotShape& shape, float factor, float* scratch, float* out);

// The pairs of a slot: left[pair · rows], right[pair · columns]. None, of a slot of either form
// that has rows. `fits` is false, and there are none, if it says that it has more than there is
// room for. REQUIRES: shape.form is kFactors or kEither.
struct PairsOfSlot {
  const float* left = nullptr;
  const float* right = nullptr;
  size_t count = 0;
  bool fits = true;
};
PairsOfSlot pairs_of(const void* slot, const SlotShape& shape);
// Before store_factors() of so many pairs altogether. REQUIRES: there is room for them.
void clear_factors(const SlotShape& shape, size_t pairs, void* slot);
// Writes a slot: the first `pairs` left vectors, whose elements for these rows are at
// left[pair · stride], and right ones, at right[pair · columns], as pairs from `first` on. The
// number of pairs becomes first + pairs; of either form it is that of clear_factors().
// REQUIRES: there is room; shape.form is kFactors or kEither.
void store_factors(const SlotShape& shape, const float* left, size_t stride, const float* right,
                   size_t first, size_t pairs, void* slot);

// The number of rows that a slot says it has: perhaps more than there is room for.
inline uint32_t row_count(const void* slot) {
  uint32_t count = 0;
  std::memcpy(&count, slot, sizeof count);
  return count;
}
void clear_rows(void* slot);
// Adds a row's elements to those of the latest row, or folds them, if that is the same one, or else
// puts them behind it.
// REQUIRES: there is room; shape.form is kRows.
void append_row(const SlotShape& shape, uint32_t row, const float* elements, void* slot);

// Calls visit(row, elements) for the rows of a slot that the matrix has. False: the slot says that
// it has others, or more than there is room for, of which none is visited.
template <typename Visit>
bool for_each_row(const void* slot, const SlotShape& shape, Visit visit) {
  const uint32_t count = row_count(slot);
  if (count > shape.most_rows()) return false;
  bool all = true;
  const auto* at = static_cast<const std::byte*>(slot) + sizeof count;
  for (uint32_t i = 0; i < count; ++i, at += row_bytes(shape.columns)) {
    uint32_t row = 0;
    std::memcpy(&row, at, sizeof row);
    if (row < shape.rows()) {
      visit(size_t{row}, reinterpret_cast<const float*>(at + sizeof row));
    } else {
      all = false;
    }
  }
  return all;
}

}  // namespace phub::kernels

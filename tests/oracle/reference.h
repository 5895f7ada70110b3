// What the kernels must compute, one element at a time: the oracle of the tests and of everyone who
// checks a whole run against a single process. It takes its types from kernels/kernels.h and shares
// no code with it.
//
// Every NaN that is written is the canonical one (0x7FC00000 and its bf16 and f16 counterparts).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace phub::reference {

using kernels::DType;
using kernels::Hyper;
using kernels::Optimizer;

// One element of an array in some number format. store rounds to nearest even.
float load(const void* array, DType type, size_t index);
void store(void* array, DType type, size_t index, float value);

// n elements from one format to another.
void convert(const void* from, DType from_type, void* to, DType to_type, size_t n);

// out[i] = ((slots[0][i] + slots[1][i]) + …) · factor. Ranks that are absent or null are simply not
// in the list. True if all results are finite. No slots give zeros.
bool sum(std::span<const void* const> slots, DType type, float factor, float* out, size_t n);

// A slot that holds at most so many pairs of vectors: left ones of `rows`, then right ones of
// `columns` floats, then a uint32, how many there are.
struct Factors {
  size_t rows = 0, columns = 0, pairs = 0;

  size_t floats() const { return pairs * (rows + columns) + 1; }
  uint32_t count(const void* slot) const;
  void set_count(void* slot, uint32_t count) const;
  float* left(void* slot, size_t pair) const { return static_cast<float*>(slot) + pair * rows; }
  float* right(void* slot, size_t pair) const {
    return static_cast<float*>(slot) + pairs * rows + pair * columns;
  }
};
// Goes on with a sum of outer products: element `i` of the matrix, by std::fma.
float add_pairs(const Factors& factors, const void* slot, size_t i, float sum);
// Whether all that are there are finite numbers, and there are not too many.
bool is_finite(const Factors& factors, const void* slot);

// A slot that holds at most so many rows: a uint32, how many there are, then of each a uint32,
// which one it is, and `columns` floats. Where there may be pairs: or 2^31 + their number, the left
// vectors, and the right ones.
struct Rows {
  size_t rows = 0, columns = 0, limit = 0;  // of the matrix; in a slot
  size_t pairs = 0;                         // at most, in place of rows

  size_t bytes() const {
    return 4 + 4 * std::max(std::min(rows, limit) * (1 + columns), pairs * (rows + columns));
  }
  uint32_t count(const void* slot) const;  // of rows
  bool has_pairs(const void* slot) const;
  Factors factors_in(const void* slot) const;  // of its pairs, which begin at the second float
  // Writes the first `count` pairs of such a slot.
  void set_pairs(void* slot, const Factors& from, const void* pairs, uint32_t count) const;
  void set_count(void* slot, uint32_t count) const;
  uint32_t row(const void* slot, size_t i) const;
  void set_row(void* slot, size_t i, uint32_t row) const;
  float* elements(void* slot, size_t i) const {
    return static_cast<float*>(slot) + 2 + i * (1 + columns);
  }
  const float* elements(const void* slot, size_t i) const {
    return static_cast<const float*>(slot) + 2 + i * (1 + columns);
  }
  bool has(const void* slot, size_t row) const;
};
// Whether all that are there are rows of finite numbers, and there are not too many.
bool is_finite(const Rows& rows, const void* slot);

// Of a gradient: element i adds its square to lane i mod 16, and the lanes are added in order.
double sum_of_squares(std::span<const float> gradient);

// What a gradient is multiplied by, so that its norm is max_norm at most: torch's clip_grad_norm_.
// 0: none.
float clip_factor(double max_norm, double norm);

// Step number t (from 1) of an optimizer: updates params and state in place. With Optimizer::kNone
// the parameters become the gradient. Unused state may be null. `trust`: see trust_ratio().
void step(Optimizer optimizer, const Hyper& hyper, uint64_t t, const float* gradient, float* params,
          float* state0, float* state1, size_t n, float trust = 1);

// Whether the optimizer multiplies the step of each key by a trust ratio: lars, lamb.
bool has_trust(Optimizer optimizer);
// What the ratio is made of, of a part of a key: the sums of the squares of the parameters before
// that step, and of the gradient (lars) or of the update with its decay (lamb). Those of the key
// are the roots of the sums over its parts.
struct Norms {
  double parameters = 0, update = 0;
};
Norms squares(Optimizer optimizer, const Hyper& hyper, uint64_t t, std::span<const float> gradient,
              std::span<const float> params, std::span<const float> state0,
              std::span<const float> state1);
// REQUIRES: the norms are of the whole key. 1: the key's step is as it is.
float trust_ratio(Optimizer optimizer, const Hyper& hyper, const Norms& norms);

// `lr` in a round, from 1, after its warm-up and its schedules.
double learning_rate(const Hyper& hyper, uint64_t round);

// A flat model with its optimizer: what one process that trains alone keeps.
struct Model {
  Model(Optimizer optimizer, const Hyper& hyper, std::vector<float> initial);

  // One round: the sum of the slots in their order, times factor, then the next step.
  void round(std::span<const void* const> slots, DType type, float factor);
  void step(std::span<const float> gradient, float trust = 1);
  void round_states();  // to what it keeps

  Optimizer optimizer;
  Hyper hyper;          // may be changed between rounds
  bool state8 = false;  // states are kept in 8 bits (state8.h)
  uint64_t steps = 0;
  std::vector<float> params, state0, state1;
};

}  // namespace phub::reference

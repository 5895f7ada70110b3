// Optimizers whose step of a key needs all of its gradient at once, Adafactor and Muon. The step
// has two halves: step_of_key() makes a direction and the new state of the whole key, and
// apply_direction() moves the parameters, piece by piece.
//
// Adafactor: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost
// (2018), algorithms 4 and 5, with the numbers of torch.optim.Adafactor. Muon: Jordan, Muon: An
// optimizer for hidden layers in neural networks (2024), with the numbers of torch.optim.Muon.
// Elements are rounded as there, with foreach=False; sums over rows, columns and keys are in
// double, in a fixed order. Muon's products are in f32, which are in bfloat16 there.
//
// Plain functions, no state, any thread. The same bits on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/kernels.h"

namespace phub::kernels {

// Whether the optimizer has such steps.
bool takes_whole_keys(Optimizer o);

// How a key is stepped.
enum class KeyRule : uint8_t {
  kElements,    // by optimize(): its elements need nothing of each other
  kFactored,    // Adafactor, with means of rows and columns
  kVariance,    // Adafactor, with a second moment of every element
  kOrthogonal,  // Muon
};

struct WholeKey {
  KeyRule rule = KeyRule::kElements;
  // So many matrices, one after another, each row after row.
  size_t matrices = 1, rows = 1, columns = 1;

  size_t elements() const { return matrices * rows * columns; }
};

// The rule of a key with this shape; an empty one is [elements]. Adafactor factors the matrices of
// the last two dimensions, if neither is 1. Muon steps keys with two dimensions, unless `ns_steps`
// is 0; the others have steps of AdamW.
WholeKey whole_key(Optimizer o, const Hyper& h, std::span<const uint64_t> shape, uint64_t elements);

// How many floats a key has in state array `array`, from 0: at most its elements. A factored key
// has the means of its rows, matrix after matrix, then those of its columns. REQUIRES: the array is
// one of state_arrays().
size_t state_elements(const WholeKey& key, size_t array);

// The floats that step_of_key() needs beside the gradient.
size_t scratch_elements(const WholeKey& key);

// The multiplications of a step of Muon, which take most of its time; 0 for other rules.
double products_of(const WholeKey& key, const Hyper& h);

// What apply_direction() does: params = params · decay + direction · scale, two roundings for each
// sum.
struct KeyStep {
  float decay = 1, scale = 0;
};

// Makes step number t (from 1). `gradient` has all elements of the key, and becomes the direction.
// `squares` is the sum of the squares of its parameters, in double; only Adafactor looks at it.
// `state` is the state before the step, in array 0, and `new_state` gets the one after it; they do
// not overlap. `scratch` has scratch_elements(). REQUIRES: key.rule is not kElements.
KeyStep step_of_key(const WholeKey& key, const Hyper& h, uint64_t t, double squares,
                    const float* state, float* gradient, float* new_state, float* scratch);

// Every NaN that is written is 0x7FC00000.
void apply_direction(const KeyStep& step, const float* direction, float* params, size_t elements);

// An approximation of U·Vᵀ, where U·S·Vᵀ is the singular value decomposition of the matrix: its
// singular values become about 1 (0.7 to 1.2). In place. So many steps of the quintic Newton–Schulz
// iteration: X = a·X + (b·A + c·A·A)·X with A = X·Xᵀ, where the shorter side of X is its rows,
// after X is divided by its Frobenius norm, or by `eps` if that is larger. An element of a product
// is a chain of std::fma in ascending order from +0 (products.h). `scratch`: scratch_elements() of
// a key that is kOrthogonal.
void orthogonalize(float* matrix, size_t rows, size_t columns, uint32_t steps, double eps,
                   float* scratch);

}  // namespace phub::kernels

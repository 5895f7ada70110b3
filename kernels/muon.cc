// Muon. All products are add_products(), which goes on with a sum: it is called for some samples at
// a time, whose factors stay in the cache.
#include <algorithm>
#include <cmath>

#include "kernels/products.h"
#include "kernels/whole_steps.h"

namespace phub::kernels {
namespace {

// The coefficients of Jordan's iteration.
constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;

// out = leftᵀ · right. `left` is samples × rows, `right` samples × columns.
void multiply(const float* left, const float* right, size_t samples, size_t rows, size_t columns,
              float* out) {
  constexpr size_t kTogether = 64;
  std::fill_n(out, rows * columns, 0.0f);
  for (size_t first = 0; first < samples; first += kTogether) {
    add_products(left + first * rows, right + first * columns, std::min(kTogether, samples - first),
                 rows, columns, out);
  }
}

// In squares that stay in the cache.
void transpose(const float* from, size_t rows, size_t columns, float* to) {
  constexpr size_t kSide = 16;
  for (size_t row = 0; row < rows; row += kSide) {
    const size_t rows_end = std::min(rows, row + kSide);
    for (size_t column = 0; column < columns; column += kSide) {
      const size_t columns_end = std::min(columns, column + kSide);
      for (size_t r = row; r < rows_end; ++r) {
        for (size_t c = column; c < columns_end; ++c) to[c * rows + r] = from[r * columns + c];
      }
    }
  }
}

// x = kA·x + (kB·A + kC·A·A)·x, where A = x·xᵀ. `x` is rows × columns; `other` has its size, `gram`
// and `polynomial` that of A.
void iterate(float* x, size_t rows, size_t columns, float* other, float* gram, float* polynomial) {
  transpose(x, rows, columns, other);
  multiply(other, other, columns, rows, rows, gram);
  multiply(gram, gram, rows, rows, rows, polynomial);  // A is symmetric, and so is what follows
  for (size_t i = 0; i < rows * rows; ++i) {
    const float linear = kB * gram[i];
    const float square = kC * polynomial[i];
    polynomial[i] = linear + square;
  }
  multiply(polynomial, x, rows, rows, columns, other);
  for (size_t i = 0; i < rows * columns; ++i) {
    const float kept = kA * x[i];
    x[i] = kept + other[i];
  }
}

}  // namespace

void orthogonalize(float* matrix, size_t rows, size_t columns, uint32_t steps, double eps,
                   float* scratch) {
  const size_t elements = rows * columns;
  const double norm = std::sqrt(sum_of_squares(matrix, elements));
  const auto divisor = static_cast<float>(norm < eps ? eps : norm);
  for (size_t i = 0; i < elements; ++i) matrix[i] = matrix[i] / divisor;
  const bool is_tall = rows > columns;
  const size_t shorter = std::min(rows, columns), longer = std::max(rows, columns);
  float* const turned = scratch;
  float* const other = is_tall ? matrix : turned;
  float* const x = is_tall ? turned : matrix;
  float* const gram = scratch + elements;
  float* const polynomial = gram + shorter * shorter;
  if (is_tall) transpose(matrix, rows, columns, turned);
  for (uint32_t step = 0; step < steps; ++step) {
    iterate(x, shorter, longer, other, gram, polynomial);
  }
  if (is_tall) transpose(turned, columns, rows, matrix);
}

KeyStep muon_step(const WholeKey& key, const Hyper& h, const float* state, float* gradient,
                  float* new_state, float* scratch) {
  const auto weight = static_cast<float>(1 - h.momentum), back = static_cast<float>(h.momentum);
  for (size_t i = 0; i < key.elements(); ++i) {
    new_state[i] = lerp(state[i], gradient[i], weight);
    gradient[i] = h.nesterov != 0 ? lerp(gradient[i], new_state[i], back) : new_state[i];
  }
  orthogonalize(gradient, key.rows, key.columns, static_cast<uint32_t>(h.ns_steps), h.eps, scratch);
  const auto rows = static_cast<double>(key.rows), columns = static_cast<double>(key.columns);
  const double ratio = h.match_rms != 0 ? 0.2 * std::sqrt(std::max(rows, columns))
                                        : std::sqrt(std::max(1.0, rows / columns));
  return {.decay = static_cast<float>(1 - h.lr * h.weight_decay),
          .scale = static_cast<float>(-(h.lr * ratio))};
}

}  // namespace phub::kernels

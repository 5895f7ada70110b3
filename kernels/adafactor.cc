// Adafactor. Sums are in double: of a row's squares as in sum_of_squares(), of a column's and of
// the means of rows one after another.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/whole_steps.h"

namespace phub::kernels {
namespace {

// The numbers of one step.
struct Numbers {
  float weight;        // of the new squares
  float least;         // that a mean of rows is
  float least_square;  // that an estimate is
};

// std::max, but a NaN stays one.
float at_least(float x, float least) { return x < least ? least : x; }

// The rows' means, then the columns', of one matrix.
void blend_means(const WholeKey& key, const Numbers& numbers, const float* gradient,
                 const float* row_means, const float* column_means, float* new_rows,
                 float* new_columns) {
  for (size_t row = 0; row < key.rows; ++row) {
    const double squares = sum_of_squares(gradient + row * key.columns, key.columns);
    const auto mean = static_cast<float>(squares / static_cast<double>(key.columns));
    new_rows[row] = lerp(row_means[row], mean, numbers.weight);
  }
  std::array<double, 256> sums;
  for (size_t first = 0; first < key.columns; first += sums.size()) {
    const size_t count = std::min(sums.size(), key.columns - first);
    std::fill_n(sums.begin(), count, 0.0);
    for (size_t row = 0; row < key.rows; ++row) {
      const float* const at = gradient + row * key.columns + first;
      for (size_t i = 0; i < count; ++i) sums[i] += double{at[i]} * double{at[i]};
    }
    for (size_t i = 0; i < count; ++i) {
      const auto mean = static_cast<float>(sums[i] / static_cast<double>(key.rows));
      new_columns[first + i] = lerp(column_means[first + i], mean, numbers.weight);
    }
  }
}

float update_of(float estimate, float gradient, const Numbers& numbers) {
  return 1.0f / std::sqrt(at_least(estimate, numbers.least_square)) * gradient;
}

void make_factored(const WholeKey& key, const Numbers& numbers, const float* state, float* gradient,
                   float* new_state) {
  const size_t all_rows = key.matrices * key.rows;
  for (size_t matrix = 0; matrix < key.matrices; ++matrix) {
    float* const elements = gradient + matrix * key.rows * key.columns;
    const size_t rows_at = matrix * key.rows, columns_at = all_rows + matrix * key.columns;
    float* const rows = new_state + rows_at;
    float* const columns = new_state + columns_at;
    blend_means(key, numbers, elements, state + rows_at, state + columns_at, rows, columns);
    double sum = 0;
    for (size_t row = 0; row < key.rows; ++row) sum += rows[row];
    const float mean =
        at_least(static_cast<float>(sum / static_cast<double>(key.rows)), numbers.least);
    for (size_t row = 0; row < key.rows; ++row) {
      float* const at = elements + row * key.columns;
      for (size_t i = 0; i < key.columns; ++i) {
        at[i] = update_of(rows[row] * columns[i] / mean, at[i], numbers);
      }
    }
  }
}

void make_variance(const WholeKey& key, const Numbers& numbers, const float* state, float* gradient,
                   float* new_state) {
  for (size_t i = 0; i < key.elements(); ++i) {
    new_state[i] = lerp(state[i], gradient[i] * gradient[i], numbers.weight);
    gradient[i] = update_of(new_state[i], gradient[i], numbers);
  }
}

}  // namespace

KeyStep adafactor_step(const WholeKey& key, const Hyper& h, uint64_t t, double squares,
                       const float* state, float* gradient, float* new_state) {
  const auto steps = static_cast<double>(t);
  const Numbers numbers = {.weight = static_cast<float>(std::pow(steps, -h.beta2_power)),
                           .least = static_cast<float>(h.eps),
                           .least_square = static_cast<float>(h.eps * h.eps)};
  if (key.rule == KeyRule::kFactored) {
    make_factored(key, numbers, state, gradient, new_state);
  } else {
    make_variance(key, numbers, state, gradient, new_state);
  }
  // As Python's max(): of a NaN it is the first.
  const double root = std::sqrt(static_cast<double>(key.elements()));
  const double size = std::sqrt(squares) / root;
  const double update = std::sqrt(sum_of_squares(gradient, key.elements()));
  const double over = update / (root * h.clip_threshold);
  const double rate = (size > h.eps2 ? size : h.eps2) * std::min(h.lr, 1 / std::sqrt(steps));
  return {.decay = static_cast<float>(1 - h.lr * h.weight_decay),
          .scale = static_cast<float>(-rate / (over > 1 ? over : 1))};
}

}  // namespace phub::kernels

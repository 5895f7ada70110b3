#include "tests/oracle/whole_steps.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace phub::reference {
namespace {

float one_nan(float x) { return std::isnan(x) ? std::bit_cast<float>(0x7FC00000u) : x; }

float lerp_to(float start, float end, float weight) {
  const float distance = end - start;
  if (weight < 0.5f) {
    const float forward = weight * distance;
    return one_nan(start + forward);
  }
  const float back = distance * (1.0f - weight);
  return one_nan(end - back);
}

bool is_factored(std::span<const uint64_t> shape) {
  return shape.size() >= 2 && shape.back() > 1 && shape[shape.size() - 2] > 1;
}

// [i][j] = the sum over k of a[i][k] · b[k][j], from 0 upwards in k, by fma.
std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b, size_t rows,
                           size_t inner, size_t columns) {
  std::vector<float> out(rows * columns);
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) {
      float sum = 0;
      for (size_t k = 0; k < inner; ++k) sum = std::fma(a[i * inner + k], b[k * columns + j], sum);
      out[i * columns + j] = sum;
    }
  }
  return out;
}

std::vector<float> turned(const std::vector<float>& a, size_t rows, size_t columns) {
  std::vector<float> out(a.size());
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) out[j * rows + i] = a[i * columns + j];
  }
  return out;
}

// Divides by the root of an estimate of its square.
float scaled(float gradient, float estimate, const Hyper& h) {
  const float least = float(h.eps * h.eps);
  const float root = std::sqrt(estimate < least ? least : estimate);
  const float reciprocal = 1.0f / root;
  return reciprocal * gradient;
}

void adafactor_matrix(const Hyper& h, float weight, size_t rows, size_t columns, float* g,
                      float* row_var, float* column_var) {
  for (size_t i = 0; i < rows; ++i) {
    const double sum = sum_of_squares({g + i * columns, columns});
    row_var[i] = lerp_to(row_var[i], float(sum / double(columns)), weight);
  }
  for (size_t j = 0; j < columns; ++j) {
    double sum = 0;
    for (size_t i = 0; i < rows; ++i) {
      const double x = g[i * columns + j];
      sum += x * x;
    }
    column_var[j] = lerp_to(column_var[j], float(sum / double(rows)), weight);
  }
  double all = 0;
  for (size_t i = 0; i < rows; ++i) all += row_var[i];
  float mean = float(all / double(rows));
  if (mean < float(h.eps)) mean = float(h.eps);
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) {
      const float outer = row_var[i] * column_var[j];
      g[i * columns + j] = scaled(g[i * columns + j], outer / mean, h);
    }
  }
}

void adafactor_step(const Hyper& h, uint64_t t, std::span<const uint64_t> shape, double squares,
                    WholeStep& step) {
  std::vector<float>& g = step.direction;
  const float weight = float(std::pow(double(t), -h.beta2_power));
  if (is_factored(shape)) {
    const size_t rows = shape[shape.size() - 2], columns = shape.back();
    const size_t matrices = g.size() / rows / columns;
    for (size_t m = 0; m < matrices; ++m) {
      adafactor_matrix(h, weight, rows, columns, &g[m * rows * columns], &step.state[m * rows],
                       &step.state[matrices * rows + m * columns]);
    }
  } else {
    for (size_t i = 0; i < g.size(); ++i) {
      step.state[i] = lerp_to(step.state[i], g[i] * g[i], weight);
      g[i] = scaled(g[i], step.state[i], h);
    }
  }
  const double root = std::sqrt(double(g.size()));
  double denominator = std::sqrt(sum_of_squares(g)) / (root * h.clip_threshold);
  if (!(denominator > 1)) denominator = 1;
  double size = std::sqrt(squares) / root;
  if (!(size > h.eps2)) size = h.eps2;
  const double rate = size * std::min(h.lr, 1.0 / std::sqrt(double(t)));
  step.scale = float(-rate / denominator);
}

void muon_step(const Hyper& h, std::span<const uint64_t> shape, WholeStep& step) {
  for (size_t i = 0; i < step.direction.size(); ++i) {
    float& g = step.direction[i];
    step.state[i] = lerp_to(step.state[i], g, float(1.0 - h.momentum));
    g = h.nesterov != 0 ? lerp_to(g, step.state[i], float(h.momentum)) : step.state[i];
  }
  step.direction =
      orthogonal(std::move(step.direction), shape[0], shape[1], int(h.ns_steps), h.eps);
  const double rows = double(shape[0]), columns = double(shape[1]);
  const double ratio = h.match_rms != 0 ? 0.2 * std::sqrt(std::max(rows, columns))
                                        : std::sqrt(std::max(1.0, rows / columns));
  step.scale = float(-(h.lr * ratio));
}

}  // namespace

bool steps_whole(Optimizer optimizer, const Hyper& hyper, std::span<const uint64_t> shape) {
  if (optimizer == Optimizer::kMuon) return shape.size() == 2 && hyper.ns_steps > 0;
  return optimizer == Optimizer::kAdafactor;
}

size_t elements_with_state(Optimizer optimizer, const Hyper& hyper, std::span<const uint64_t> shape,
                           size_t elements, size_t array) {
  if (!steps_whole(optimizer, hyper, shape)) return elements;
  if (array > 0) return 0;
  if (optimizer == Optimizer::kMuon || !is_factored(shape)) return elements;
  return elements / shape.back() + elements / shape[shape.size() - 2];
}

float WholeStep::apply(float parameter, size_t element) const {
  const float kept = parameter * decay;
  const float moved = scale * direction[element];
  return one_nan(kept + moved);
}

WholeStep whole_step(Optimizer optimizer, const Hyper& hyper, uint64_t t,
                     std::span<const uint64_t> shape, std::vector<float> gradient, double squares,
                     std::vector<float> state) {
  WholeStep step{.direction = std::move(gradient), .state = std::move(state)};
  step.decay = float(1.0 - hyper.lr * hyper.weight_decay);
  if (optimizer == Optimizer::kMuon) {
    muon_step(hyper, shape, step);
  } else {
    adafactor_step(hyper, t, shape, squares, step);
  }
  return step;
}

std::vector<float> orthogonal(std::vector<float> matrix, size_t rows, size_t columns, int steps,
                              double eps) {
  const double norm = std::sqrt(sum_of_squares(matrix));
  for (float& x : matrix) x = x / float(norm < eps ? eps : norm);
  const bool is_tall = rows > columns;
  std::vector<float> x = is_tall ? turned(matrix, rows, columns) : matrix;
  const size_t shorter = std::min(rows, columns), longer = std::max(rows, columns);
  for (int step = 0; step < steps; ++step) {
    const auto gram = product(x, turned(x, shorter, longer), shorter, longer, shorter);
    auto update = product(gram, gram, shorter, shorter, shorter);
    for (size_t i = 0; i < update.size(); ++i) {
      const float linear = -4.7750f * gram[i];
      const float square = 2.0315f * update[i];
      update[i] = linear + square;
    }
    const auto moved = product(update, x, shorter, shorter, longer);
    for (size_t i = 0; i < x.size(); ++i) {
      const float kept = 3.4445f * x[i];
      x[i] = kept + moved[i];
    }
  }
  return is_tall ? turned(x, shorter, longer) : x;
}

}  // namespace phub::reference

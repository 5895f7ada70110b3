#include "tests/oracle/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "tests/oracle/state8.h"

namespace phub::reference {
namespace {

// A binary floating-point format of 16 bits, by its definition: a value is
// fraction · 2^(exponent − fraction_bits), rounded to the nearest, even in a tie.
struct Format {
  int fraction_bits;
  int min_exponent;  // of normal numbers
  int max_exponent;
};
constexpr Format kBF16 = {7, -126, 127};
constexpr Format kF16 = {10, -14, 15};

uint16_t infinity(const Format& f) {
  return static_cast<uint16_t>((f.max_exponent - f.min_exponent + 2) << f.fraction_bits);
}

float decode(const Format& f, uint16_t bits) {
  const int magnitude = bits & 0x7FFF;
  const int one = 1 << f.fraction_bits;
  float value;
  if (magnitude > infinity(f)) {
    return std::bit_cast<float>(0x7FC00000u);
  } else if (magnitude == infinity(f)) {
    value = std::numeric_limits<float>::infinity();
  } else if (magnitude < one) {
    value = std::ldexp(static_cast<float>(magnitude), f.min_exponent - f.fraction_bits);
  } else {
    const int exponent = magnitude / one - 1 + f.min_exponent;
    value = std::ldexp(static_cast<float>(one + magnitude % one), exponent - f.fraction_bits);
  }
  return std::copysign(value, bits & 0x8000 ? -1.0f : 1.0f);
}

uint16_t encode(const Format& f, float value) {
  if (std::isnan(value)) return infinity(f) | (1 << (f.fraction_bits - 1));
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(value)) return sign | infinity(f);
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), f.min_exponent);
  if (exponent > f.max_exponent) return sign | infinity(f);
  // In units of the last place. Carrying into the next exponent, or to infinity, is an addition.
  const double units = std::nearbyint(std::ldexp(magnitude, f.fraction_bits - exponent));
  const int biased = exponent - f.min_exponent;
  return sign | static_cast<uint16_t>((biased << f.fraction_bits) + static_cast<int>(units));
}

float canonical(float value) {
  return std::isnan(value) ? std::bit_cast<float>(0x7FC00000u) : value;
}

// One parameter's update. The names are those of PyTorch's functional optimizers.
struct Element {
  float& param;
  float& state0;
  float& state1;
};

void sgd(const Hyper& h, float grad, Element e) { e.param = e.param + float(-h.lr) * grad; }

void momentum(const Hyper& h, bool first, bool nesterov, float grad, Element e) {
  const float mu = float(h.momentum);
  const float one_minus_dampening = nesterov ? 1.0f : float(1.0 - h.dampening);
  if (first) {
    e.state0 = grad;
  } else {
    const float kept = mu * e.state0;
    const float added = one_minus_dampening * grad;
    e.state0 = kept + added;
  }
  if (nesterov) {
    const float ahead = mu * e.state0;
    sgd(h, grad + ahead, e);
  } else {
    sgd(h, e.state0, e);
  }
}

float lerp(float start, float end, float weight) {
  const float distance = end - start;
  if (weight < 0.5f) {
    const float forward = weight * distance;
    return start + forward;
  }
  const float back = distance * (1.0f - weight);
  return end - back;
}

void adam(const Hyper& h, uint64_t t, float grad, Element e) {
  const double bias_correction1 = 1.0 - std::pow(h.beta1, double(t));
  const double bias_correction2 = 1.0 - std::pow(h.beta2, double(t));
  const double step_size = h.lr / bias_correction1;
  e.state0 = lerp(e.state0, grad, float(1.0 - h.beta1));
  const float kept_square = float(h.beta2) * e.state1;
  const float scaled = float(1.0 - h.beta2) * grad;
  const float added_square = scaled * grad;
  e.state1 = kept_square + added_square;
  const float root = std::sqrt(e.state1);
  const float corrected = root / float(std::sqrt(bias_correction2));
  const float denom = corrected + float(h.eps);
  const float numerator = float(-step_size) * e.state0;
  e.param = e.param + numerator / denom;
}

void sparse_adam(const Hyper& h, uint64_t t, float grad, Element e) {
  const double bias_correction1 = 1.0 - std::pow(h.beta1, double(t));
  const double bias_correction2 = 1.0 - std::pow(h.beta2, double(t));
  const double step_size = h.lr * std::sqrt(bias_correction2) / bias_correction1;
  const float change = (grad - e.state0) * float(1.0 - h.beta1);
  const float square = grad * grad;
  const float change_of_square = (square - e.state1) * float(1.0 - h.beta2);
  e.state0 = e.state0 + change;
  e.state1 = e.state1 + change_of_square;
  const float ratio = e.state0 / (std::sqrt(e.state1) + float(h.eps));
  const float step = float(-step_size) * ratio;
  e.param = e.param + step;
}

void adagrad(const Hyper& h, uint64_t t, float grad, Element e) {
  const double clr = h.lr / (1.0 + (double(t) - 1.0) * h.lr_decay);
  const float square = grad * grad;
  e.state0 = e.state0 + square;
  const float std_dev = std::sqrt(e.state0) + float(h.eps);
  const float numerator = float(-clr) * grad;
  e.param = e.param + numerator / std_dev;
}

void adadelta(const Hyper& h, float grad, Element e) {
  const auto blend = [&h](float mean, float x) {
    const float kept = float(h.rho) * mean;
    const float scaled = float(1.0 - h.rho) * x;
    const float added = scaled * x;
    return kept + added;
  };
  e.state0 = blend(e.state0, grad);
  const float std_dev = std::sqrt(e.state0 + float(h.eps));
  const float ratio = std::sqrt(e.state1 + float(h.eps)) / std_dev;
  const float delta = ratio * grad;
  e.state1 = blend(e.state1, delta);
  sgd(h, delta, e);
}

void rmsprop(const Hyper& h, float grad, Element e) {
  const float kept = float(h.alpha) * e.state0;
  const float scaled = float(1.0 - h.alpha) * grad;
  const float added = scaled * grad;
  e.state0 = kept + added;
  const float avg = std::sqrt(e.state0) + float(h.eps);
  if (h.rmsprop_momentum > 0) {
    const float kept_buffer = float(h.rmsprop_momentum) * e.state1;
    e.state1 = kept_buffer + grad / avg;
    sgd(h, e.state1, e);
  } else {
    const float numerator = float(-h.lr) * grad;
    e.param = e.param + numerator / avg;
  }
}

void lion(const Hyper& h, float grad, Element e) {
  const auto blend = [&](double beta) {
    const float kept = float(beta) * e.state0;
    const float added = float(1.0 - beta) * grad;
    return kept + added;
  };
  const float mean = blend(h.beta1);
  if (mean > 0) e.param = e.param + float(-h.lr);
  if (mean < 0) e.param = e.param - float(-h.lr);
  e.state0 = blend(h.beta2);
}

void lars(const Hyper& h, bool first, float grad, float trust, Element e) {
  const float scaled = grad * trust;
  const float kept = float(h.momentum) * e.state0;
  e.state0 = first ? scaled : kept + scaled;
  sgd(h, e.state0, e);
}

// The update before the rate and the ratio; the moments become those of the step.
float lamb_update(const Hyper& h, uint64_t t, float grad, Element e) {
  const float kept = float(h.beta1) * e.state0;
  const float added = float(1.0 - h.beta1) * grad;
  e.state0 = kept + added;
  const float kept_square = float(h.beta2) * e.state1;
  const float scaled = float(1.0 - h.beta2) * grad;
  const float added_square = scaled * grad;
  e.state1 = kept_square + added_square;
  const double bias_correction1 = 1.0 - std::pow(h.beta1, double(t));
  const double bias_correction2 = 1.0 - std::pow(h.beta2, double(t));
  const float root = std::sqrt(e.state1) / float(std::sqrt(bias_correction2));
  const float update = (e.state0 / float(bias_correction1)) / (root + float(h.eps));
  if (h.weight_decay == 0) return update;
  const float decay = float(h.weight_decay) * e.param;
  return update + decay;
}

void update(Optimizer optimizer, const Hyper& h, uint64_t t, float trust, float grad, Element e) {
  if (optimizer == Optimizer::kNone) {
    e.param = grad;
    return;
  }
  if (optimizer == Optimizer::kLamb) {
    const float step = lamb_update(h, t, grad, e) * trust;
    return sgd(h, step, e);
  }
  if (optimizer == Optimizer::kAdamW || optimizer == Optimizer::kLion ||
      optimizer == Optimizer::kMuon) {
    e.param = e.param * float(1.0 - h.lr * h.weight_decay);
  } else if (h.weight_decay != 0) {
    const float decay = float(h.weight_decay) * e.param;
    grad = grad + decay;
  }
  switch (optimizer) {
    case Optimizer::kSgd:
      return sgd(h, grad, e);
    case Optimizer::kMomentum:
      return momentum(h, t == 1, false, grad, e);
    case Optimizer::kNesterov:
      return momentum(h, t == 1, true, grad, e);
    case Optimizer::kAdam:
    case Optimizer::kAdamW:
    case Optimizer::kMuon:  // of a key that is no matrix
      return adam(h, t, grad, e);
    case Optimizer::kSparseAdam:
      return sparse_adam(h, t, grad, e);
    case Optimizer::kAdagrad:
      return adagrad(h, t, grad, e);
    case Optimizer::kAdadelta:
      return adadelta(h, grad, e);
    case Optimizer::kRmsprop:
      return rmsprop(h, grad, e);
    case Optimizer::kLion:
      return lion(h, grad, e);
    case Optimizer::kLars:
      return lars(h, t == 1, grad, trust, e);
    case Optimizer::kLamb:
    case Optimizer::kNone:
    case Optimizer::kFold:       // folds.h
    case Optimizer::kAdafactor:  // whole_steps.h
      break;
  }
}

}  // namespace

float load(const void* array, DType type, size_t index) {
  if (type == DType::kF32) return canonical(static_cast<const float*>(array)[index]);
  return decode(type == DType::kBF16 ? kBF16 : kF16, static_cast<const uint16_t*>(array)[index]);
}

void store(void* array, DType type, size_t index, float value) {
  if (type == DType::kF32) {
    static_cast<float*>(array)[index] = canonical(value);
  } else {
    static_cast<uint16_t*>(array)[index] = encode(type == DType::kBF16 ? kBF16 : kF16, value);
  }
}

void convert(const void* from, DType from_type, void* to, DType to_type, size_t n) {
  for (size_t i = 0; i < n; ++i) store(to, to_type, i, load(from, from_type, i));
}

bool sum(std::span<const void* const> slots, DType type, float factor, float* out, size_t n) {
  bool finite = true;
  for (size_t i = 0; i < n; ++i) {
    float total = slots.empty() ? 0.0f : load(slots[0], type, i);
    for (size_t s = 1; s < slots.size(); ++s) total = total + load(slots[s], type, i);
    out[i] = canonical(total * factor);
    finite = finite && std::isfinite(out[i]);
  }
  return finite;
}

double learning_rate(const Hyper& h, uint64_t round) {
  double n = double(round) - 1.0 + h.lr_rounds_before;
  if (n < 0) n = 0;
  if (n < h.lr_warmup) {
    return h.lr * (h.lr_warmup_from + (1.0 - h.lr_warmup_from) * (n / h.lr_warmup));
  }
  n = n - h.lr_warmup;
  double rate = h.lr;
  if (h.lr_exponential != 1) rate = rate * std::pow(h.lr_exponential, n);
  if (h.lr_inverse != 0) rate = rate * std::pow(1.0 + h.lr_inverse * n, -h.lr_inverse_power);
  if (h.lr_polynomial != 0) {
    const double left = n < h.lr_polynomial ? 1.0 - n / h.lr_polynomial : 0.0;
    rate = rate * (h.lr_end + (1.0 - h.lr_end) * std::pow(left, h.lr_polynomial_power));
  }
  if (h.lr_cosine != 0) {
    const double part = n < h.lr_cosine ? n / h.lr_cosine : 1.0;
    const double height = (1.0 + std::cos(std::acos(-1.0) * part)) / 2.0;
    rate = rate * (h.lr_end + (1.0 - h.lr_end) * height);
  }
  return std::isfinite(rate) ? rate : 0.0;
}

uint32_t Factors::count(const void* slot) const {
  uint32_t count = 0;
  std::memcpy(&count, static_cast<const float*>(slot) + floats() - 1, sizeof count);
  return count;
}

void Factors::set_count(void* slot, uint32_t count) const {
  std::memcpy(static_cast<float*>(slot) + floats() - 1, &count, sizeof count);
}

float add_pairs(const Factors& factors, const void* slot, size_t i, float sum) {
  const auto* left = static_cast<const float*>(slot) + i / factors.columns;
  const auto* right =
      static_cast<const float*>(slot) + factors.pairs * factors.rows + i % factors.columns;
  for (uint32_t pair = 0; pair < factors.count(slot); ++pair) {
    sum = std::fma(left[pair * factors.rows], right[pair * factors.columns], sum);
  }
  return sum;
}

bool is_finite(const Factors& factors, const void* slot) {
  const auto* all = static_cast<const float*>(slot);
  const auto* right = all + factors.pairs * factors.rows;
  const size_t count = factors.count(slot);
  bool finite = count <= factors.pairs;
  for (size_t i = 0; finite && i < count * factors.rows; ++i) finite = std::isfinite(all[i]);
  for (size_t i = 0; finite && i < count * factors.columns; ++i) finite = std::isfinite(right[i]);
  return finite;
}

uint32_t Rows::count(const void* slot) const {
  uint32_t count = 0;
  std::memcpy(&count, slot, sizeof count);
  return has_pairs(slot) ? 0 : count;
}

bool Rows::has_pairs(const void* slot) const {
  uint32_t count = 0;
  std::memcpy(&count, slot, sizeof count);
  return pairs > 0 && count >= 0x8000'0000u;
}

Factors Rows::factors_in(const void* slot) const {
  uint32_t count = 0;
  std::memcpy(&count, slot, sizeof count);
  return {rows, columns, has_pairs(slot) ? count - 0x8000'0000u : 0};
}

void Rows::set_pairs(void* slot, const Factors& from, const void* given, uint32_t count) const {
  const uint32_t first = 0x8000'0000u + count;
  std::memcpy(slot, &first, sizeof first);
  auto* to = static_cast<float*>(slot) + 1;
  const auto* all = static_cast<const float*>(given);
  to = std::copy_n(all, count * rows, to);
  std::copy_n(all + from.pairs * rows, count * columns, to);
}

void Rows::set_count(void* slot, uint32_t count) const { std::memcpy(slot, &count, sizeof count); }

uint32_t Rows::row(const void* slot, size_t i) const {
  uint32_t row = 0;
  std::memcpy(&row, elements(slot, i) - 1, sizeof row);
  return row;
}

void Rows::set_row(void* slot, size_t i, uint32_t row) const {
  std::memcpy(elements(slot, i) - 1, &row, sizeof row);
}

bool Rows::has(const void* slot, size_t which) const {
  for (size_t i = 0; i < count(slot); ++i) {
    if (row(slot, i) == which) return true;
  }
  return false;
}

bool is_finite(const Rows& rows, const void* slot) {
  const Factors factors = rows.factors_in(slot);
  if (factors.pairs > rows.pairs) return false;
  const auto* all = static_cast<const float*>(slot) + 1;
  for (size_t i = 0; i < factors.pairs * (rows.rows + rows.columns); ++i) {
    if (!std::isfinite(all[i])) return false;
  }
  const size_t count = rows.count(slot);
  if (count > std::min(rows.rows, rows.limit)) return false;
  for (size_t i = 0; i < count; ++i) {
    if (rows.row(slot, i) >= rows.rows) return false;
    for (size_t j = 0; j < rows.columns; ++j) {
      if (!std::isfinite(rows.elements(slot, i)[j])) return false;
    }
  }
  return true;
}

double sum_of_squares(std::span<const float> gradient) {
  double total = 0;
  for (size_t lane = 0; lane < 16; ++lane) {
    double sum = 0;
    for (size_t i = lane; i < gradient.size(); i += 16) {
      const double value = gradient[i];
      const double square = value * value;
      sum = sum + square;
    }
    total = total + sum;
  }
  return total;
}

float clip_factor(double max_norm, double norm) {
  if (max_norm == 0) return 1;
  const double factor = max_norm / (norm + 1e-6);
  if (std::isnan(factor)) return std::numeric_limits<float>::quiet_NaN();
  return static_cast<float>(std::min(factor, 1.0));
}

void step(Optimizer optimizer, const Hyper& hyper, uint64_t t, const float* gradient, float* params,
          float* state0, float* state1, size_t n, float trust) {
  if (t == 0) throw std::invalid_argument("reference::step: steps are numbered from 1");
  for (size_t i = 0; i < n; ++i) {
    float unused0 = 0, unused1 = 0;
    float& s0 = state0 != nullptr ? state0[i] : unused0;
    float& s1 = state1 != nullptr ? state1[i] : unused1;
    update(optimizer, hyper, t, trust, gradient[i], {params[i], s0, s1});
    params[i] = canonical(params[i]);
    s0 = canonical(s0);
    s1 = canonical(s1);
  }
}

bool has_trust(Optimizer optimizer) {
  return optimizer == Optimizer::kLars || optimizer == Optimizer::kLamb;
}

Norms squares(Optimizer optimizer, const Hyper& hyper, uint64_t t, std::span<const float> gradient,
              std::span<const float> params, std::span<const float> state0,
              std::span<const float> state1) {
  std::vector<float> compared(gradient.begin(), gradient.end());
  for (size_t i = 0; optimizer == Optimizer::kLamb && i < compared.size(); ++i) {
    float param = params[i], s0 = state0[i], s1 = state1[i];
    compared[i] = lamb_update(hyper, t, gradient[i], {param, s0, s1});
  }
  return {sum_of_squares(params), sum_of_squares(compared)};
}

float trust_ratio(Optimizer optimizer, const Hyper& hyper, const Norms& norms) {
  if (!has_trust(optimizer) || (hyper.weight_decay == 0 && hyper.always_adapt == 0)) return 1;
  const double p = norms.parameters, u = norms.update;
  if (p == 0 || u == 0 || std::isnan(p) || std::isnan(u)) return 1;
  const double ratio = optimizer == Optimizer::kLamb
                           ? p / u
                           : hyper.trust_coeff * p / (u + hyper.weight_decay * p + hyper.eps);
  constexpr float kMost = std::numeric_limits<float>::max();
  return ratio > double{kMost} ? kMost : static_cast<float>(ratio);
}

Model::Model(Optimizer o, const Hyper& h, std::vector<float> initial)
    : optimizer(o), hyper(h), params(std::move(initial)) {
  state0.resize(params.size());
  state1.resize(params.size());
}

void Model::round(std::span<const void* const> slots, DType type, float factor) {
  std::vector<float> gradient(params.size());
  reference::sum(slots, type, factor, gradient.data(), gradient.size());
  step(gradient);
}

void Model::step(std::span<const float> gradient, float trust) {
  if (gradient.size() != params.size()) {
    throw std::invalid_argument("reference::Model::step: gradient and parameters differ in size");
  }
  reference::step(optimizer, hyper, ++steps, gradient.data(), params.data(), state0.data(),
                  state1.data(), params.size(), trust);
  round_states();
}

void Model::round_states() {
  if (!state8) return;
  round_state(state0, is_signed_state(optimizer, 0));
  round_state(state1, is_signed_state(optimizer, 1));
}

}  // namespace phub::reference

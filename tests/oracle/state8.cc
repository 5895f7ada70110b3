#include "tests/oracle/state8.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace phub::reference {
namespace {

constexpr size_t kStateElements = 256;

// To 12 bits.
double to_12_bits(double value) {
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 12)), exponent - 12);
}

// The means of neighbors in an even division of [0.1, 1], in each of 7 decades.
std::vector<double> make_state_values(bool is_signed) {
  std::vector<double> values = {0};
  for (int decade = 0; decade < 7; ++decade) {
    const int count = (is_signed ? 1 : 2) << decade;
    for (int i = 0; i < count; ++i) {
      const double below = 0.1 + 0.9 * i / count, above = 0.1 + 0.9 * (i + 1) / count;
      values.push_back(to_12_bits(std::pow(10.0, decade - 6) * ((below + above) / 2)));
    }
  }
  if (is_signed) {
    values.back() = 1;
    for (size_t i = 0; i < 128; ++i) values.push_back(-values[i]);
  } else {
    values.push_back(1);
  }
  return values;
}

uint8_t state_code_of(float value, bool is_signed) {
  const std::vector<double>& values = state_values(is_signed);
  const double magnitude = is_signed ? std::fabs(value) : std::max(double{value}, 0.0);
  size_t best = 0;
  for (size_t code = 1; code < (is_signed ? 128u : 256u); ++code) {
    if (std::fabs(values[code] - magnitude) <= std::fabs(values[best] - magnitude)) best = code;
  }
  if (!is_signed && best == 0 && magnitude >= std::ldexp(1.0, -141)) best = 1;
  return static_cast<uint8_t>(best + (is_signed && std::signbit(value) ? 128 : 0));
}

}  // namespace

const std::vector<double>& state_values(bool is_signed) {
  static const std::vector<double> with_signs = make_state_values(true),
                                   without = make_state_values(false);
  return is_signed ? with_signs : without;
}

StateCodes encode_state(std::span<const float> state, bool is_signed) {
  StateCodes to;
  for (; !state.empty(); state = state.subspan(std::min(kStateElements, state.size()))) {
    const auto block = state.first(std::min(kStateElements, state.size()));
    float scale = 0;
    bool finite = true;
    for (const float x : block) {
      if (!is_signed && std::signbit(x)) continue;
      if (!std::isfinite(x)) finite = false;
      scale = std::max(scale, std::fabs(x));
    }
    if (scale < 0x1p-100f) scale = 0;
    if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
    to.scales.push_back(scale);
    for (const float x : block) {
      const float inverse = 1 / scale;
      to.codes.push_back(scale > 0 ? state_code_of(x * inverse, is_signed) : 0);
    }
  }
  return to;
}

std::vector<float> decode_state(const StateCodes& from, bool is_signed) {
  std::vector<float> state;
  for (const uint8_t code : from.codes) {
    const float scale = from.scales[state.size() / kStateElements];
    const auto value = static_cast<float>(state_values(is_signed)[code]);
    state.push_back(std::isnan(scale) ? scale : value * scale);
  }
  return state;
}

bool is_signed_state(kernels::Optimizer optimizer, size_t array) {
  switch (optimizer) {
    case kernels::Optimizer::kMomentum:
    case kernels::Optimizer::kNesterov:
    case kernels::Optimizer::kAdam:
    case kernels::Optimizer::kAdamW:
    case kernels::Optimizer::kSparseAdam:
    case kernels::Optimizer::kLion:
      return array == 0;
    case kernels::Optimizer::kRmsprop:
      return array == 1;
    default:
      return false;
  }
}

void round_state(std::vector<float>& state, bool is_signed) {
  state = decode_state(encode_state(state, is_signed), is_signed);
}

}  // namespace phub::reference

#include "tests/oracle/state8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace phub::reference {
namespace {

constexpr size_t kStateElements = 256;

// A straight piece of a map, from (x0, y0) to (x1, y1).
struct Piece {
  double x0, x1, y0, y1;
  float at(float x) const {
    const double slope = (y1 - y0) / (x1 - x0);
    const float product = static_cast<float>(slope) * x;
    if (y1 == 1) return product + (1 - static_cast<float>(slope) * static_cast<float>(x1));
    return product + static_cast<float>(y0 - x0 * slope);
  }
};

// From codes to values. Each has twice the codes of the one before, and reaches ten times as far.
std::vector<Piece> pieces_of(bool is_signed) {
  constexpr double kReach[] = {0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1};
  std::vector<Piece> pieces;
  int codes = is_signed ? 1 : 2, all = 0;
  for (size_t i = 0; i < 7; ++i, all += codes, codes *= 2) {
    pieces.push_back({double(all), double(all + codes), kReach[i], kReach[i + 1]});
  }
  return pieces;
}

float value_of_code(int code, bool is_signed) {
  for (const Piece& piece : pieces_of(is_signed)) {
    if (code <= piece.x1) return piece.at(static_cast<float>(code));
  }
  return 0;
}

float number_of(float magnitude, bool is_signed) {
  for (const auto& [x0, x1, y0, y1] : pieces_of(is_signed)) {
    const bool is_last = y1 == 1;
    if (is_last || magnitude <= static_cast<float>(y1)) return Piece{y0, y1, x0, x1}.at(magnitude);
  }
  return 0;
}

uint8_t state_code_of(float value, bool is_signed) {
  const float magnitude = is_signed ? std::fabs(value) : std::signbit(value) ? 0.0f : value;
  uint32_t hash = std::bit_cast<uint32_t>(magnitude) * 2654435761u;
  hash = (hash ^ hash / 32768) * 2246822519u;
  const float share = (2 * static_cast<float>(hash / 4194304) + 1) / 2048;
  float code = std::floor(number_of(magnitude, is_signed) + share);
  if (!is_signed && magnitude > 0) code = std::max(code, 1.0f);
  return static_cast<uint8_t>(static_cast<int>(code) +
                              (is_signed && std::signbit(value) ? 128 : 0));
}

// An infinite one becomes the largest of its sign.
float finite(float x) {
  return std::isinf(x) ? std::copysign(std::numeric_limits<float>::max(), x) : x;
}

}  // namespace

const std::vector<float>& state_values(bool is_signed) {
  static const auto make = [](bool signs) {
    std::vector<float> values;
    for (int code = 0; code < (signs ? 128 : 255); ++code) {
      values.push_back(value_of_code(code, signs));
    }
    for (int code = 0; signs && code < 128; ++code) values.push_back(-values[code]);
    return values;
  };
  static const std::vector<float> with_signs = make(true), without = make(false);
  return is_signed ? with_signs : without;
}

StateCodes encode_state(std::span<const float> state, bool is_signed) {
  StateCodes to;
  for (; !state.empty(); state = state.subspan(std::min(kStateElements, state.size()))) {
    const auto block = state.first(std::min(kStateElements, state.size()));
    float scale = 0;
    bool nan = false;
    for (const float x : block) {
      if (!is_signed && std::signbit(x)) continue;
      if (std::isnan(x)) nan = true;
      scale = std::max(scale, finite(std::fabs(x)));
    }
    if (scale < 0x1p-100f) scale = 0;
    if (nan) scale = std::numeric_limits<float>::quiet_NaN();
    to.scales.push_back(scale);
    for (const float x : block) {
      const float inverse = 1 / scale;
      to.codes.push_back(scale > 0 ? state_code_of(finite(x) * inverse, is_signed) : 0);
    }
  }
  return to;
}

std::vector<float> decode_state(const StateCodes& from, bool is_signed) {
  std::vector<float> state;
  for (const uint8_t code : from.codes) {
    const float scale = from.scales[state.size() / kStateElements];
    const float value = state_values(is_signed)[code];
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
    case kernels::Optimizer::kLars:
    case kernels::Optimizer::kLamb:
    case kernels::Optimizer::kMuon:
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

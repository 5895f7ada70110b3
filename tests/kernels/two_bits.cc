#include "tests/kernels/two_bits.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include "tests/kernels/slots.h"

namespace phub::reference {
namespace {

constexpr std::array<uint8_t, 4> kNoLevels = {0xC0, 0x7F, 0xC0, 0x7F};

size_t bytes_of_codes(size_t entries) {
  size_t bytes = 0;
  while (bytes * 4 < entries) bytes += 4;
  return bytes;
}

float float_of(const uint8_t* bf16) {
  return std::bit_cast<float>(static_cast<uint32_t>(bf16[0] << 16 | bf16[1] << 24));
}

// All finite bf16 that are not negative are in the order of their bits: the last one up to the
// magnitude, counted from below.
uint32_t bf16_up_to(double magnitude) {
  uint32_t low = 0, high = 0x7F80;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (std::bit_cast<float>(middle << 16) <= magnitude ? low : high) = middle;
  }
  return low;
}

double value_of_bf16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

uint32_t bf16_from(double magnitude) {
  const uint32_t below = bf16_up_to(magnitude);
  return value_of_bf16(below) < magnitude && below < 0x7F7F ? below + 1 : below;
}

uint32_t nearest_bf16(float magnitude) {
  const uint32_t below = bf16_up_to(magnitude), above = below + 1;
  if (above == 0x7F80) return below;
  const double from_below = magnitude - value_of_bf16(below);
  const double from_above = value_of_bf16(above) - magnitude;
  if (from_below == from_above) return below % 2 == 0 ? below : above;
  return from_below < from_above ? below : above;
}

float mean(const std::vector<float>& magnitudes) {
  const double sum = std::accumulate(magnitudes.begin(), magnitudes.end(), 0.0);
  return static_cast<float>(sum / static_cast<double>(magnitudes.size()));
}

struct TwoLevels {
  uint32_t low, high;
};
TwoLevels levels_of(const std::vector<float>& magnitudes, bool stochastic) {
  if (magnitudes.empty()) return {0, 0};
  const auto [smallest, largest] = std::ranges::minmax(magnitudes);
  if (stochastic) return {bf16_up_to(smallest), bf16_from(largest)};
  std::vector<float> lower, others;
  for (const float m : magnitudes) {
    const bool is_lower = smallest == 0 ? m == 0 : m - smallest <= largest - m;
    (is_lower ? lower : others).push_back(m);
  }
  const uint32_t low = nearest_bf16(mean(lower));
  return {low, others.empty() ? low : nearest_bf16(mean(others))};
}

}  // namespace

void encode_two_bits(std::span<const float> x, bool finite, const kernels::Rounding& rounding,
                     std::span<const size_t> elements, uint8_t* to) {
  std::vector<float> magnitudes;
  for (const float v : x) magnitudes.push_back(std::fabs(v));
  uint8_t* const behind = to + bytes_of_codes(x.size());
  if (!finite) {
    std::ranges::copy(kNoLevels, behind);
  } else {
    const TwoLevels levels = levels_of(magnitudes, rounding.stochastic);
    for (size_t byte = 0; byte < 2; ++byte) {
      behind[byte] = static_cast<uint8_t>(levels.low >> 8 * byte);
      behind[2 + byte] = static_cast<uint8_t>(levels.high >> 8 * byte);
    }
  }
  const float low = float_of(behind), high = float_of(behind + 2);
  for (size_t i = 0; i < x.size(); ++i) {
    uint32_t code = std::signbit(x[i]) ? 2 : 0;
    if (finite && low != high) {
      const float place = std::min(std::max((magnitudes[i] - low) / (high - low), 0.0f), 1.0f);
      const uint32_t upper24 = random_of(rounding, elements[i]) >> 8;
      const bool up = rounding.stochastic ? std::ldexp(double(upper24), -24) < place : place > 0.5f;
      if (up) code += 1;
    }
    to[i / 4] |= static_cast<uint8_t>(code << (i % 4 * 2));
  }
}

float value_of_two_bits(const uint8_t* from, size_t i, size_t entries) {
  const uint8_t* const levels = from + bytes_of_codes(entries);
  const uint32_t code = from[i / 4] >> (i % 4 * 2) & 3;
  const float magnitude = float_of(code % 2 == 1 ? levels + 2 : levels);
  return code >= 2 ? -magnitude : magnitude;
}

}  // namespace phub::reference

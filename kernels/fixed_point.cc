#include "kernels/fixed_point.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/kernels.h"

namespace phub::kernels {
namespace {

constexpr uint32_t kFractionBits = 23;
constexpr int kBias = 127;
constexpr int kLeastExponent = -126, kMostExponent = 106;
constexpr int kMostShift = 23;  // of which nothing is left

bool is_within(int32_t code) { return code >= -kLargestCode - 1 && code <= kLargestCode; }

}  // namespace

int exponent_of(const void* slot, size_t elements) {
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const std::byte*>(slot) + scale_offset(DType::kInt32, elements),
              sizeof bits);
  if (bits == 0) return kExponentOfZero;
  const int exponent = static_cast<int>(bits >> kFractionBits) - kBias;
  const bool is_power = bits << (32 - kFractionBits) == 0 && bits >> kFractionBits != 0;
  return is_power && exponent <= kMostExponent ? exponent : kExponentOfNaN;
}

void align(const void* slot, size_t elements, int exponent, size_t first,
           std::span<int32_t> codes) {
  const size_t count = std::min(codes.size(), elements - first);
  std::fill(codes.begin() + static_cast<ptrdiff_t>(count), codes.end(), 0);
  std::memcpy(codes.data(), static_cast<const std::byte*>(slot) + first * sizeof(int32_t),
              count * sizeof(int32_t));
  const int own = exponent_of(slot, elements);
  if (own == kExponentOfZero) return void(std::ranges::fill(codes, 0));
  const int shift = std::min(exponent - own, kMostShift);
  if (shift == 0) return;
  const int32_t half = 1 << (shift - 1);
  for (int32_t& code : codes.first(count)) {
    if (is_within(code)) code = (code + half) >> shift;
  }
}

bool from_fixed_point(std::span<const int32_t> sums, int exponent, float factor, float* out) {
  if (exponent == kExponentOfZero) return std::fill_n(out, sums.size(), 0.0f), true;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (exponent < kLeastExponent || exponent > kMostExponent) {
    return std::fill_n(out, sums.size(), nan), sums.empty();
  }
  const float scale = std::ldexp(1.0f, exponent);
  for (size_t i = 0; i < sums.size(); ++i) {
    out[i] = static_cast<float>(sums[i]) * scale * factor;
  }
  // Canonical, and whether it is finite.
  const void* const slot = out;
  return sum({&slot, 1}, DType::kF32, 1.0f, out, sums.size());
}

}  // namespace phub::kernels

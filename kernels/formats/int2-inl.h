// Codes of 2 bits, of sparse formats: one of two magnitudes, the levels, and a sign; four in a
// byte, the first in the lowest bits.
#if defined(PHUB_KERNELS_FORMATS_INT2_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_INT2_INL_H_
#undef PHUB_KERNELS_FORMATS_INT2_INL_H_
#else
#define PHUB_KERNELS_FORMATS_INT2_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/number-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// Two bf16: the lower level in the lower half, the higher one in the upper half.
struct Levels {
  explicit Levels(uint32_t bits)
      : low(std::bit_cast<float>(bits << 16)),
        high(std::bit_cast<float>(bits & 0xFFFF0000)),
        values{low, high, -low, -high} {}
  // Levels that say that an element was not finite.
  static constexpr uint32_t kNone = 0x7FC07FC0;

  float low, high;
  float values[4];  // of each code, whose bit 0 says that it is the higher level, bit 1: negative
};

HWY_INLINE uint32_t load_two_bits(const uint8_t* codes, size_t i) {
  return codes[i / 4] >> (i % 4 * 2) & 3;
}
// REQUIRES: it is zero.
HWY_INLINE void store_two_bits(uint32_t code, uint8_t* codes, size_t i) {
  codes[i / 4] = static_cast<uint8_t>(codes[i / 4] | code << (i % 4 * 2));
}

constexpr uint32_t kLargestBf16 = 0x7F7F;

// The bits of the nearest bf16 to a magnitude (the even one in a tie), or those that are not above
// it, or not below it. A finite one stays finite.
inline uint32_t nearest_bf16(float magnitude) {
  const auto bits = std::bit_cast<uint32_t>(magnitude);
  return std::min((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, kLargestBf16);
}
inline uint32_t bf16_below(float magnitude) { return std::bit_cast<uint32_t>(magnitude) >> 16; }
inline uint32_t bf16_above(float magnitude) {
  return std::min((std::bit_cast<uint32_t>(magnitude) + 0xFFFF) >> 16, kLargestBf16);
}

// The levels of the magnitudes that for_each() visits, in ascending order of their elements;
// encode.h says which. None of them is above `largest`, which is one of them, and finite.
template <class ForEach>
uint32_t choose_levels(const ForEach& for_each, float largest, bool stochastic) {
  float smallest = largest;
  for_each([&smallest](float magnitude) { smallest = std::min(smallest, magnitude); });
  if (stochastic) return bf16_below(smallest) | bf16_above(largest) << 16;
  struct {
    double sum = 0, count = 0;
  } of[2];  // no branches: which of both comes next is not to be predicted
  for_each([&](float magnitude) {
    const bool is_high = smallest == 0 ? magnitude > 0 : magnitude - smallest > largest - magnitude;
    auto& its = of[is_high ? 1 : 0];
    its.sum += magnitude;
    its.count += 1;
  });
  auto& [low, high] = of;
  if (low.count == 0) return 0;  // there are no elements
  if (high.count == 0) high = low;
  return nearest_bf16(static_cast<float>(low.sum / low.count)) |
         nearest_bf16(static_cast<float>(high.sum / high.count)) << 16;
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// The common parts of scaled formats: codes, and behind them the f32 that they are multiples of.
//
// Such a format has kType; Slot, how it is read; kLargest, the largest value of a code;
// kMostExponent, of a scale; scale(), that of a chunk before it is limited;
// quantize() of a vector of values within ±kLargest; unpack(), the values of a vector of codes; and
// pack().
#if defined(PHUB_KERNELS_FORMATS_SCALED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_SCALED_INL_H_
#undef PHUB_KERNELS_FORMATS_SCALED_INL_H_
#else
#define PHUB_KERNELS_FORMATS_SCALED_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/number-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

template <class D>
using U8 = hn::Rebind<uint8_t, D>;

// Returns the low byte of each code. (Truncating is one instruction where saturating is several.)
template <class D>
HWY_INLINE hn::Vec<U8<D>> low_bytes(D /*d*/, hn::Vec<I32<D>> codes) {
  return hn::TruncateTo(U8<D>(), hn::BitCast(U32<D>(), codes));
}

template <class D>
struct Quantized {
  hn::Vec<I32<D>> codes;
  hn::Vec<D> values;  // before they are scaled
};

// The slot of a scaled format, to be read.
template <class Format>
struct ScaledSlot {
  ScaledSlot() = default;
  ScaledSlot(const void* slot, size_t n) : codes(static_cast<const uint8_t*>(slot)) {
    std::memcpy(&scale, codes + scale_offset(Format::kType, n), sizeof(scale));
  }
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, size_t i) const {
    return hn::Mul(Format::unpack(d, codes, i), hn::Set(d, scale));
  }
  HWY_INLINE const void* address(size_t i) const { return codes + bytes(i); }
  static constexpr size_t bytes(size_t n) { return n * format_of(Format::kType).bits / 8; }

  const uint8_t* codes;
  float scale;
};

// The common parts of int32, int8 and int4: codes are whole multiples of the scale, up to ±kMost.
template <DType kTypeOf, int kMost>
struct WholeMultiples {
  static constexpr DType kType = kTypeOf;
  static constexpr float kLargest = kMost;
  static float scale(float largest) { return largest / kLargest; }

  template <class D, class Round>
  static HWY_INLINE Quantized<D> quantize(D d, hn::Vec<D> v, const Round& round, size_t i) {
    const auto whole = round(d, v, i);
    return {whole.integers, whole.values};
  }
};

// The smallest power of two, p, with largest <= most * p; 0: it is not normal.
inline float smallest_power(float largest, float most) {
  constexpr uint32_t kFraction = 0x7FFFFF;
  const auto bits = std::bit_cast<uint32_t>(most);
  // A larger fraction than that of `most` carries into the exponent.
  const uint32_t power =
      (std::bit_cast<uint32_t>(largest) + kFraction - (bits & kFraction)) & ~kFraction;
  const uint32_t down = (bits & ~kFraction) - (127u << 23);
  return power <= down ? 0 : std::bit_cast<float>(power - down);
}

constexpr float kSmallestNormal = 0x1p-126f;

// The scale of a chunk whose largest magnitude is given.
template <class Format>
float scale_of(float largest) {
  constexpr float kMost =
      std::bit_cast<float>(static_cast<uint32_t>(Format::kMostExponent + 127) << 23);
  return largest == 0 ? 0 : std::clamp(Format::scale(largest), kSmallestNormal, kMost);
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

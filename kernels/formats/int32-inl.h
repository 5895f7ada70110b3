// int32: whole multiples of a power of two, -4,194,303 to 4,194,303. Slots are added as integers,
// in any order: in multiples of the largest power that one of them has (fixed_point.h).
#if defined(PHUB_KERNELS_FORMATS_INT32_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_INT32_INL_H_
#undef PHUB_KERNELS_FORMATS_INT32_INL_H_
#else
#define PHUB_KERNELS_FORMATS_INT32_INL_H_
#endif

#include <bit>
#include <limits>

#include "kernels/fixed_point.h"
#include "kernels/formats/scaled-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

struct Int32Slot;

struct Int32 : WholeMultiples<DType::kInt32, kLargestCode> {
  using Slot = Int32Slot;
  static constexpr int kMostExponent = 106;
  static float scale(float largest) { return smallest_power(largest, kLargest); }

  template <class D>
  static HWY_INLINE hn::Vec<I32<D>> codes(D /*d*/, const uint8_t* codes, size_t i) {
    return hn::LoadU(I32<D>(), reinterpret_cast<const int32_t*>(codes) + i);
  }
  // A bit above the 23rd says that a code is out of bounds.
  template <class D>
  static HWY_INLINE hn::Vec<I32<D>> spread(D /*d*/, hn::Vec<I32<D>> codes) {
    return hn::Add(codes, hn::Set(I32<D>(), kLargestCode + 1));
  }
  template <class D>
  static HWY_INLINE hn::Mask<I32<D>> out_of_bounds(D /*d*/, hn::Vec<I32<D>> spread) {
    const I32<D> di;
    return hn::Ne(hn::And(spread, hn::Set(di, ~(2 * kLargestCode + 1))), hn::Zero(di));
  }
  template <class D>
  static HWY_INLINE void pack(D /*d*/, hn::Vec<I32<D>> v, uint8_t* codes, size_t i) {
    hn::StoreU(v, I32<D>(), reinterpret_cast<int32_t*>(codes) + i);
  }
};

struct Int32Slot : ScaledSlot<Int32> {
  Int32Slot() = default;
  Int32Slot(const void* slot, size_t n) : ScaledSlot<Int32>(slot, n) {
    const int exponent = exponent_of(slot, n);
    if (exponent == kExponentOfNaN) scale = std::numeric_limits<float>::quiet_NaN();
    is_zero = exponent == kExponentOfZero;
  }
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, size_t i) const {
    if (is_zero) return hn::Zero(d);
    const auto whole = Int32::codes(d, codes, i);
    const auto value = hn::Mul(hn::ConvertTo(d, whole), hn::Set(d, scale));
    const auto nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
    const auto wrong = Int32::out_of_bounds(d, Int32::spread(d, whole));
    return hn::IfThenElse(hn::RebindMask(d, wrong), nan, value);
  }

  bool is_zero;
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

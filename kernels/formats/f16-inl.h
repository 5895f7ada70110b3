// f16, IEEE 754 binary16.
#if defined(PHUB_KERNELS_FORMATS_F16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_F16_INL_H_
#undef PHUB_KERNELS_FORMATS_F16_INL_H_
#else
#define PHUB_KERNELS_FORMATS_F16_INL_H_
#endif

#include "kernels/number-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)

struct F16 : Format16<F16> {
  static constexpr DType kType = DType::kF16;
  static constexpr uint16_t kExponent = 0x7C00;
  template <class D>
  static HWY_INLINE hn::Vec<D> unpack(D d, hn::Vec<U16<D>> v) {
    return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), v));
  }
  template <class D>
  static HWY_INLINE hn::Vec<U16<D>> pack(D /*d*/, hn::Vec<D> v) {
    return hn::BitCast(U16<D>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v));
  }
};

#else

// This is for machines without F16C. (Highway's own emulation truncates, and knows neither infinity
// nor NaN.)
struct F16 : Format16<F16> {
  static constexpr DType kType = DType::kF16;
  static constexpr uint16_t kExponent = 0x7C00;
  template <class D>
  static HWY_INLINE hn::Vec<D> unpack(D d, hn::Vec<U16<D>> v) {
    const I32<D> di;
    const auto bits = widen(d, v);
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(di, 0x8000)));
    const auto rest = hn::ShiftLeft<13>(hn::And(bits, hn::Set(di, 0x7FFF)));
    const auto normal = hn::Add(rest, hn::Set(di, (127 - 15) << 23));
    // Exponent all ones: so must ours be.
    const auto special = hn::Or(rest, hn::Set(di, kInfinityBits));
    // A subnormal becomes 2^-14 · 1.fraction by its bits; 2^-14 subtracted leaves its value.
    const auto smallest = hn::Set(di, (127 - 14) << 23);
    const auto subnormal =
        hn::BitCast(di, hn::Sub(hn::BitCast(d, hn::Add(rest, smallest)), hn::BitCast(d, smallest)));
    auto result = hn::IfThenElse(hn::Lt(rest, hn::Set(di, 1 << 23)), subnormal, normal);
    result = hn::IfThenElse(hn::Lt(rest, hn::Set(di, 31 << 23)), result, special);
    return hn::BitCast(d, hn::Or(result, sign));
  }
  template <class D>
  static HWY_INLINE hn::Vec<U16<D>> pack(D d, hn::Vec<D> v) {
    const I32<D> di;
    const auto bits = absolute_bits(d, v);
    const auto sign =
        hn::BitCast(di, hn::ShiftLeft<15>(hn::ShiftRight<31>(hn::BitCast(U32<D>(), v))));
    const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(di, 1));
    const auto normal =
        hn::ShiftRight<13>(hn::Add(hn::Add(bits, hn::Set(di, 0xFFF - ((127 - 15) << 23))), odd));
    // Under 2^-14, adding 0.5 rounds to a multiple of 2^-24, the smallest f16, in the last bits.
    const auto half = hn::Set(d, 0.5f);
    const auto subnormal =
        hn::Sub(hn::BitCast(di, hn::Add(hn::BitCast(d, bits), half)), hn::BitCast(di, half));
    const auto special = hn::IfThenElse(hn::Gt(bits, hn::Set(di, kInfinityBits)),
                                        hn::Set(di, 0x7E00), hn::Set(di, 0x7C00));
    auto result = hn::IfThenElse(hn::Lt(bits, hn::Set(di, (127 - 14) << 23)), subnormal, normal);
    result = hn::IfThenElse(hn::Lt(bits, hn::Set(di, (127 + 16) << 23)), result, special);
    return narrow(d, hn::Or(result, sign));
  }
};

#endif

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

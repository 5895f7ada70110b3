// bf16: the upper half of an f32.
#if defined(PHUB_KERNELS_FORMATS_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_BF16_INL_H_
#undef PHUB_KERNELS_FORMATS_BF16_INL_H_
#else
#define PHUB_KERNELS_FORMATS_BF16_INL_H_
#endif

#include "kernels/number-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

struct Bf16 : Format16<Bf16> {
  static constexpr DType kType = DType::kBF16;
  static constexpr uint16_t kExponent = 0x7F80;
  template <class D>
  static HWY_INLINE hn::Vec<D> unpack(D d, hn::Vec<U16<D>> v) {
    return hn::BitCast(d, hn::ShiftLeft<16>(widen(d, v)));
  }
  template <class D>
  static HWY_INLINE hn::Vec<U16<D>> pack(D d, hn::Vec<D> v) {
    const U32<D> du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd);
    return narrow(d, hn::BitCast(I32<D>(), hn::ShiftRight<16>(rounded)));
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

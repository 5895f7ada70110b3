// int8: whole multiples of a scale, -127 to 127.
#if defined(PHUB_KERNELS_FORMATS_INT8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_INT8_INL_H_
#undef PHUB_KERNELS_FORMATS_INT8_INL_H_
#else
#define PHUB_KERNELS_FORMATS_INT8_INL_H_
#endif

#include "kernels/formats/scaled-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

struct Int8 : WholeMultiples<DType::kInt8, 127> {
  using Slot = ScaledSlot<Int8>;
  static constexpr int kMostExponent = 121;
  template <class D>
  static HWY_INLINE hn::Vec<D> unpack(D d, const uint8_t* codes, size_t i) {
    const hn::Rebind<int8_t, D> d8;
    const auto bytes = hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes + i));
    return hn::ConvertTo(d, hn::PromoteTo(I32<D>(), bytes));
  }
  template <class D>
  static HWY_INLINE void pack(D /*d*/, hn::Vec<I32<D>> v, uint8_t* codes, size_t i) {
    hn::StoreU(low_bytes(D(), v), U8<D>(), codes + i);
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

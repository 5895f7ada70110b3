// f32: as it is.
#if defined(PHUB_KERNELS_FORMATS_F32_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_F32_INL_H_
#undef PHUB_KERNELS_FORMATS_F32_INL_H_
#else
#define PHUB_KERNELS_FORMATS_F32_INL_H_
#endif

#include "kernels/number-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

struct F32 {
  static constexpr DType kType = DType::kF32;
  static constexpr uint32_t kExponent = 0x7F800000;
  using T = float;
  using Slot = PlainSlot<F32>;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const T* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, T* to) {
    hn::StoreU(v, d, to);
  }
  template <class D>
  static HWY_INLINE void stream_two(D d, hn::Vec<D> v0, hn::Vec<D> v1, T* to) {
    hn::Stream(v0, d, to);
    hn::Stream(v1, d, to + hn::Lanes(d));
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

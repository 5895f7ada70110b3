// Number formats as vectors of f32, once per instruction set.
//
// Every NaN that leaves the kernels is the same one (positive, quiet, no payload): which operand's
// NaN an x86 addition returns depends on the order the compiler chose, so nothing else could be the
// same bits everywhere.
#if defined(PHUB_KERNELS_NUMBER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_NUMBER_INL_H_
#undef PHUB_KERNELS_NUMBER_INL_H_
#else
#define PHUB_KERNELS_NUMBER_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
using I32 = hn::RebindToSigned<D>;
template <class D>
using U32 = hn::RebindToUnsigned<D>;
template <class D>
using U16 = hn::Rebind<uint16_t, D>;

// Hardware prefetchers stop at the end of a page and start late, and a chunk is eight pages: asking
// for what lies a little ahead keeps the memory busy. At a chunk's end it is the next chunk that is
// asked for, which usually comes next. (A prefetch never faults.) For a loop that takes `bytes` at
// `from` in one iteration. kLocality 3 is the L1 cache, 2 the L2.
template <uintptr_t kAheadBytes, int kLocality>
HWY_INLINE void prefetch(const void* from, size_t bytes) {
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(from) + kAheadBytes;
  for (size_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + line), 0, kLocality);
  }
}

// Bits of the absolute value: at least kInfinityBits means infinity or NaN.
constexpr int32_t kInfinityBits = 0x7F800000;

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<I32<D>> absolute_bits(D /*d*/, V v) {
  const I32<D> di;
  return hn::And(hn::BitCast(di, v), hn::Set(di, 0x7FFFFFFF));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V canonical_nan(D d, V v) {
  const V nan = hn::BitCast(d, hn::Set(I32<D>(), 0x7FC00000));
  return hn::IfThenElse(hn::IsNaN(v), nan, v);
}

// Low halves of lanes that hold 0 to 65,535.
template <class D>
HWY_INLINE hn::Vec<U16<D>> narrow(D /*d*/, hn::Vec<I32<D>> v) {
  return hn::DemoteTo(U16<D>(), v);
}

template <class D>
HWY_INLINE hn::Vec<I32<D>> widen(D /*d*/, hn::Vec<U16<D>> v) {
  return hn::PromoteTo(I32<D>(), v);
}

// Number<type>::load and pack convert vectors. pack rounds to nearest even; its input holds no NaN
// but the canonical one.
template <DType kType>
struct Number;

template <>
struct Number<DType::kF32> {
  using T = float;
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

// The two 16-bit formats differ in pack and unpack only.
template <class Format>
struct Number16 {
  using T = uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const T* from) {
    return Format::unpack(d, hn::LoadU(U16<D>(), from));
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, T* to) {
    hn::StoreU(Format::pack(d, v), U16<D>(), to);
  }
  // Two vectors make one full vector of 16-bit lanes: streaming stores exist for full ones only.
  template <class D>
  static HWY_INLINE void stream_two(D d, hn::Vec<D> v0, hn::Vec<D> v1, T* to) {
#if HWY_TARGET == HWY_SCALAR
    store(d, v0, to);
    store(d, v1, to + 1);
#else
    const hn::Twice<U16<D>> full;
    hn::Stream(hn::Combine(full, Format::pack(d, v1), Format::pack(d, v0)), full, to);
#endif
  }
};

struct Bf16 {
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

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)

struct F16 {
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

// Without F16C. (Highway's own emulation truncates, and knows neither infinity nor NaN.)
struct F16 {
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

template <>
struct Number<DType::kBF16> : Number16<Bf16> {};
template <>
struct Number<DType::kF16> : Number16<F16> {};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

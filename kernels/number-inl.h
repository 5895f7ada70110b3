// The common parts of the number formats (formats/), once per instruction set.
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
// for data a little ahead keeps the memory busy. At a chunk's end it is the next chunk that is
// asked for, which usually comes next. (A prefetch never faults.) For a loop that takes `bytes` at
// `from` in one iteration. kLocality 3 is the L1 cache, 2 the L2.
template <int kLocality>
HWY_INLINE void prefetch_ahead(const void* from, uintptr_t ahead_bytes, size_t bytes) {
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(from) + ahead_bytes;
  for (size_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + line), 0, kLocality);
  }
}
template <uintptr_t kAheadBytes, int kLocality>
HWY_INLINE void prefetch(const void* from, size_t bytes) {
  prefetch_ahead<kLocality>(from, kAheadBytes, bytes);
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

// The slot of a plain format, to be read. (formats/scaled-inl.h has that of a scaled one.)
template <class Format>
struct PlainSlot {
  PlainSlot() = default;
  PlainSlot(const void* slot, size_t /*n*/) : from(static_cast<const typename Format::T*>(slot)) {}
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, size_t i) const {
    return Format::load(d, from + i);
  }
  HWY_INLINE const void* address(size_t i) const { return from + i; }
  static constexpr size_t bytes(size_t n) { return n * sizeof(typename Format::T); }

  const typename Format::T* from;
};

// The common parts of formats of 16 bits; they differ in pack and unpack, and in the bits of their
// exponent. pack rounds to nearest even; its input holds no NaN but the canonical one.
template <class Format>
struct Format16 {
  using T = uint16_t;
  using Slot = PlainSlot<Format>;
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

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

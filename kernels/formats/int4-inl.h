// int4: whole multiples of a scale, -7 to 7; two in a byte, the first in the low half.
#if defined(PHUB_KERNELS_FORMATS_INT4_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_INT4_INL_H_
#undef PHUB_KERNELS_FORMATS_INT4_INL_H_
#else
#define PHUB_KERNELS_FORMATS_INT4_INL_H_
#endif

#include <cstring>
#include <type_traits>

#include "kernels/formats/scaled-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

struct Int4Slot;

// Vectors of more than one element begin at an even one.
struct Int4 : WholeMultiples<DType::kInt4, 7> {
  using Slot = Int4Slot;
  static constexpr int kMostExponent = 125;

#if HWY_TARGET != HWY_SCALAR
  // The codes from element i on are in the lower four bits. The upper bits do not count.
  template <class D>
  static HWY_INLINE hn::Vec<U8<D>> load_codes(D d, const uint8_t* codes, size_t i) {
    constexpr size_t kLanes = hn::MaxLanes(d);
    using Word = std::conditional_t<kLanes >= 8, uint64_t,
                                    std::conditional_t<kLanes == 4, uint32_t, uint16_t>>;
    Word bytes = 0;
    std::memcpy(&bytes, codes + i / 2, kLanes / 2);
    // Each byte twice; of the second, the high half comes down.
    const U8<D> d8;
    const hn::Repartition<uint16_t, decltype(d8)> d16;
    const auto both = hn::BitCast(d8, hn::Set(hn::Repartition<Word, decltype(d8)>(), bytes));
    const auto high = hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, both)));
    return hn::InterleaveLower(d8, both, high);
  }
#endif

  template <class D>
  static HWY_INLINE hn::Vec<D> unpack(D d, const uint8_t* codes, size_t i) {
    if constexpr (hn::MaxLanes(d) == 1) {
      const int code = codes[i / 2] >> (i % 2 * 4) & 15;
      return hn::Set(d, static_cast<float>((code ^ 8) - 8));
    } else {
#if HWY_TARGET != HWY_SCALAR
      // Shifts the codes to the top of a lane, and down with their sign.
      const auto wide = hn::PromoteTo(U32<D>(), load_codes(d, codes, i));
      const auto top = hn::BitCast(I32<D>(), hn::ShiftLeft<28>(wide));
      return hn::ConvertTo(d, hn::ShiftRight<28>(top));
#endif
    }
  }

  template <class D>
  static HWY_INLINE void pack(D /*d*/, hn::Vec<I32<D>> v, uint8_t* codes, size_t i) {
    if constexpr (hn::MaxLanes(D()) == 1) {
      const auto code = static_cast<uint8_t>(hn::GetLane(v) & 15);
      codes[i / 2] = i % 2 == 0 ? code : static_cast<uint8_t>(codes[i / 2] | code << 4);
    } else {
#if HWY_TARGET != HWY_SCALAR
      const U8<D> d8;
      const hn::Repartition<int16_t, decltype(d8)> d16;
      const hn::Rebind<uint8_t, decltype(d16)> pairs;
      const auto bytes = hn::BitCast(d16, low_bytes(D(), v));
      const auto low = hn::And(bytes, hn::Set(d16, 15));
      const auto both = hn::Or(low, hn::And(hn::ShiftRight<4>(bytes), hn::Set(d16, 240)));
      const hn::RebindToUnsigned<decltype(d16)> du16;
      hn::StoreU(hn::TruncateTo(pairs, hn::BitCast(du16, both)), pairs, codes + i / 2);
#endif
    }
  }
};

// Vectors of 16 elements look them up, multiplied already.
struct Int4Slot : ScaledSlot<Int4> {
  Int4Slot() = default;
  Int4Slot(const void* slot, size_t n) : ScaledSlot<Int4>(slot, n) {
    for (int code = 0; code < 16; ++code) table[code] = static_cast<float>((code ^ 8) - 8) * scale;
  }
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, size_t i) const {
#if HWY_TARGET != HWY_SCALAR
    if constexpr (hn::MaxLanes(d) == 16) {
      const auto code = hn::And(Int4::load_codes(d, codes, i), hn::Set(U8<D>(), 15));
      const auto index = hn::PromoteTo(I32<D>(), code);
      return hn::TableLookupLanes(hn::Load(d, table), hn::IndicesFromVec(d, index));
    }
#endif
    return ScaledSlot<Int4>::load(d, i);
  }

  HWY_ALIGN float table[16];
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

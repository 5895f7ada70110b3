// fp8-e4m3 and fp8-e5m2: the 8-bit floating point of the Open Compute Project (OFP8, revision 1.0),
// multiples of a power of two. Both are read as an f16: e5m2 is its upper half, and the bits of an
// e4m3, seven places up, are an f16 of a 256th of its value.
#if defined(PHUB_KERNELS_FORMATS_FP8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_FP8_INL_H_
#undef PHUB_KERNELS_FORMATS_FP8_INL_H_
#else
#define PHUB_KERNELS_FORMATS_FP8_INL_H_
#endif

#include <bit>
#include <cstdint>

#include "kernels/formats/f16-inl.h"
#include "kernels/formats/scaled-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// kFraction: the bits of the fraction; kLowest: the exponent of the smallest normal number and of
// subnormals; kHighest: of the largest, which is 1.75 · 2^kHighest in both formats.
template <DType kTypeOf, int kFraction, int kLowest, int kHighest>
struct Fp8 {
  static constexpr DType kType = kTypeOf;
  static constexpr float kLargest = 1.75f * (1 << kHighest);
  static constexpr int kMostExponent = 127 - kHighest;

  static float scale(float largest) { return smallest_power(largest, kLargest); }

  // In units of the last place, which depends on the exponent. A magnitude that is rounded up to
  // the next power of two is the next exponent's first: a carry.
  template <class D, class Round>
  static HWY_INLINE Quantized<D> quantize(D d, hn::Vec<D> v, const Round& round, size_t i) {
    const I32<D> di;
    const auto bits = hn::BitCast(di, v);
    const auto sign = hn::And(bits, hn::Set(di, INT32_MIN));
    const auto exponent =
        hn::Max(hn::And(bits, hn::Set(di, kInfinityBits)), hn::Set(di, (127 + kLowest) << 23));
    const auto units = round.template in_units<kFraction>(d, v, sign, exponent, i);
    const auto above = hn::Sub(exponent, hn::Set(di, (127 + kLowest) << 23));
    const auto code = hn::Add(hn::ShiftRight<23 - kFraction>(above), units.integers);
    const auto sign_bit = hn::BitCast(di, hn::ShiftRight<24>(hn::BitCast(U32<D>(), sign)));
    return {hn::Or(code, sign_bit), hn::Or(units.values, hn::BitCast(d, sign))};
  }

  template <class D>
  static HWY_INLINE void pack(D /*d*/, hn::Vec<I32<D>> v, uint8_t* codes, size_t i) {
    hn::StoreU(low_bytes(D(), v), U8<D>(), codes + i);
  }
};

struct Fp8E4M3 : Fp8<DType::kFp8E4M3, 3, -6, 8> {
  using Slot = ScaledSlot<Fp8E4M3>;

  // The only NaN is all ones, and carries into the exponent's highest bit, which makes it an f16's.
  template <class D>
  static HWY_INLINE hn::Vec<D> unpack(D d, const uint8_t* codes, size_t i) {
    const hn::Rebind<int8_t, D> d8;
    const hn::Rebind<int16_t, D> d16;
    const U16<D> du;
    const auto bytes = hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes + i));
    const auto bits = hn::BitCast(du, hn::PromoteTo(d16, bytes));
    const auto half = hn::And(hn::ShiftLeft<7>(bits), hn::Set(du, 0xBF80));
    const auto nan = hn::And(hn::Add(half, hn::Set(du, 0x80)), hn::Set(du, 0x4000));
    return hn::Mul(F16::unpack(d, hn::Or(half, nan)), hn::Set(d, 256.0f));
  }
};

struct Fp8E5M2 : Fp8<DType::kFp8E5M2, 2, -14, 15> {
  using Slot = ScaledSlot<Fp8E5M2>;

  template <class D>
  static HWY_INLINE hn::Vec<D> unpack(D d, const uint8_t* codes, size_t i) {
    const auto bits = hn::PromoteTo(U16<D>(), hn::LoadU(U8<D>(), codes + i));
    return F16::unpack(d, hn::ShiftLeft<8>(bits));
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

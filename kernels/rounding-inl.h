// The two ways to round to whole numbers, and the random numbers of one (encode.h).
#if defined(PHUB_KERNELS_ROUNDING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_ROUNDING_INL_H_
#undef PHUB_KERNELS_ROUNDING_INL_H_
#else
#define PHUB_KERNELS_ROUNDING_INL_H_
#endif

#include "kernels/encode.h"
#include "kernels/number-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// Numbers below 2^22, rounded. A zero is +0.
template <class D>
struct Whole {
  hn::Vec<I32<D>> integers;
  hn::Vec<D> values;
};

// Added to a number it leaves no bits for a fraction: the addition rounds, to even in a tie, and
// the integer is in the lower bits.
constexpr float kWholes = 0x1.8p23f;

struct Nearest {
  explicit Nearest(const Rounding& /*rounding*/) {}
  template <class D>
  HWY_INLINE Whole<D> operator()(D d, hn::Vec<D> v, size_t /*i*/) const {
    const I32<D> di;
    const auto wholes = hn::Set(d, kWholes);
    const auto sum = hn::Add(v, wholes);
    return {hn::Sub(hn::BitCast(di, sum), hn::BitCast(di, wholes)), hn::Sub(sum, wholes)};
  }
  // As Stochastic::in_units. kWholes for that unit, with the sign of v: the addition does it all.
  template <int kFraction, class D>
  HWY_INLINE Whole<D> in_units(D d, hn::Vec<D> v, hn::Vec<I32<D>> sign, hn::Vec<I32<D>> exponent,
                               size_t /*i*/) const {
    const I32<D> di;
    const auto bits = hn::Or(hn::Add(exponent, hn::Set(di, (23 - kFraction) << 23)), sign);
    const auto wholes = hn::BitCast(d, bits);
    const auto sum = hn::Add(v, wholes);
    return {hn::Sub(hn::BitCast(di, sum), bits), hn::Sub(sum, wholes)};
  }
  // This is added to a magnitude's bits before the lower 16 are cut off.
  uint32_t before_cut(uint32_t bits, size_t /*i*/) const { return 0x7FFF + (bits >> 16 & 1); }
};

class Stochastic {
 public:
  explicit Stochastic(const Rounding& rounding) : first_(static_cast<uint32_t>(rounding.element)) {
    uint64_t key = mix64(rounding.job + kStep);
    key = mix64(key + rounding.rank + kStep);
    key = mix64(key + rounding.round + kStep);
    low_ = static_cast<uint32_t>(key);
    high_ = static_cast<uint32_t>(key >> 32);
  }
  template <class D>
  HWY_INLINE Whole<D> operator()(D d, hn::Vec<D> v, size_t i) const {
    const I32<D> di;
    const auto wholes = hn::Set(d, kWholes);
    const auto below = hn::Floor(v);
    const auto upper = hn::ShiftRight<8>(random(d, i));
    const auto u = hn::Mul(hn::ConvertTo(d, hn::BitCast(I32<D>(), upper)), hn::Set(d, 0x1p-24f));
    const auto up = hn::IfThenElseZero(hn::Lt(u, hn::Sub(v, below)), hn::Set(d, 1.0f));
    const auto value = hn::Add(below, up);
    return {hn::Sub(hn::BitCast(di, hn::Add(value, wholes)), hn::BitCast(di, wholes)), value};
  }
  // Rounds v to units of 2^(e - kFraction), which are at most 2^23 of them: how many of them its
  // magnitude has become, and its value, whose sign is right unless it is zero. Given the bits of
  // the sign and of 2^e.
  template <int kFraction, class D>
  HWY_INLINE Whole<D> in_units(D d, hn::Vec<D> v, hn::Vec<I32<D>> sign, hn::Vec<I32<D>> exponent,
                               size_t i) const {
    const I32<D> di;
    const auto per_unit = hn::Sub(hn::Set(di, (254 + kFraction) << 23), exponent);
    const auto unit = hn::Or(hn::Sub(exponent, hn::Set(di, kFraction << 23)), sign);
    const auto units = (*this)(d, hn::Mul(hn::Abs(v), hn::BitCast(d, per_unit)), i);
    return {units.integers, hn::Mul(units.values, hn::BitCast(d, unit))};
  }
  uint32_t before_cut(uint32_t /*bits*/, size_t i) const {
    const hn::CappedTag<float, 1> d;
    return hn::GetLane(random(d, i)) >> 16;
  }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15;

  static uint64_t mix64(uint64_t h) {
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9;
    h = (h ^ h >> 27) * 0x94D049BB133111EB;
    return h ^ h >> 31;
  }
  template <class DU, class V = hn::Vec<DU>>
  static HWY_INLINE V mix(DU du, V h) {
    h = hn::Mul(hn::Xor(h, hn::ShiftRight<16>(h)), hn::Set(du, 0x7FEB352D));
    h = hn::Mul(hn::Xor(h, hn::ShiftRight<15>(h)), hn::Set(du, 0x846CA68B));
    return hn::Xor(h, hn::ShiftRight<16>(h));
  }
  template <class D>
  HWY_INLINE hn::Vec<U32<D>> random(D /*d*/, size_t i) const {
    const U32<D> du;
    const auto element = hn::Add(hn::Iota(du, 0), hn::Set(du, first_ + static_cast<uint32_t>(i)));
    const auto half = mix(du, hn::Xor(element, hn::Set(du, low_)));
    return mix(du, hn::Xor(half, hn::Set(du, high_)));
  }

  uint32_t first_, low_, high_;
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

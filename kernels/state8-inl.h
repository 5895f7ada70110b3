// Codes of state8.h, once per instruction set.
#if defined(PHUB_KERNELS_STATE8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_STATE8_INL_H_
#undef PHUB_KERNELS_STATE8_INL_H_
#else
#define PHUB_KERNELS_STATE8_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/number-inl.h"
#include "kernels/state8.h"
#include "kernels/state8_map.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// The decade's line, at v.
template <class Lines, class D, size_t... kUpper>
HWY_INLINE hn::Vec<D> on_line(D d, hn::Vec<D> v, std::index_sequence<kUpper...> /*all but one*/) {
  constexpr auto kLines = Lines::get();
  auto factor = hn::Set(d, kLines[0].factor);
  auto term = hn::Set(d, kLines[0].term);
  const auto choose = [&](float end_below, float its_factor, float its_term) HWY_ATTR {
    const auto is_above = hn::Gt(v, hn::Set(d, end_below));
    factor = hn::IfThenElse(is_above, hn::Set(d, its_factor), factor);
    term = hn::IfThenElse(is_above, hn::Set(d, its_term), term);
  };
  (choose(kLines[kUpper].end, kLines[kUpper + 1].factor, kLines[kUpper + 1].term), ...);
  return hn::Add(hn::Mul(v, factor), term);
}
template <bool kIsSigned>
struct StateNumbers {
  static constexpr auto get() { return StateMap<kIsSigned>::numbers(); }
};
template <bool kIsSigned>
struct StateValues {
  static constexpr auto get() { return StateMap<kIsSigned>::values(); }
};
using UpperDecades = std::make_index_sequence<StateMap<true>::kDecades - 1>;

// The bits of a magnitude; of what is below 0, in a map without signs, those of 0.
template <bool kIsSigned, class D>
HWY_INLINE hn::Vec<I32<D>> magnitude_bits(D d, hn::Vec<D> v) {
  if constexpr (kIsSigned) return absolute_bits(d, v);
  const auto bits = hn::BitCast(I32<D>(), v);
  return hn::AndNot(hn::BroadcastSignBit(bits), bits);
}

// From 2^-11 to 1 - 2^-11: a number that the bits decide, 10 bits of a hash.
template <class D>
HWY_INLINE hn::Vec<D> share_of(D d, hn::Vec<I32<D>> bits) {
  const U32<D> du;
  auto hash = hn::Mul(hn::BitCast(du, bits), hn::Set(du, 0x9E3779B1u));
  hash = hn::Xor(hash, hn::ShiftRight<15>(hash));
  hash = hn::ShiftRight<22>(hn::Mul(hash, hn::Set(du, 0x85EBCA77u)));
  const auto number = hn::ConvertTo(d, hn::BitCast(I32<D>(), hash));
  return hn::Mul(hn::Add(number, hn::Set(d, 0.5f)), hn::Set(d, 0x1p-10f));
}

template <bool kIsSigned, class D>
HWY_INLINE void encode_vector(D d, const float* from, float inverse, uint8_t* to) {
  const I32<D> di;
  const auto v = hn::Mul(hn::LoadU(d, from), hn::Set(d, inverse));
  const auto one = hn::BitCast(di, hn::Set(d, 1.0f));  // what is infinite becomes the scale
  const auto bits = hn::Min(magnitude_bits<kIsSigned>(d, v), one);
  const auto number = on_line<StateNumbers<kIsSigned>>(d, hn::BitCast(d, bits), UpperDecades());
  auto code = hn::ConvertTo(di, hn::Add(number, share_of(d, bits)));  // rounds down
  if constexpr (kIsSigned) {
    const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(di, v)), hn::Set(di, 0x80));
    code = hn::Or(code, sign);
  } else {
    const auto is_zero = hn::Eq(bits, hn::Zero(di));
    code = hn::IfThenZeroElse(is_zero, hn::Max(code, hn::Set(di, 1)));
  }
  hn::StoreU(hn::DemoteTo(hn::Rebind<uint8_t, D>(), code), hn::Rebind<uint8_t, D>(), to);
}

template <bool kIsSigned>
float encode_block(const float* from, size_t n, uint8_t* to) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const I32<decltype(d)> di;
  const size_t lanes = hn::Lanes(d);
  auto most = hn::Zero(di);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    most = hn::Max(most, magnitude_bits<kIsSigned>(d, hn::LoadU(d, from + i)));
  }
  int32_t largest = hn::GetLane(hn::MaxOfLanes(di, most));
  for (; i < n; ++i) {
    largest =
        std::max(largest, hn::GetLane(magnitude_bits<kIsSigned>(d1, hn::LoadU(d1, from + i))));
  }
  const auto scale = std::bit_cast<float>(std::min(largest, kInfinityBits - 1));
  if (largest > kInfinityBits || scale < kLeastScale) {
    std::fill_n(to, n, uint8_t{0});
    return largest > kInfinityBits ? std::bit_cast<float>(0x7FC00000) : 0.0f;
  }
  const float inverse = 1.0f / scale;
  for (i = 0; i + lanes <= n; i += lanes) encode_vector<kIsSigned>(d, from + i, inverse, to + i);
  for (; i < n; ++i) encode_vector<kIsSigned>(d1, from + i, inverse, to + i);
  return scale;
}

template <bool kIsSigned, class D>
HWY_INLINE void decode_vector(D d, const uint8_t* from, float scale, float* to) {
  const I32<D> di;
  const auto all = hn::PromoteTo(di, hn::LoadU(hn::Rebind<uint8_t, D>(), from));
  const auto code = kIsSigned ? hn::And(all, hn::Set(di, 0x7F)) : all;
  auto value = on_line<StateValues<kIsSigned>>(d, hn::ConvertTo(d, code), UpperDecades());
  if constexpr (kIsSigned) {
    value = hn::Or(value, hn::BitCast(d, hn::ShiftLeft<24>(hn::And(all, hn::Set(di, 0x80)))));
  }
  hn::StoreU(canonical_nan(d, hn::Mul(value, hn::Set(d, scale))), d, to);
}

template <bool kIsSigned>
void decode_block(const uint8_t* from, float scale, size_t n, float* to) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) decode_vector<kIsSigned>(d, from + i, scale, to + i);
  for (; i < n; ++i) decode_vector<kIsSigned>(d1, from + i, scale, to + i);
}

// Calls visit(first, elements, scale) for each block.
template <class Visit>
HWY_INLINE void for_each_block(const State8& state, size_t n, const Visit& visit) {
  size_t i = 0;
  for (; i + kStateBlock <= n; i += kStateBlock)
    visit(i, kStateBlock, state.scales[i / kStateBlock]);
  if (i < n) visit(i, n - i, *state.last);
}

void EncodeState(const float* from, size_t n, const State8& to) {
  for_each_block(to, n, [&](size_t first, size_t count, float& scale) {
    scale = to.is_signed ? encode_block<true>(from + first, count, to.codes + first)
                         : encode_block<false>(from + first, count, to.codes + first);
  });
}

void DecodeState(const State8& from, size_t n, float* to) {
  for_each_block(from, n, [&](size_t first, size_t count, float scale) {
    from.is_signed ? decode_block<true>(from.codes + first, scale, count, to + first)
                   : decode_block<false>(from.codes + first, scale, count, to + first);
  });
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

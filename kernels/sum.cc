// sum, find_nonfinite and convert. Sums keep the accumulators in registers: a block of four vectors
// runs through all slots before the next block, so that every slot is read once and `out` written
// once. More than kGroup slots go in groups over pieces that stay in the L1 cache, because
// hardware prefetchers and registers follow only so many streams.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sum.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/formats/formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// Each number of slots is code of its own for every format: without AVX2 there are two of them.
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_SSE4
constexpr size_t kGroup = 2;
#else
constexpr size_t kGroup = 8;
#endif
constexpr size_t kPiece = 4096;  // elements: 16 KiB of f32

// Into L1, where a slot that is in L2 already loses nothing by it (into L2 it costs half as much
// again).
HWY_INLINE void prefetch_slot(const void* from, size_t bytes) { prefetch<1024, 3>(from, bytes); }

template <class Format>
constexpr Coding kCoding = format_of(Format::kType).coding;
// Adds slots [0, kSlots) from element `i` on; kResume continues the sums that are in `out`. What is
// accumulated in `largest` tells later whether all results were finite.
template <class Format, size_t kSlots, bool kResume>
struct Adder {
  using Slot = typename Format::Slot;

  template <class D>
  HWY_INLINE hn::Vec<D> start(D d, size_t i) const {
    if constexpr (kResume) {
      return hn::LoadU(d, out + i);
    } else {
      return slots[0].load(d, i);
    }
  }

  template <class D>
  HWY_INLINE void finish(D d, hn::Vec<D> v, size_t i, hn::Vec<I32<D>>& largest) const {
    v = hn::Mul(v, hn::Set(d, factor));
    largest = hn::Max(largest, absolute_bits(d, v));
    hn::StoreU(v, d, out + i);
  }

  template <class D>
  HWY_INLINE void one(D d, size_t i, hn::Vec<I32<D>>& largest) const {
    auto a = start(d, i);
    HWY_UNROLL(8)
    for (size_t s = kResume ? 0 : 1; s < kSlots; ++s) a = hn::Add(a, slots[s].load(d, i));
    finish(d, a, i, largest);
  }

  template <class D>
  HWY_INLINE void four(D d, size_t i, hn::Vec<I32<D>>& largest) const {
    const size_t n = hn::Lanes(d);
    const size_t bytes = Slot::bytes(4 * n);
    if constexpr (!kResume) prefetch_slot(slots[0].address(i), bytes);
    auto a0 = start(d, i);
    auto a1 = start(d, i + n);
    auto a2 = start(d, i + 2 * n);
    auto a3 = start(d, i + 3 * n);
    HWY_UNROLL(8)
    for (size_t s = kResume ? 0 : 1; s < kSlots; ++s) {
      const Slot& from = slots[s];
      prefetch_slot(from.address(i), bytes);
      a0 = hn::Add(a0, from.load(d, i));
      a1 = hn::Add(a1, from.load(d, i + n));
      a2 = hn::Add(a2, from.load(d, i + 2 * n));
      a3 = hn::Add(a3, from.load(d, i + 3 * n));
    }
    finish(d, a0, i, largest);
    finish(d, a1, i + n, largest);
    finish(d, a2, i + 2 * n, largest);
    finish(d, a3, i + 3 * n, largest);
  }

  Slot slots[kSlots];
  float factor;
  float* out;
};

// Elements [begin, end) of slots of n. Returns true if every result is finite.
template <class Format, size_t kSlots, bool kResume>
bool add_group(const void* const* slots, size_t n, size_t begin, size_t end, float factor,
               float* out) {
  Adder<Format, kSlots, kResume> adder;
  for (size_t s = 0; s < kSlots; ++s) adder.slots[s] = typename Format::Slot(slots[s], n);
  adder.factor = factor;
  adder.out = out;

  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const size_t lanes = hn::Lanes(d);
  auto largest = hn::Zero(I32<decltype(d)>());
  auto largest1 = hn::Zero(I32<decltype(d1)>());
  size_t i = begin;
  for (; i + 4 * lanes <= end; i += 4 * lanes) adder.four(d, i, largest);
  for (; i + lanes <= end; i += lanes) adder.one(d, i, largest);
  for (; i < end; ++i) adder.one(d1, i, largest1);
  return hn::AllTrue(I32<decltype(d)>(),
                     hn::Lt(largest, hn::Set(I32<decltype(d)>(), kInfinityBits))) &&
         hn::GetLane(largest1) < kInfinityBits;
}

using AddGroup = bool (*)(const void* const*, size_t, size_t, size_t, float, float*);

template <class Format, bool kResume, size_t... kLess>
constexpr std::array<AddGroup, kGroup> groups(std::index_sequence<kLess...> /*sizes*/) {
  return {add_group<Format, kLess + 1, kResume>...};
}

template <class Format, bool kResume>
bool add_up_to_group(size_t count, const void* const* slots, size_t n, size_t begin, size_t end,
                     float factor, float* out) {
  static constexpr auto kTable = groups<Format, kResume>(std::make_index_sequence<kGroup>());
  return kTable[count - 1](slots, n, begin, end, factor, out);
}

// The multiplication by the factor belongs to the last group. An infinity or NaN of an earlier
// group is still one in the end.
template <class Format>
bool sum_dense(const void* const* slots, size_t count, float factor, float* out, size_t n) {
  if (count <= kGroup) return add_up_to_group<Format, false>(count, slots, n, 0, n, factor, out);
  bool finite = true;
  for (size_t begin = 0; begin < n; begin += kPiece) {
    const size_t end = std::min(begin + kPiece, n);
    finite &= add_up_to_group<Format, false>(kGroup, slots, n, begin, end, 1.0f, out);
    for (size_t done = kGroup; done < count; done += kGroup) {
      const size_t group = std::min(kGroup, count - done);
      const float last = done + group == count ? factor : 1.0f;
      finite &= add_up_to_group<Format, true>(group, slots + done, n, begin, end, last, out);
    }
  }
  return finite;
}

template <class Format>
bool sum_slots(const void* const* slots, size_t count, float factor, float* out, size_t n) {
  if constexpr (is_sparse(Format::kType)) {
    std::fill_n(out, n, 0.0f);
    for (size_t s = 0; s < count; ++s) Format::add(slots[s], out, n);
    const void* total = out;
    return sum_dense<F32>(&total, 1, factor, out, n);
  } else {
    return sum_dense<Format>(slots, count, factor, out, n);
  }
}

// Integers of a piece, in multiples of `exponent`: all slots' together, and what says that one was
// out of bounds.
struct Whole32 {
  HWY_ALIGN int32_t sums[kPiece];
  HWY_ALIGN int32_t spread[kPiece];

  template <class D>
  HWY_INLINE void add(D d, hn::Vec<I32<D>> codes, int shift, size_t i) {
    const I32<D> di;
    const auto half = hn::Set(di, shift == 0 ? 0 : 1 << (shift - 1));
    const auto aligned = hn::ShiftRightSame(hn::Add(codes, half), shift);
    hn::StoreU(hn::Add(hn::LoadU(di, sums + i), aligned), di, sums + i);
    hn::StoreU(hn::Or(hn::LoadU(di, spread + i), Int32::spread(d, codes)), di, spread + i);
  }
  template <class D>
  HWY_INLINE hn::Vec<D> value(D d, float scale, float factor, size_t i) const {
    const I32<D> di;
    const auto wrong = Int32::out_of_bounds(d, hn::LoadU(di, spread + i));
    const auto sum = hn::ConvertTo(d, hn::LoadU(di, sums + i));
    const auto scaled = hn::Mul(hn::Mul(sum, hn::Set(d, scale)), hn::Set(d, factor));
    const auto nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
    return hn::IfThenElse(hn::RebindMask(d, wrong), nan, scaled);
  }
};

// Elements [begin, begin + n) of slots of `elements`.
void add_whole(const void* const* slots, size_t count, size_t elements, int exponent, size_t begin,
               size_t n, Whole32& whole) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const size_t lanes = hn::Lanes(d);
  std::fill_n(whole.sums, n, 0);
  std::fill_n(whole.spread, n, 0);
  for (size_t s = 0; s < count; ++s) {
    const int own = exponent_of(slots[s], elements);
    if (own == kExponentOfZero) continue;
    const int shift = std::min(exponent - own, 23);  // more leave nothing either
    const auto* codes = static_cast<const uint8_t*>(slots[s]);
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      prefetch_slot(codes + (begin + i) * sizeof(int32_t), lanes * sizeof(int32_t));
      whole.add(d, Int32::codes(d, codes, begin + i), shift, i);
    }
    for (; i < n; ++i) whole.add(d1, Int32::codes(d1, codes, begin + i), shift, i);
  }
}

template <>
bool sum_slots<Int32>(const void* const* slots, size_t count, float factor, float* out, size_t n) {
  int exponent = kExponentOfZero;
  for (size_t s = 0; s < count; ++s) exponent = std::max(exponent, exponent_of(slots[s], n));
  if (exponent == kExponentOfZero) return std::fill_n(out, n, 0.0f), true;
  if (exponent == kExponentOfNaN) {
    return std::fill_n(out, n, std::numeric_limits<float>::quiet_NaN()), false;
  }
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const size_t lanes = hn::Lanes(d);
  const float scale = std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
  Whole32 whole;
  auto largest = hn::Zero(I32<decltype(d)>());
  auto largest1 = hn::Zero(I32<decltype(d1)>());
  for (size_t begin = 0; begin < n; begin += kPiece) {
    const size_t piece = std::min(kPiece, n - begin);
    add_whole(slots, count, n, exponent, begin, piece, whole);
    size_t i = 0;
    for (; i + lanes <= piece; i += lanes) {
      const auto v = whole.value(d, scale, factor, i);
      largest = hn::Max(largest, absolute_bits(d, v));
      hn::StoreU(v, d, out + begin + i);
    }
    for (; i < piece; ++i) {
      const auto v = whole.value(d1, scale, factor, i);
      largest1 = hn::Max(largest1, absolute_bits(d1, v));
      hn::StoreU(v, d1, out + begin + i);
    }
  }
  return hn::AllTrue(I32<decltype(d)>(),
                     hn::Lt(largest, hn::Set(I32<decltype(d)>(), kInfinityBits))) &&
         hn::GetLane(largest1) < kInfinityBits;
}

void make_nans_canonical(float* values, size_t n) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(canonical_nan(d, hn::LoadU(d, values + i)), d, values + i);
  }
  for (; i < n; ++i) {
    hn::StoreU(canonical_nan(d1, hn::LoadU(d1, values + i)), d1, values + i);
  }
}

// True if an element has all the exponent's bits set. T is the unsigned integer of the same size.
template <class T>
bool has_exponent(const T* values, T exponent, size_t n) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  const auto mask = hn::Set(d, exponent);
  size_t i = 0;
  while (i + lanes <= n) {
    const size_t end = i + std::min((n - i) / lanes, size_t{64}) * lanes;
    auto largest = hn::Zero(d);
    for (; i < end; i += lanes) {
      largest = hn::Max(largest, hn::And(hn::LoadU(d, values + i), mask));
    }
    if (!hn::AllFalse(d, hn::Eq(largest, mask))) return true;
  }
  for (; i < n; ++i) {
    if ((values[i] & exponent) == exponent) return true;
  }
  return false;
}

template <class Slot>
bool has_nonfinite_value(const Slot& slot, size_t n) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) {
    if (!hn::AllTrue(d, hn::IsFinite(slot.load(d, i)))) return true;
  }
  for (; i < n; ++i) {
    if (!hn::AllTrue(d1, hn::IsFinite(slot.load(d1, i)))) return true;
  }
  return false;
}

template <class Format>
bool has_nonfinite(const void* slot, size_t n) {
  if constexpr (kCoding<Format> == Coding::kPlain) {
    using Bits = std::remove_const_t<decltype(Format::kExponent)>;
    return has_exponent<Bits>(static_cast<const Bits*>(slot), Format::kExponent, n);
  } else if constexpr (kCoding<Format> == Coding::kScaled) {
    return has_nonfinite_value(typename Format::Slot(slot, n), n);
  } else {
    return Format::has_nonfinite(slot, n);
  }
}

template <class From, class To>
void convert_all(const void* from, void* to, size_t n) {
  const auto* in = static_cast<const typename From::T*>(from);
  auto* out = static_cast<typename To::T*>(to);
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    To::store(d, canonical_nan(d, From::load(d, in + i)), out + i);
  }
  for (; i < n; ++i) {
    To::store(d1, canonical_nan(d1, From::load(d1, in + i)), out + i);
  }
}

// What is done with the slots of one format.
struct Entry {
  bool (*sum)(const void* const* slots, size_t count, float factor, float* out, size_t n);
  bool (*has_nonfinite)(const void* slot, size_t n);
};
template <class... Format>
constexpr std::array<Entry, sizeof...(Format)> table_of(const std::tuple<Format...>& /*all*/) {
  return {Entry{sum_slots<Format>, has_nonfinite<Format>}...};
}
// In the order of enum DType.
constexpr auto kTable = table_of(Formats());

using ConvertTo = void (*)(const void* from, void* to, size_t n);
template <class From, class... To>
constexpr std::array<ConvertTo, kPlainFormats> conversions_of(const std::tuple<To...>& /*all*/) {
  return {convert_all<From, To>...};
}
template <class... From>
constexpr std::array<std::array<ConvertTo, kPlainFormats>, kPlainFormats> conversions(
    const std::tuple<From...>& all) {
  return {conversions_of<From>(all)...};
}
constexpr auto kConversions = conversions(PlainFormats());

constexpr const Entry& entry(DType type) { return kTable[static_cast<size_t>(type)]; }

bool Sum(const void* const* slots, size_t count, DType type, float factor, float* out, size_t n) {
  const bool finite = entry(type).sum(slots, count, factor, out, n);
  if (!finite) make_nans_canonical(out, n);
  return finite;
}

bool HasNonfinite(const void* slot, DType type, size_t n) {
  return entry(type).has_nonfinite(slot, n);
}

void Convert(const void* from, DType from_type, void* to, DType to_type, size_t n) {
  kConversions[static_cast<size_t>(from_type)][static_cast<size_t>(to_type)](from, to, n);
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub::kernels {

HWY_EXPORT(Sum);
HWY_EXPORT(HasNonfinite);
HWY_EXPORT(Convert);

bool sum(std::span<const void* const> slots, DType dtype, float factor, float* out,
         size_t elements) {
  if (slots.empty() || elements == 0) {
    std::fill_n(out, elements, 0.0f);
    return true;
  }
  return HWY_DYNAMIC_DISPATCH(Sum)(slots.data(), slots.size(), dtype, factor, out, elements);
}

int find_nonfinite(std::span<const void* const> slots, DType dtype, size_t elements) {
  for (size_t s = 0; s < slots.size(); ++s) {
    if (HWY_DYNAMIC_DISPATCH(HasNonfinite)(slots[s], dtype, elements)) return static_cast<int>(s);
  }
  return -1;
}

void convert(const void* from, DType from_dtype, void* to, DType to_dtype, size_t elements) {
  if (elements == 0) return;
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, elements * bytes_of(to_dtype));
  } else {
    HWY_DYNAMIC_DISPATCH(Convert)(from, from_dtype, to, to_dtype, elements);
  }
}

}  // namespace phub::kernels
#endif

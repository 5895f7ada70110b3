// sum, find_nonfinite and convert. Sums keep the accumulators in registers: a block of four vectors
// runs through all slots before the next block, so that every slot is read once and `out` written
// once. More than kGroup slots go in groups over pieces that stay in the L1 cache, because
// hardware prefetchers and registers follow only so many streams.
#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sum.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/formats/formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

constexpr size_t kGroup = 8;
constexpr size_t kPiece = 4096;  // elements: 16 KiB of f32

// Into L1, where a slot that is in L2 already loses nothing by it (into L2 it costs half as much
// again).
HWY_INLINE void prefetch_slot(const void* from, size_t bytes) { prefetch<1024, 3>(from, bytes); }

// Adds slots [0, kSlots) from element `i` on; kResume continues the sums that are in `out`. What is
// accumulated in `largest` tells later whether all results were finite.
template <class Format, size_t kSlots, bool kResume>
struct Adder {
  using T = typename Format::T;

  template <class D>
  HWY_INLINE hn::Vec<D> start(D d, size_t i) const {
    if constexpr (kResume) {
      return hn::LoadU(d, out + i);
    } else {
      return Format::load(d, slots[0] + i);
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
    for (size_t s = kResume ? 0 : 1; s < kSlots; ++s) a = hn::Add(a, Format::load(d, slots[s] + i));
    finish(d, a, i, largest);
  }

  template <class D>
  HWY_INLINE void four(D d, size_t i, hn::Vec<I32<D>>& largest) const {
    const size_t n = hn::Lanes(d);
    const size_t bytes = 4 * n * sizeof(T);
    if constexpr (!kResume) prefetch_slot(slots[0] + i, bytes);
    auto a0 = start(d, i);
    auto a1 = start(d, i + n);
    auto a2 = start(d, i + 2 * n);
    auto a3 = start(d, i + 3 * n);
    HWY_UNROLL(8)
    for (size_t s = kResume ? 0 : 1; s < kSlots; ++s) {
      const T* from = slots[s] + i;
      prefetch_slot(from, bytes);
      a0 = hn::Add(a0, Format::load(d, from));
      a1 = hn::Add(a1, Format::load(d, from + n));
      a2 = hn::Add(a2, Format::load(d, from + 2 * n));
      a3 = hn::Add(a3, Format::load(d, from + 3 * n));
    }
    finish(d, a0, i, largest);
    finish(d, a1, i + n, largest);
    finish(d, a2, i + 2 * n, largest);
    finish(d, a3, i + 3 * n, largest);
  }

  const T* slots[kSlots];
  float factor;
  float* out;
};

// Returns true if every result is finite.
template <class Format, size_t kSlots, bool kResume>
bool add_group(const void* const* slots, size_t offset, float factor, float* out, size_t n) {
  using T = typename Format::T;
  Adder<Format, kSlots, kResume> adder;
  for (size_t s = 0; s < kSlots; ++s) adder.slots[s] = static_cast<const T*>(slots[s]) + offset;
  adder.factor = factor;
  adder.out = out;

  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const size_t lanes = hn::Lanes(d);
  auto largest = hn::Zero(I32<decltype(d)>());
  auto largest1 = hn::Zero(I32<decltype(d1)>());
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) adder.four(d, i, largest);
  for (; i + lanes <= n; i += lanes) adder.one(d, i, largest);
  for (; i < n; ++i) adder.one(d1, i, largest1);
  return hn::AllTrue(I32<decltype(d)>(),
                     hn::Lt(largest, hn::Set(I32<decltype(d)>(), kInfinityBits))) &&
         hn::GetLane(largest1) < kInfinityBits;
}

using AddGroup = bool (*)(const void* const*, size_t, float, float*, size_t);

template <class Format, bool kResume>
bool add_up_to_eight(size_t count, const void* const* slots, size_t offset, float factor,
                     float* out, size_t n) {
  static constexpr AddGroup kTable[kGroup] = {
      add_group<Format, 1, kResume>, add_group<Format, 2, kResume>, add_group<Format, 3, kResume>,
      add_group<Format, 4, kResume>, add_group<Format, 5, kResume>, add_group<Format, 6, kResume>,
      add_group<Format, 7, kResume>, add_group<Format, 8, kResume>};
  return kTable[count - 1](slots, offset, factor, out, n);
}

// The multiplication by the factor belongs to the last group. An infinity or NaN of an earlier
// group is still one in the end.
template <class Format>
bool sum_slots(const void* const* slots, size_t count, float factor, float* out, size_t n) {
  if (count <= kGroup) return add_up_to_eight<Format, false>(count, slots, 0, factor, out, n);
  bool finite = true;
  for (size_t begin = 0; begin < n; begin += kPiece) {
    const size_t piece = std::min(kPiece, n - begin);
    float* to = out + begin;
    finite &= add_up_to_eight<Format, false>(kGroup, slots, begin, 1.0f, to, piece);
    for (size_t done = kGroup; done < count; done += kGroup) {
      const size_t group = std::min(kGroup, count - done);
      const float last = done + group == count ? factor : 1.0f;
      finite &= add_up_to_eight<Format, true>(group, slots + done, begin, last, to, piece);
    }
  }
  return finite;
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

template <class Format>
bool has_nonfinite(const void* values, size_t n) {
  using Bits = std::remove_const_t<decltype(Format::kExponent)>;
  return has_exponent<Bits>(static_cast<const Bits*>(values), Format::kExponent, n);
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
  bool (*has_nonfinite)(const void* values, size_t n);
  std::array<void (*)(const void* from, void* to, size_t n), kFormats.size()> convert_to;
};

template <class Format, class... To>
constexpr Entry entry_of(const std::tuple<To...>& /*all*/) {
  return {sum_slots<Format>, has_nonfinite<Format>, {convert_all<Format, To>...}};
}
template <class... Format>
constexpr std::array<Entry, sizeof...(Format)> table_of(const std::tuple<Format...>& all) {
  return {entry_of<Format>(all)...};
}
// In the order of enum DType.
constexpr auto kTable = table_of(Formats());

constexpr const Entry& entry(DType type) { return kTable[static_cast<size_t>(type)]; }

bool Sum(const void* const* slots, size_t count, DType type, float factor, float* out, size_t n) {
  const bool finite = entry(type).sum(slots, count, factor, out, n);
  if (!finite) make_nans_canonical(out, n);
  return finite;
}

bool HasNonfinite(const void* values, DType type, size_t n) {
  return entry(type).has_nonfinite(values, n);
}

void Convert(const void* from, DType from_type, void* to, DType to_type, size_t n) {
  entry(from_type).convert_to[static_cast<size_t>(to_type)](from, to, n);
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
  if (slots.empty()) {
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

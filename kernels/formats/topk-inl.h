// topk and the other sparse formats: the elements of the largest magnitude, each with its index.
#if defined(PHUB_KERNELS_FORMATS_TOPK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_TOPK_INL_H_
#undef PHUB_KERNELS_FORMATS_TOPK_INL_H_
#else
#define PHUB_KERNELS_FORMATS_TOPK_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/formats/int2-inl.h"
#include "kernels/formats/int4-inl.h"
#include "kernels/number-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

struct TopKEntry {
  size_t index;
  float value;
};

// What is read of a slot.

// Entries of 32 bits: an index, and a bf16.
struct Bf16Entries {
  Bf16Entries(const void* slot, DType /*type*/, size_t /*elements*/)
      : at(static_cast<const char*>(slot)) {}
  HWY_INLINE TopKEntry operator[](size_t i) const {
    uint32_t bits;
    std::memcpy(&bits, at + i * sizeof(bits), sizeof(bits));
    return {bits & 0xFFFF, std::bit_cast<float>(bits & 0xFFFF0000)};
  }

  const char* at;
};

// Indices, then codes of 4 bits, then the scale.
struct Int4Entries {
  Int4Entries(const void* slot, DType type, size_t elements)
      : indices(static_cast<const uint8_t*>(slot)),
        codes(indices + sparse_codes_offset(top_k(type, elements))) {
    std::memcpy(&scale, indices + scale_offset(type, elements), sizeof(scale));
  }
  HWY_INLINE TopKEntry operator[](size_t i) const {
    uint16_t index;
    std::memcpy(&index, indices + i * sizeof(index), sizeof(index));
    const hn::CappedTag<float, 1> d1;
    return {index, hn::GetLane(Int4::unpack(d1, codes, i)) * scale};
  }

  const uint8_t* indices;
  const uint8_t* codes;
  float scale;
};

// Indices, then codes of 2 bits, then the levels.
struct Int2Entries {
  Int2Entries(const void* slot, DType type, size_t elements)
      : indices(static_cast<const uint8_t*>(slot)),
        codes(indices + sparse_codes_offset(top_k(type, elements))),
        levels(levels_of(indices + scale_offset(type, elements))) {}
  HWY_INLINE TopKEntry operator[](size_t i) const {
    uint16_t index;
    std::memcpy(&index, indices + i * sizeof(index), sizeof(index));
    return {index, levels.values[load_two_bits(codes, i)]};
  }
  static Levels levels_of(const uint8_t* at) {
    uint32_t bits;
    std::memcpy(&bits, at, sizeof(bits));
    return Levels(bits);
  }

  const uint8_t* indices;
  const uint8_t* codes;
  Levels levels;
};

// Read one by one: each is added elsewhere.
template <DType kTypeOf>
struct TopK {
  static constexpr DType kType = kTypeOf;
  static constexpr Coding kCoding = format_of(kType).coding;
  using Entries = std::conditional_t<
      kCoding == Coding::kSparse, Bf16Entries,
      std::conditional_t<kCoding == Coding::kSparseScaled, Int4Entries, Int2Entries>>;

  template <typename Visit>
  static HWY_INLINE void for_each(const void* slot, size_t elements, Visit visit) {
    if (elements == 0) return;
    const Entries entries(slot, kType, elements);
    for (size_t i = 0; i < top_k(kType, elements); ++i) {
      const TopKEntry e = entries[i];
      visit(e.index < elements ? e
                               : TopKEntry{elements - 1, std::numeric_limits<float>::quiet_NaN()});
    }
  }

  static void add(const void* slot, float* out, size_t elements) {
    for_each(slot, elements, [out](const TopKEntry& e) { out[e.index] += e.value; });
  }

  static bool has_nonfinite(const void* slot, size_t elements) {
    bool found = false;
    for_each(slot, elements, [&found](const TopKEntry& e) {
      found |= (std::bit_cast<uint32_t>(e.value) & kInfinityBits) == kInfinityBits;
    });
    return found;
  }
};

// Chooses the elements that are sent: those of a larger magnitude than `threshold`, and among those
// as large the ones before `ties_end`.
struct TopKChoice {
  int32_t threshold;
  size_t ties_end;
};

// The elements of a chunk that are sent.
struct Chosen {
  // Calls visit() with each of those from element i on that fit one vector, in ascending order.
  template <class D, class Visit>
  HWY_INLINE void visit_vector(D /*d*/, size_t i, const Visit& visit) const {
    const I32<D> di;
    const auto some = hn::Gt(hn::Load(di, magnitudes + i), hn::Set(di, choice.threshold - 1));
    if (hn::AllFalse(di, some)) return;
    uint64_t lanes = 0;
    hn::StoreMaskBits(di, some, reinterpret_cast<uint8_t*>(&lanes));
    for (; lanes != 0; lanes &= lanes - 1) {
      const size_t at = i + std::countr_zero(lanes);
      if (magnitudes[at] > choice.threshold || at < choice.ties_end) visit(at);
    }
  }

  // The magnitude of each.
  template <class Visit>
  void for_each(const Visit& visit) const {
    const hn::ScalableTag<float> d;
    for (size_t i = 0; i < elements; i += hn::Lanes(d)) {
      visit_vector(d, i, [&](size_t at) { visit(std::bit_cast<float>(magnitudes[at])); });
    }
  }
  bool finite() const { return largest < kInfinityBits; }

  const int32_t* magnitudes;  // as TopKChooser has them
  size_t elements;
  int32_t largest;
  TopKChoice choice;
};

class TopKChooser {
 public:
  // `magnitudes` are whole numbers, which have the same order. Vectors are read to their end: the
  // numbers behind the last element up to there are -1.
  TopKChooser(const int32_t* magnitudes, size_t elements)
      : magnitudes_(magnitudes), elements_(elements) {}

  // The threshold is the largest magnitude that at least k elements reach, found bit by bit. Mostly
  // some number that exactly k reach is met long before the last bit.
  TopKChoice choose(size_t k, int32_t largest) const {
    int32_t threshold = 0;
    size_t reached = elements_;
    for (int bit = std::bit_width(static_cast<uint32_t>(largest)) - 1; bit >= 0 && reached != k;
         --bit) {
      const int32_t higher = threshold | int32_t{1} << bit;
      const size_t count = count_from(higher);
      if (count < k) continue;
      threshold = higher;
      reached = count;
    }
    if (reached == k) return {threshold - 1, 0};
    return {threshold, end_of_ties(threshold, k - count_from(threshold + 1))};
  }

 private:
  size_t count_from(int32_t least) const {
    const hn::ScalableTag<int32_t> d;
    const auto below = hn::Set(d, least - 1);
    size_t count = 0;
    for (size_t i = 0; i < elements_; i += hn::Lanes(d)) {
      count += hn::CountTrue(d, hn::Gt(hn::Load(d, magnitudes_ + i), below));
    }
    return count;
  }

  // The index behind the first `count` of those that are exactly `magnitude`.
  size_t end_of_ties(int32_t magnitude, size_t count) const {
    size_t i = 0;
    for (; count > 0; ++i) count -= magnitudes_[i] == magnitude ? 1 : 0;
    return i;
  }

  const int32_t* magnitudes_;
  size_t elements_;
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// topk: the elements of the largest magnitude, each with its index.
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

#include "kernels/number-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

struct TopKEntry {
  size_t index;
  float value;
};

// One by one: each is added elsewhere.
struct TopK {
  static constexpr DType kType = DType::kTopK;

  // REQUIRES: elements > 0.
  static HWY_INLINE TopKEntry entry(const void* slot, size_t i, size_t elements) {
    uint32_t bits;
    std::memcpy(&bits, static_cast<const char*>(slot) + i * sizeof(bits), sizeof(bits));
    const size_t index = bits & 0xFFFF;
    if (index >= elements) return {elements - 1, std::numeric_limits<float>::quiet_NaN()};
    return {index, std::bit_cast<float>(bits & 0xFFFF0000)};
  }

  static void add(const void* slot, float* out, size_t elements) {
    const size_t entries = top_k(elements);
    for (size_t i = 0; i < entries; ++i) {
      const TopKEntry e = entry(slot, i, elements);
      out[e.index] += e.value;
    }
  }

  static bool has_nonfinite(const void* slot, size_t elements) {
    bool found = false;
    for (size_t i = 0; i < top_k(elements); ++i) {
      const auto bits = std::bit_cast<uint32_t>(entry(slot, i, elements).value);
      found |= (bits & kInfinityBits) == kInfinityBits;
    }
    return found;
  }
};

// Chooses the elements that are sent: those of a larger magnitude than `threshold`, and among those
// as large the ones before `ties_end`.
struct TopKChoice {
  int32_t threshold;
  size_t ties_end;
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

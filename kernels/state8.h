// Optimizer state in 8 bits per element, as Dettmers et al., 8-bit Optimizers via Block-wise
// Quantization (2021), section 2: a block of 256 elements is 256 codes and an f32, its scale, which
// is the largest magnitude in the block. A code stands for a value of a map, times the scale.
//
// The maps are the paper's dynamic ones: 7 decades, with 1, 2, 4, … 64 values each for either sign
// (first moments, momentum), or 2, 4, … 128 (second moments). Every value is rounded to 12 bits, so
// that an f32 holds the middle of two exactly. The largest value is 1. An element becomes the
// nearest value; in the middle, the larger. But a second moment that is not 0 never becomes 0,
// where a step would divide by ε alone.
//
// Encoding what was decoded gives the same codes and scales again. A scale below kLeastScale is 0,
// and so is its block. If an element of a block is not finite, the scale is a NaN, and the whole
// block decodes to NaN.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace phub::kernels {

inline constexpr size_t kStateBlock = 256;
inline constexpr float kLeastScale = 0x1p-100f;

// One state array of a chunk. The scale of a last block with fewer elements lies elsewhere, so that
// the scales of whole blocks of any chunks can follow each other as the elements do.
struct State8 {
  uint8_t* codes = nullptr;  // null: there is no such array
  float* scales = nullptr;
  float* last = nullptr;
  bool is_signed = false;  // else elements below 0 become 0

  explicit operator bool() const { return codes != nullptr; }
  // The part from that element on, which has the last block of that number. REQUIRES: a block
  // begins there.
  State8 from(uint64_t element, uint64_t nth_last = 0) const {
    if (!codes) return {};
    return {codes + element, scales + element / kStateBlock, last + nth_last, is_signed};
  }
};
// The bytes of an array of so many elements in so many chunks: codes, scales of whole blocks, and
// the scale of each chunk's last block. REQUIRES: elements is a multiple of 4.
constexpr uint64_t state8_bytes(uint64_t elements, uint64_t chunks) {
  return elements + (elements / kStateBlock + chunks) * sizeof(float);
}
// The array in memory of that size. `elements` is that of all chunks.
State8 state8_in(void* memory, uint64_t elements, Optimizer optimizer, size_t array);

void encode_state(const float* from, size_t elements, const State8& to);
void decode_state(const State8& from, size_t elements, float* to);
// Makes of each element what decoding gives after encoding.
void round_state(float* state, size_t elements, bool is_signed);

// kernels::optimize() with states of 8 bits. The step computes with decoded states and with new
// ones that are not rounded yet.
void optimize(const Step& step, const float* g, float* params, const State8& state0,
              const State8& state1, size_t elements, void* out, DType out_dtype, Store store);

// A map, and a table that finds the nearest value of a magnitude by the upper bits of its f32. Such
// a bucket has at most one middle of two values: its code is that of the bucket's begin, or one
// more from the middle on. The middle's low 8 bits are 0; a bucket has the code there.
template <bool kIsSigned>
struct StateMap {
  static constexpr size_t kValues = kIsSigned ? 128 : 256;  // of one sign
  static constexpr int kShift = kIsSigned ? 17 : 16;
  static constexpr int32_t kOne = 0x3F800000, kInfinity = 0x7F800000;

  static constexpr std::array<float, kValues> values() {
    constexpr double kDecades[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
    std::array<float, kValues> all{};
    size_t at = 1, count = kValues / 128;
    for (const double decade : kDecades) {
      for (size_t i = 0; i < count; ++i) {
        const double within = (static_cast<double>(i) + 0.5) / static_cast<double>(count);
        const auto value = static_cast<float>(decade * (0.1 + 0.9 * within));
        all[at++] = std::bit_cast<float>((std::bit_cast<uint32_t>(value) + 0x800) & ~0xFFFu);
      }
      count *= 2;
    }
    all[kValues - 1] = 1;
    return all;
  }
  static constexpr std::array<float, kValues> kMap = values();

  // The bits of the magnitude at which the code above `code` begins.
  static constexpr int32_t middle(size_t code) {
    if (code + 1 >= kValues) return kInfinity;
    if (!kIsSigned && code == 0) return 0x100;
    return std::bit_cast<int32_t>((kMap[code] + kMap[code + 1]) / 2);
  }
  // The first bucket has all magnitudes below the second one.
  static constexpr int32_t kFirst = kIsSigned ? middle(0) >> kShift : (middle(1) >> kShift) - 1;
  static constexpr size_t kBuckets = (kOne >> kShift) - kFirst + 1;

  static constexpr bool is_fine() {
    for (size_t code = 0; code + 2 < kValues; ++code) {
      const bool alone = (middle(code) >> kShift) < (middle(code + 1) >> kShift);
      if (!alone || middle(code) % 256 != 0) return false;
    }
    return middle(0) >> kShift <= kFirst && middle(1) >> kShift > kFirst;
  }

  static constexpr std::array<int32_t, kBuckets> buckets() {
    std::array<int32_t, kBuckets> all{};
    int32_t code = 0;
    for (size_t i = 0; i < kBuckets; ++i) {
      const int32_t begin = i == 0 ? 0 : (kFirst + static_cast<int32_t>(i)) << kShift;
      while (middle(static_cast<size_t>(code)) <= begin) ++code;
      all[i] = middle(static_cast<size_t>(code)) | code;
    }
    return all;
  }

  // By code; the upper half of a signed map is negative.
  static constexpr std::array<float, 256> decoded() {
    std::array<float, 256> all{};
    for (size_t code = 0; code < 256; ++code) {
      all[code] = code < kValues ? kMap[code] : -kMap[code - kValues];
    }
    return all;
  }
};

}  // namespace phub::kernels

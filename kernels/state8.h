// Optimizer state in 8 bits per element, as Dettmers et al., 8-bit Optimizers via Block-wise
// Quantization (2021), section 2: a block of 256 elements is 256 codes and an f32, its scale, which
// is the largest magnitude in the block. A code stands for a value of a map (state8_map.h), times
// the scale.
//
// An element becomes one of the two values that it lies between, the upper one as often as it is
// near to it: in the mean the state is what it was. (To the nearest value, as in the paper, states
// that change by less than half of a gap in a step stand still.) What decides is a hash of the
// element over the scale, so the codes are a function of the elements alone. A second moment that
// is not 0 never becomes 0, where a step would divide by ε alone.
//
// Encoding what was decoded gives the same codes and scales again. A scale below kLeastScale is 0,
// and so is its block. An infinite element is encoded as the largest finite number of its sign: the
// square of a finite gradient may be infinite. If an element of a block is NaN, the scale is a NaN,
// and the whole block decodes to NaN.
#pragma once

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

}  // namespace phub::kernels

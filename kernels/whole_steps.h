// The rules behind step_of_key() (whole_key.h), and what they share.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/whole_key.h"

namespace phub::kernels {

KeyStep adafactor_step(const WholeKey& key, const Hyper& h, uint64_t t, double squares,
                       const float* state, float* gradient, float* new_state);
KeyStep muon_step(const WholeKey& key, const Hyper& h, const float* state, float* gradient,
                  float* new_state, float* scratch);

inline float canonical(float x) { return x == x ? x : std::bit_cast<float>(0x7FC00000u); }

// PyTorch's lerp, which begins at the nearer end.
inline float lerp(float from, float to, float weight) {
  const float way = to - from;
  return canonical(weight < 0.5f ? from + weight * way : to - way * (1.0f - weight));
}

}  // namespace phub::kernels

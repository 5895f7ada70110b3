// Optimizer state of 8 bits as one process would keep it: piece by piece of a map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace phub::reference {

// The values of a map by code.
const std::vector<float>& state_values(bool is_signed);

struct StateCodes {
  std::vector<uint8_t> codes;
  std::vector<float> scales;  // of all blocks, the last one perhaps with fewer elements
};
StateCodes encode_state(std::span<const float> state, bool is_signed);
std::vector<float> decode_state(const StateCodes& from, bool is_signed);

// Whether the array of state may be negative.
bool is_signed_state(kernels::Optimizer optimizer, size_t array);
// Makes of each element what decoding gives after encoding.
void round_state(std::vector<float>& state, bool is_signed);

}  // namespace phub::reference

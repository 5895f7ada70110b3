// The magnitude of a gradient says how much it matters: its norm relative to that of the parameters
// it will change, chunk by chunk (Poseidon, section 4.3.3: "messages most significant for algorithm
// progress").
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/slots.h"
#include "worker/session/session.h"

namespace phub {

// The elements of a key, in a plain format; or its slots, in a coded format or if it says so.
struct KeyBytes {
  const std::byte* data = nullptr;
  kernels::DType format = kernels::DType::kF32;
  bool in_slots = false;
  const KeySpec* compact = nullptr;  // not null: `data` are slots with its factors or rows
};

// The shape of this chunk's slot: the factors or rows that it holds. REQUIRES: is_compact(key).
kernels::SlotShape compact_shape(const KeySpec& key, const ChunkLayout& chunk);

// One for each chunk of the key, in `out`: |gradient| / |parameters|, with 0 / 0 = 0; without
// `parameters.data`, |gradient|. Factors are not multiplied for it: the sum of |left| · |right|,
// which |gradient| does not exceed, counts. A value that is not a number counts as infinite.
void relative_magnitudes(const Session& session, size_t key, const KeyBytes& gradient,
                         const KeyBytes& parameters, std::vector<float>& out);

}  // namespace phub

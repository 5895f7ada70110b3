// A rank's state as the bytes of its part of a checkpoint. The box does not look into them.
//
//   "PHUBRS1\n"  entries: u32  { name bytes: u32, bytes: u64, name, bytes } …   little-endian
//
// Pure functions, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "worker/worker.h"

namespace phub {

// Throws Error(kInvalid) if a name has not 1 to 255 bytes, or all is more than so many.
std::string pack(const RankState& state, uint64_t most_bytes);

// Throws Error(kInvalid) if pack() did not make `part`.
RankState unpack(std::string_view part);

}  // namespace phub

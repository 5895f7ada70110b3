// Static offsets for buffers that are used in a fixed, circular sequence of phases: those that are
// live in a common phase never overlap.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace phub::geeps {

// Live in `length` phases from `first_phase` on, over the end of the circle if need be.
// REQUIRES: 0 < length <= phases, first_phase < phases.
struct Span {
  uint32_t first_phase;
  uint32_t length;
  uint64_t bytes;
  bool operator==(const Span&) const = default;
};

struct Packing {
  std::vector<uint64_t> offsets;  // by span
  uint64_t height = 0;            // where the highest ends
};

// A good packing, not always the best (that is NP-hard): the lowest of several first fits.
Packing pack(std::span<const Span> spans, uint32_t phases);

// Bytes that are live in each phase: no packing is lower than the most of these.
std::vector<uint64_t> loads(std::span<const Span> spans, uint32_t phases);

}  // namespace phub::geeps

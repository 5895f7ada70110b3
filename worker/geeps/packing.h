// Static offsets for buffers that are used in a fixed, circular sequence of phases. Buffers that
// are live in the same phase never overlap.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace phub::geeps {

// A buffer that is live in `length` phases from `first_phase` on, around the circle.
// REQUIRES: 0 < length <= phases, first_phase < phases.
struct Span {
  uint32_t first_phase;
  uint32_t length;
  uint64_t bytes;
  bool operator==(const Span&) const = default;
};

struct Packing {
  std::vector<uint64_t> offsets;  // by span
  uint64_t height = 0;            // the end of the highest buffer
};

// Returns the lowest of several first fits: not always the best packing, which is NP-hard to find.
Packing pack(std::span<const Span> spans, uint32_t phases);
// Returns the same, or nullopt if that is higher than `most`, which takes less time.
std::optional<Packing> pack(std::span<const Span> spans, uint32_t phases, uint64_t most);

// The live bytes of each phase. No packing is lower than the largest.
std::vector<uint64_t> loads(std::span<const Span> spans, uint32_t phases);

}  // namespace phub::geeps

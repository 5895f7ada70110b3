// The chunks that a job sends through a switch that adds, as workers and box derive them from the
// plan: the same chunks, in the same order, with the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/layout.h"
#include "transport/switch/packet.h"

namespace phub {

// The chunks of one stream: those of its queues whose format is int32, in the order of the keys.
// SwitchHeader::chunk is a place in this list.
inline std::vector<uint32_t> switch_chunks(const Layout& layout, std::span<const uint32_t> queues) {
  std::vector<uint32_t> chunks;
  for (const uint32_t queue : queues) {
    for (const uint32_t id : layout.queue_chunks[queue]) {
      if (layout.key_format[layout.chunks[id].key].name == kInt32) chunks.push_back(id);
    }
  }
  std::ranges::sort(chunks);
  return chunks;
}

constexpr uint32_t switch_parts(uint32_t elements) {
  return (elements + kSwitchElements - 1) / kSwitchElements;
}

// A bit for each of the ranks 0 to `ranks` - 1. REQUIRES: at most kSwitchWorkers.
constexpr uint64_t switch_workers(uint32_t ranks) {
  return ranks == kSwitchWorkers ? ~uint64_t{0} : (uint64_t{1} << ranks) - 1;
}

}  // namespace phub

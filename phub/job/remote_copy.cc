#include "phub/job/remote_copy.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "phub/job/memory.h"
#include "phub/job_rules.h"
#include "transport/box_memory.h"

namespace phub {

RemoteCopy::Size RemoteCopy::size_of(const Plan& plan, uint32_t box, const JobSpec& spec,
                                     uint64_t saved_ranks) {
  const uint64_t ranks = std::max<uint64_t>(spec.max_ranks, saved_ranks);
  Size size{.arrays = saved_arrays_of(spec),
            .chunks = plan.chunks.size(),
            .clock_ranks = rules_of(spec).lock_step() ? 0 : static_cast<uint32_t>(ranks),
            .shelves = spec.branches,
            .arrays_of_shelf = optimized_arrays_of(spec)};
  for (const ChunkLayout& chunk : plan.chunks) {  // as part_of() counts them
    if (plan.cores[plan.queues[chunk.queue].core].box != box) continue;
    size.elements = std::max(size.elements, chunk.box_offset + plan.box_slot(chunk));
  }
  return size;
}

RemoteCopy::RemoteCopy(const Size& size, uint32_t os_node, std::string_view what)
    : size_(size), memory_(allocate(size.bytes(), os_node, what)) {}

SavedClocks RemoteCopy::clocks() const {
  auto* const steps = reinterpret_cast<uint64_t*>(array(0, size_.all_arrays()));
  return {.steps = steps,
          .latest = size_.clock_ranks > 0 ? steps + size_.chunks : nullptr,
          .ranks = size_.clock_ranks};
}

uint64_t* RemoteCopy::steps_of_shelf(uint32_t shelf) const {
  return clocks().steps + SavedClocks::bytes(size_.chunks, size_.clock_ranks) / sizeof(uint64_t) +
         (shelf - 1) * size_.chunks;
}

SavedImage RemoteCopy::image() const {
  std::span<std::byte> rest = memory_.bytes().first(size_.bytes());
  std::vector<std::span<std::byte>> memory;
  const auto add = [&](uint64_t bytes) {
    memory.push_back(rest.first(bytes));
    rest = rest.subspan(bytes);
  };
  for (size_t array = 0; array < size_.all_arrays(); ++array) add(size_.elements * sizeof(float));
  add(SavedClocks::bytes(size_.chunks, size_.clock_ranks));
  for (uint32_t shelf = 0; shelf < size_.shelves; ++shelf) add(size_.chunks * sizeof(uint64_t));
  return SavedImage(std::move(memory));
}

}  // namespace phub

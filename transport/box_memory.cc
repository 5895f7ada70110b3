#include "transport/box_memory.h"

#include <stdexcept>

#include "transport/error.h"
#include "transport/wire.h"

namespace phub {
namespace {

// Equal addresses of all ranks' slots modulo 4 KiB would compete for the same cache sets. Less than
// a page, so that with the padding between nodes (phub/plan/plan.h) no page holds bytes of two.
constexpr uint32_t kSkewBytes = 128;
constexpr uint32_t kSkewRanks = 31;
constexpr uint64_t kMaxBytes = 1ull << 47;

uint64_t skew_of(uint32_t rank) { return uint64_t{rank % kSkewRanks} * kSkewBytes; }

}  // namespace

const LinkLayout& checked(const LinkLayout& layout, std::string_view transport) {
  const auto expect = [transport](bool condition, const char* name, uint64_t value) {
    if (!condition)
      fail(ErrorCode::kInvalid, "{} job: {} {} is out of range", transport, name, value);
  };
  const size_t queues = layout.queue_chunks.size();
  expect(layout.max_ranks >= 1 && layout.max_ranks <= kMaxRanks, "max_ranks", layout.max_ranks);
  expect(layout.first_rank <= layout.ranks_end() && layout.ranks_end() <= layout.max_ranks,
         "end of the box's ranks", layout.ranks_end());
  expect(layout.cores >= 1, "cores", layout.cores);
  expect(queues >= 1, "number of queues", queues);
  if (layout.queue_core.empty()) {
    expect(queues == layout.cores, "number of queues", queues);
  } else {
    expect(layout.queue_core.size() == queues, "number of queues with a core",
           layout.queue_core.size());
  }
  for (size_t q = 0; q < queues; ++q) {
    const uint32_t core = layout.core_of(static_cast<uint32_t>(q));
    expect(core < layout.cores, "core of a queue", core);
    expect(q == 0 || core >= layout.core_of(static_cast<uint32_t>(q - 1)), "order of queue", q);
    expect(layout.queue_chunks[q] <= kMaxChunksPerQueue, "chunks of a queue",
           layout.queue_chunks[q]);
  }
  expect(layout.slots_bytes >= 1 && layout.slots_bytes <= kMaxBytes, "slots_bytes",
         layout.slots_bytes);
  expect(layout.results_bytes >= 1 && layout.results_bytes <= kMaxBytes, "results_bytes",
         layout.results_bytes);
  expect(layout.result_copies == 1 || layout.result_copies == layout.max_ranks, "result_copies",
         layout.result_copies);
  for (const NodeRun& run : layout.runs) {
    const uint64_t element_bytes = layout.result_bytes + layout.difference_bytes;
    expect((run.first + run.count) * element_bytes <= layout.results_bytes,
           "end of a node's elements", run.first + run.count);
  }
  for (const NodeRun& run : layout.slot_runs) {
    expect(run.first + run.count <= layout.slots_bytes, "end of a node's slots",
           run.first + run.count);
  }
  return layout;
}

numa::Memory allocate(uint64_t bytes, uint32_t os_node, std::string_view what) {
  try {
    return {bytes, os_node};
  } catch (const std::runtime_error& error) {
    fail(ErrorCode::kFull, "{}: {}", what, error.what());
  }
}

BoxMemory::BoxMemory(const LinkLayout& layout, std::string_view transport)
    : slots_bytes_(checked(layout, transport).slots_bytes),
      first_rank_(layout.first_rank),
      windowed_(layout.windowed) {
  const uint32_t node = layout.core_node.empty() ? 0 : layout.core_node.front();
  const std::string what = fmt::format("{} job of {} ranks", transport, layout.max_ranks);
  results_ = allocate(layout.all_results_bytes(), node, what);
  place_results(results(), layout);
  for (uint32_t rank = first_rank_; rank < layout.ranks_end() && !layout.windowed; ++rank) {
    slots_.push_back(allocate(skew_of(rank) + slots_bytes_, node, what));
    place(slots(rank), 1, layout.slot_runs);
  }
}

std::span<std::byte> BoxMemory::slots(uint32_t rank) const {
  if (windowed_) return {};
  PHUB_CHECK(rank >= first_rank_ && rank - first_rank_ < slots_.size());
  return slots_[rank - first_rank_].bytes().subspan(skew_of(rank), slots_bytes_);
}

}  // namespace phub

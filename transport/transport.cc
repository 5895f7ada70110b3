#include "transport/transport.h"

#include <unistd.h>

#include <cstring>

#include "numa/memory.h"
#include "transport/error.h"
#include "transport/trace.h"

namespace phub {

// Includes the pages on which a run begins and ends. Only in a layout by keys does a page hold
// bytes of two nodes; there either node will do.
void place(std::span<const std::byte> array, size_t element_bytes, std::span<const NodeRun> runs) {
  if (array.empty()) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto base = reinterpret_cast<uintptr_t>(array.data());
  for (const NodeRun& run : runs) {
    const uintptr_t begin = (base + run.first * element_bytes) / page * page;
    const uintptr_t end = (base + (run.first + run.count) * element_bytes + page - 1) / page * page;
    numa::prefer_node({reinterpret_cast<const std::byte*>(begin), end - begin}, run.os_node);
  }
}

void place_results(std::span<const std::byte> results, const LinkLayout& layout) {
  const uint64_t element_bytes = layout.result_bytes + layout.difference_bytes;
  const uint64_t own_bytes = layout.results_bytes / element_bytes * layout.result_bytes;
  for (uint32_t copy = 0; copy < layout.result_copies; ++copy) {
    const auto of_copy = results.subspan(copy * layout.results_bytes, layout.results_bytes);
    place(of_copy.first(own_bytes), layout.result_bytes, layout.runs);
    place(of_copy.subspan(own_bytes), layout.difference_bytes, layout.runs);
  }
}

uint64_t BoxEndpoint::now_ns() const { return trace_now_ns(); }

void BoxEndpoint::use_window(SlotWindow& /*window*/) {
  fail(ErrorCode::kInvalid, "this transport writes gradients to fixed slots, not to a window");
}

std::unique_ptr<BoxLink> Transport::open_job_in(std::shared_ptr<const BoxMemory> /*memory*/,
                                                const LinkLayout& /*layout*/) {
  fail(ErrorCode::kInvalid, "transport '{}' takes no memory of another one's", name());
}

Offer BoxLink::reconnect(uint32_t rank) {
  fail(ErrorCode::kInvalid, "rank {}: this transport cannot make a broken connection again", rank);
}

void Endpoint::wake_for(int /*fd*/) {
  fail(ErrorCode::kInvalid, "this transport's endpoints wake for nothing else");
}

Endpoint& WorkerLink::endpoint_of(uint32_t thread) {
  PHUB_CHECK(thread == 0);
  return endpoint();
}

void WorkerLink::write_gradients(uint64_t offset, std::span<const std::byte> bytes) {
  std::memcpy(gradients().data() + offset, bytes.data(), bytes.size());
}

void WorkerLink::reconnect(const Offer& offer) {
  fail(ErrorCode::kFenced, "transport '{}' cannot make a broken connection again", offer.transport);
}

}  // namespace phub

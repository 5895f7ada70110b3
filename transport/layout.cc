#include "transport/layout.h"

#include <algorithm>

#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {
namespace {

// A node begins on a page whatever an element's size, and a page behind the end of the one before:
// slots are shifted by less than a page for the sake of the cache (box_memory.cc).
constexpr uint64_t kNodeAlignment = 4096 / 2;

}  // namespace

Layout lay_out_keys(std::span<const KeySpec> keys, uint32_t chunk_elements) {
  Layout layout;
  layout.key_offset.reserve(keys.size());
  for (uint32_t k = 0; k < keys.size(); ++k) {
    layout.key_offset.push_back(layout.total_elements);
    for (uint64_t at = 0; at < keys[k].elements; at += chunk_elements) {
      const auto elements =
          static_cast<uint32_t>(std::min<uint64_t>(chunk_elements, keys[k].elements - at));
      layout.chunks.push_back({.key = k,
                               .elements = elements,
                               .key_element = at,
                               .offset = layout.total_elements + at});
    }
    layout.total_elements += slot_elements(keys[k].elements);
  }
  return layout;
}

void lay_out_queues(Layout& layout, std::vector<std::vector<uint32_t>> queue_chunks,
                    std::vector<uint64_t> queue_offset) {
  const bool as_worker = queue_offset.empty();
  if (!as_worker && queue_offset.size() != queue_chunks.size()) {
    fail(ErrorCode::kInvalid, "{} queues have {} offsets", queue_chunks.size(),
         queue_offset.size());
  }
  std::vector<bool> routed(layout.chunks.size());
  uint64_t count = 0;
  layout.box_elements = as_worker ? layout.total_elements : 0;
  for (uint32_t q = 0; q < queue_chunks.size(); ++q) {
    uint64_t at = as_worker ? 0 : queue_offset[q];
    if (at > kMaxElements) fail(ErrorCode::kInvalid, "queue {} begins at element {}", q, at);
    for (uint32_t i = 0; i < queue_chunks[q].size(); ++i, ++count) {
      const uint32_t id = queue_chunks[q][i];
      if (id >= layout.chunks.size() || routed[id]) {
        fail(ErrorCode::kInvalid, "queue {}: chunk {} does not exist or is in another queue", q,
             id);
      }
      routed[id] = true;
      ChunkLayout& chunk = layout.chunks[id];
      chunk.queue = q;
      chunk.index = i;
      chunk.box_offset = as_worker ? chunk.offset : at;
      at += layout.box_slot(chunk);
    }
    if (!as_worker) layout.box_elements = std::max(layout.box_elements, at);
  }
  if (count != layout.chunks.size()) {
    fail(ErrorCode::kInvalid, "{} of {} chunks have a queue", count, layout.chunks.size());
  }
  layout.queue_chunks = std::move(queue_chunks);
  layout.queue_offset = std::move(queue_offset);
}

std::vector<uint64_t> offsets_of_queues(const Layout& layout,
                                        std::span<const std::vector<uint32_t>> queue_chunks,
                                        std::span<const uint32_t> queue_node) {
  std::vector<uint64_t> offsets;
  offsets.reserve(queue_chunks.size());
  uint64_t at = 0;
  for (size_t q = 0; q < queue_chunks.size(); ++q) {
    if (q > 0 && queue_node[q] != queue_node[q - 1]) {
      at = (at + kNodeAlignment - 1) / kNodeAlignment * kNodeAlignment + kNodeAlignment;
    }
    offsets.push_back(at);
    for (const uint32_t id : queue_chunks[q]) at += layout.box_slot(layout.chunks[id]);
  }
  return offsets;
}

std::vector<uint64_t> slots_at_rack(const Layout& layout) {
  std::vector<uint64_t> slots{0};
  slots.reserve(layout.chunks.size() + 1);
  for (const ChunkLayout& chunk : layout.chunks) {
    slots.push_back(slots.back() + layout.box_slot(chunk));
  }
  return slots;
}

JobLayout routes_of(const Layout& layout) {
  return {.key_offset = layout.key_offset,
          .queue_chunks = layout.queue_chunks,
          .total_elements = layout.total_elements,
          .queue_offset = layout.queue_offset};
}

Layout layout_of(const JoinReply& reply) {
  const auto malformed = [](std::string_view what) {
    fail(ErrorCode::kInternal, "the server's answer does not fit together: {}", what);
  };
  const uint32_t chunk_elements = reply.spec.chunk_elements;
  if (chunk_elements == 0 || reply.first_round == 0) malformed("chunks and rounds");
  Layout layout = lay_out_keys(reply.spec.keys, chunk_elements);
  if (layout.key_offset != reply.layout.key_offset ||
      layout.total_elements != reply.layout.total_elements) {
    malformed("keys and where they begin");
  }
  layout.trailer_elements = trailer_of(reply.spec);
  try {
    lay_out_queues(layout, reply.layout.queue_chunks, reply.layout.queue_offset);
  } catch (const Error& error) {
    malformed(error.what());
  }
  return layout;
}

LinkLayout link_layout(const Layout& layout, uint32_t max_ranks, uint32_t gradient_bytes,
                       uint32_t result_bytes, uint32_t copies) {
  LinkLayout link;
  link.max_ranks = max_ranks;
  link.cores = static_cast<uint32_t>(layout.queue_chunks.size());
  for (const auto& chunks : layout.queue_chunks) {
    link.queue_chunks.push_back(static_cast<uint32_t>(chunks.size()));
  }
  link.gradient_bytes = gradient_bytes;
  link.result_bytes = result_bytes;
  link.slots_bytes = layout.box_elements * gradient_bytes;
  link.results_bytes = layout.box_elements * result_bytes;
  const bool is_rack = layout.trailer_elements > 0;
  const uint64_t sent = is_rack ? slots_at_rack(layout).back() : layout.total_elements;
  link.worker_gradients_bytes = sent * gradient_bytes;
  link.worker_results_bytes = layout.total_elements * result_bytes;
  link.result_copies = copies;
  return link;
}

}  // namespace phub

#include "transport/layout.h"

#include <algorithm>

#include "transport/control/messages.h"
#include "transport/error.h"
#include "transport/format_schedule.h"

namespace phub {
namespace {

// A node begins on a page whatever an element's size, and a page behind the end of the one before:
// slots are shifted by less than a page for the sake of the cache (box_memory.cc).
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kNodeAlignment = kPageBytes / 2;  // elements
constexpr uint64_t kMaxSlotsBytes = kMaxElements * sizeof(float);

static_assert(std::ranges::all_of(kSlotFormats, [](const SlotFormat& format) {
  return format.is_plain() || !format.for_results() ||
         format.bytes(kChunkAlignment) <= uint64_t{kDifferenceBytes} * kChunkAlignment;
}));

SlotFormat format_of(const KeySpec& key, std::string_view gradient_dtype) {
  if (is_factors(key)) return factor_format(key.rank_limit, static_cast<uint32_t>(key.shape[1]));
  if (is_rows(key)) {
    return row_format(key.rows_limit, static_cast<uint32_t>(key.shape[1]), key.rank_limit);
  }
  const std::string_view name = key.format.empty() ? gradient_dtype : key.format;
  if (is_schedule(name)) {
    return FormatSchedule::parse(fmt::format("key '{}'", key.name), name).slot();
  }
  const SlotFormat* format = find_slot_format(name);
  if (!format) fail(ErrorCode::kInvalid, "key '{}': there is no format '{}'", key.name, name);
  return *format;
}

// Where queues begin that take so much.
template <typename RoomOf>
std::vector<uint64_t> begins_of(std::span<const uint32_t> queue_node, uint64_t node_alignment,
                                RoomOf room_of) {
  std::vector<uint64_t> begins;
  begins.reserve(queue_node.size());
  uint64_t at = 0;
  for (size_t q = 0; q < queue_node.size(); ++q) {
    if (q > 0 && queue_node[q] != queue_node[q - 1]) {
      at = (at + node_alignment - 1) / node_alignment * node_alignment + node_alignment;
    }
    begins.push_back(at);
    at += room_of(q);
  }
  return begins;
}

}  // namespace

uint32_t element_bytes_of_all(const Layout& layout) {
  if (layout.key_format.empty() || !layout.key_format.front().is_plain()) return 0;
  if (layout.weight_bytes > 0) return 0;
  const SlotFormat& first = layout.key_format.front();
  const bool same = std::ranges::all_of(layout.key_format,
                                        [&first](const SlotFormat& each) { return each == first; });
  return same ? first.unit_bytes : 0;
}

uint64_t chunk_elements_of(const KeySpec& key, uint32_t chunk_elements) {
  if (!has_tiles(key) && !is_compact(key)) return chunk_elements;
  const bool has_limit = is_factors(key) ? key.rank_limit > 0
                         : is_rows(key)  ? key.rows_limit > 0
                                         : true;
  const bool is_matrix = has_limit && key.shape.size() == 2 &&
                         elements_in(key.shape) == key.elements && key.shape[1] <= kMaxTileColumns;
  if (!is_matrix || key.tile_rows == 0 || key.tile_rows > most_tile_rows(key)) {
    fail(ErrorCode::kInvalid, "key '{}' has a {} of {} and tiles of {} rows, which do not fit",
         key.name, is_rows(key) ? "rows_limit" : "rank_limit",
         std::max(key.rank_limit, key.rows_limit), key.tile_rows);
  }
  return key.tile_rows * key.shape[1];
}

Layout lay_out_keys(std::span<const KeySpec> keys, uint32_t chunk_elements,
                    std::string_view gradient_dtype, uint32_t weight_bytes) {
  Layout layout;
  layout.weight_bytes = weight_bytes;
  layout.key_offset.reserve(keys.size());
  layout.key_format.reserve(keys.size());
  for (uint32_t k = 0; k < keys.size(); ++k) {
    const uint64_t most = chunk_elements_of(keys[k], chunk_elements);
    const SlotFormat format = format_of(keys[k], gradient_dtype);
    layout.key_offset.push_back(layout.total_elements);
    layout.key_format.push_back(format);
    for (uint64_t at = 0; at < keys[k].elements; at += most) {
      const auto elements = static_cast<uint32_t>(std::min(most, keys[k].elements - at));
      layout.chunks.push_back({.key = k,
                               .elements = elements,
                               .key_element = at,
                               .offset = layout.total_elements + at,
                               .gradient_offset = layout.gradients_bytes,
                               .slot_bytes = static_cast<uint32_t>(format.bytes(elements))});
      // The elements of a chunk that is not a key's last fill its room.
      layout.gradients_bytes += slot_room(format, elements, weight_bytes);
    }
    layout.total_elements += slot_elements(keys[k].elements);
  }
  return layout;
}

void lay_out_queue(Layout& layout, uint32_t queue, std::span<const uint32_t> chunks) {
  uint64_t at = layout.queue_offset[queue];
  if (at > kMaxElements) fail(ErrorCode::kInvalid, "queue {} begins at element {}", queue, at);
  // Without queue_slots all keys have the first one's format.
  uint64_t slot = layout.queue_slots.empty() ? at * layout.key_format.front().unit_bytes
                                             : layout.queue_slots[queue];
  if (slot > kMaxSlotsBytes) {
    fail(ErrorCode::kInvalid, "the slots of queue {} begin at byte {}", queue, slot);
  }
  const uint32_t shared = layout.shares_slots() ? layout.queue_shares[queue] : 0;
  const uint64_t shared_room = shared > 0 ? layout.shared_room(chunks) : 0;
  if (shared > std::max<size_t>(chunks.size(), 1)) {
    fail(ErrorCode::kInvalid, "queue {} has {} slots for {} chunks", queue, shared, chunks.size());
  }
  for (uint32_t i = 0; i < chunks.size(); ++i) {
    ChunkLayout& chunk = layout.chunks[chunks[i]];
    chunk.queue = queue;
    chunk.index = i;
    chunk.box_offset = at;
    chunk.slot_offset = shared > 0 ? slot + i % shared * shared_room : slot;
    at += layout.box_slot(chunk);
    if (shared == 0) slot += layout.slot_room_of(chunk);
  }
  layout.box_elements = std::max(layout.box_elements, at);
  layout.slots_bytes = std::max(layout.slots_bytes, slot + shared * shared_room);
}

void lay_out_queues(Layout& layout, std::vector<std::vector<uint32_t>> queue_chunks,
                    QueueOffsets offsets) {
  const bool as_worker = offsets.elements.empty();
  const auto expect_of_all = [&](const auto& given) {
    if (given.size() == queue_chunks.size()) return;
    fail(ErrorCode::kInvalid, "{} queues have {} offsets", queue_chunks.size(), given.size());
  };
  const bool shares = !offsets.shares.empty();
  if (!as_worker || shares) expect_of_all(offsets.elements);
  const bool slots_follow = (as_worker || element_bytes_of_all(layout) > 0) && !shares;
  if (!slots_follow || !offsets.slots.empty()) expect_of_all(offsets.slots);
  if (shares) expect_of_all(offsets.shares);
  if (std::ranges::count(offsets.shares, 0u) > 0) {
    fail(ErrorCode::kInvalid, "the chunks of a queue share no slot");
  }
  std::vector<bool> routed(layout.chunks.size());
  uint64_t count = 0;
  for (uint32_t q = 0; q < queue_chunks.size(); ++q) {
    for (const uint32_t id : queue_chunks[q]) {
      if (id >= layout.chunks.size() || routed[id]) {
        fail(ErrorCode::kInvalid, "queue {}: chunk {} does not exist or is in another queue", q,
             id);
      }
      routed[id] = true;
      ++count;
    }
  }
  if (count != layout.chunks.size()) {
    fail(ErrorCode::kInvalid, "{} of {} chunks have a queue", count, layout.chunks.size());
  }
  layout.queue_offset = std::move(offsets.elements);
  layout.queue_slots = std::move(offsets.slots);
  layout.queue_shares = std::move(offsets.shares);
  layout.box_elements = as_worker ? layout.total_elements : 0;
  layout.slots_bytes = as_worker ? layout.gradients_bytes : 0;
  for (uint32_t q = 0; q < queue_chunks.size(); ++q) {
    if (!as_worker) {
      lay_out_queue(layout, q, queue_chunks[q]);
      continue;
    }
    for (uint32_t i = 0; i < queue_chunks[q].size(); ++i) {
      ChunkLayout& chunk = layout.chunks[queue_chunks[q][i]];
      chunk.queue = q;
      chunk.index = i;
      chunk.box_offset = chunk.offset;
      chunk.slot_offset = chunk.gradient_offset;
    }
  }
  layout.queue_chunks = std::move(queue_chunks);
}

std::vector<uint64_t> offsets_of_sums(const Layout& layout) {
  std::vector<uint64_t> offsets{0};
  offsets.reserve(layout.chunks.size() + 1);
  for (const ChunkLayout& chunk : layout.chunks) {
    offsets.push_back(offsets.back() + layout.slot_room_of(chunk));
  }
  return offsets;
}

QueueOffsets offsets_of_queues(const Layout& layout,
                               std::span<const std::vector<uint32_t>> queue_chunks,
                               std::span<const uint32_t> queue_node, std::vector<uint32_t> shares) {
  const auto sum_of = [&](size_t queue, auto room_of) {
    uint64_t sum = 0;
    for (const uint32_t id : queue_chunks[queue]) sum += room_of(layout.chunks[id]);
    return sum;
  };
  QueueOffsets offsets{.elements = {}, .slots = {}, .shares = std::move(shares)};
  offsets.elements = begins_of(queue_node, kNodeAlignment, [&](size_t queue) {
    return sum_of(queue, [&](const ChunkLayout& chunk) { return layout.box_slot(chunk); });
  });
  if (element_bytes_of_all(layout) > 0 && offsets.shares.empty()) return offsets;
  offsets.slots = begins_of(queue_node, kPageBytes, [&](size_t queue) {
    if (!offsets.shares.empty()) {
      return offsets.shares[queue] * layout.shared_room(queue_chunks[queue]);
    }
    return sum_of(queue, [&](const ChunkLayout& chunk) { return layout.slot_room_of(chunk); });
  });
  return offsets;
}

JobLayout routes_of(const Layout& layout) {
  return {.key_offset = layout.key_offset,
          .queue_chunks = layout.queue_chunks,
          .total_elements = layout.total_elements,
          .queue_offset = layout.queue_offset,
          .queue_slots = layout.queue_slots,
          .queue_shares = layout.queue_shares};
}

Layout layout_of(const JoinReply& reply) {
  const auto malformed = [](std::string_view what) {
    fail(ErrorCode::kInternal, "the server's answer does not fit together: {}", what);
  };
  const uint32_t chunk_elements = reply.spec.chunk_elements;
  const bool fits = chunk_elements > 0 && chunk_elements % kChunkAlignment == 0;
  if (!fits || reply.first_round == 0) malformed("chunks and rounds");
  Layout layout = lay_out_keys(reply.spec.keys, chunk_elements, reply.spec.gradient_dtype,
                               weight_bytes_of(reply.spec));
  if (layout.key_offset != reply.layout.key_offset ||
      layout.total_elements != reply.layout.total_elements) {
    malformed("keys and where they begin");
  }
  layout.trailer_elements = trailer_of(reply.spec);
  try {
    lay_out_queues(
        layout, reply.layout.queue_chunks,
        {reply.layout.queue_offset, reply.layout.queue_slots, reply.layout.queue_shares});
  } catch (const Error& error) {
    malformed(error.what());
  }
  return layout;
}

ResultFormat result_format(const JobSpec& spec) {
  const SlotFormat* format = find_slot_format(spec.parameter_dtype);
  if (!format) {
    fail(ErrorCode::kInvalid, "parameter_dtype: there is no format '{}'", spec.parameter_dtype);
  }
  if (!format->is_plain()) return {.element_bytes = sizeof(float), .difference = format};
  return {.element_bytes = format->unit_bytes};
}

LinkLayout link_layout(const Layout& layout, uint32_t max_ranks, const ResultFormat& results,
                       uint32_t copies) {
  LinkLayout link;
  link.max_ranks = max_ranks;
  link.cores = static_cast<uint32_t>(layout.queue_chunks.size());
  for (const auto& chunks : layout.queue_chunks) {
    link.queue_chunks.push_back(static_cast<uint32_t>(chunks.size()));
  }
  link.result_bytes = results.element_bytes;
  link.difference_bytes = results.difference_bytes();
  link.slots_bytes = layout.slots_bytes;
  const uint64_t element_bytes = results.element_bytes + results.difference_bytes();
  link.results_bytes = layout.box_elements * element_bytes;
  const bool has_trailers = layout.trailer_elements > 0;
  link.worker_gradients_bytes =
      has_trailers ? offsets_of_sums(layout).back() : layout.gradients_bytes;
  link.worker_results_bytes = layout.total_elements * element_bytes;
  link.result_copies = copies;
  return link;
}

}  // namespace phub

// Where every chunk of a job lies: at the worker, whose memory is laid out by keys, and at the box,
// where the chunks of a queue lie one after another. Box and worker compute it with the functions
// below from the same things: the keys, the size of a chunk, and which queue has which chunks. The
// plan, the session, the transports and their checks read it; nobody else computes an offset.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/job_spec.h"
#include "transport/transport.h"

namespace phub {

// Elements. A chunk lies in a slot of this many, or a multiple: 128 bytes of f32.
inline constexpr uint64_t kChunkAlignment = 32;
constexpr uint64_t slot_elements(uint64_t elements) {
  return (elements + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
}

// Behind the gradient of a rank that is a rack: how many ranks took part in it, a uint32. Here in
// elements of f32, which is a rack's format.
inline constexpr uint32_t kTrailerElements = 1;
// With a null, instead of that number: all of them sent a NaN or an infinity, and are left out.
inline constexpr uint32_t kNoneLeft = ~uint32_t{0};
inline uint32_t trailer_of(const JobSpec& spec) {
  return spec.rack_ranks.empty() ? 0 : kTrailerElements;
}

struct ChunkLayout {  // offsets in elements
  uint32_t key = 0;
  uint32_t elements = 0;
  uint64_t key_element = 0;  // where the chunk begins within its key
  uint64_t offset = 0;       // in the worker's memory
  uint64_t box_offset = 0;   // in the box's
  uint32_t queue = 0;
  uint32_t index = 0;  // within its queue: what the immediate carries
};

struct Layout {
  std::vector<ChunkLayout> chunks;                  // key by key, ascending
  std::vector<uint64_t> key_offset;                 // in the worker's memory
  uint64_t total_elements = 0;                      // the worker's: with the padding between keys
  std::vector<std::vector<uint32_t>> queue_chunks;  // [queue][index] = chunk
  // Where each queue's chunks begin at the box. Empty: the box's memory is laid out as the
  // worker's.
  std::vector<uint64_t> queue_offset;
  uint64_t box_elements = 0;      // the box's: with the padding between nodes
  uint32_t trailer_elements = 0;  // at the box, behind each chunk: kTrailerElements below racks

  // What a chunk takes of the box's memory.
  uint64_t box_slot(const ChunkLayout& chunk) const {
    return slot_elements(uint64_t{chunk.elements} + trailer_elements);
  }
};

// The worker's side: keys one after another, each in whole slots, and cut into chunks. REQUIRES:
// at most 2^32 - 1 chunks. (Where the ranks are racks, set trailer_elements before what follows.)
Layout lay_out_keys(std::span<const KeySpec> keys, uint32_t chunk_elements);

// The box's side. Throws Error(kInvalid) unless every chunk is in one queue exactly and the number
// of offsets is that of the queues, or 0.
void lay_out_queues(Layout& layout, std::vector<std::vector<uint32_t>> queue_chunks,
                    std::vector<uint64_t> queue_offset);

// Where a rack has its sums: chunk after chunk, each with its trailer, whatever boxes they go to.
// In elements, by chunk, and at last where they end.
std::vector<uint64_t> offsets_of_sums(const Layout& layout);

// Where queues of these nodes begin at the box: one after another, each node on pages of its own.
std::vector<uint64_t> offsets_of_queues(const Layout& layout,
                                        std::span<const std::vector<uint32_t>> queue_chunks,
                                        std::span<const uint32_t> queue_node);

// Of a 16-bit format a slot takes the f32 of the initial parameters in two parts.
struct InitialPart {
  uint32_t first = 0;  // of the chunk's elements
  uint32_t count = 0;
};
constexpr uint32_t initial_parts(uint32_t gradient_bytes) { return gradient_bytes == 4 ? 1 : 2; }
constexpr InitialPart initial_part(uint32_t elements, uint32_t gradient_bytes, uint32_t part) {
  if (gradient_bytes == 4) return {0, elements};
  const uint32_t half = elements / 2;
  return part == 0 ? InitialPart{0, half} : InitialPart{half, elements - half};
}

// The sizes of both sides of a link, for elements of so many bytes. `copies`: of the results, at
// the box.
LinkLayout link_layout(const Layout& layout, uint32_t max_ranks, uint32_t gradient_bytes,
                       uint32_t result_bytes, uint32_t copies);

}  // namespace phub

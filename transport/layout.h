// The place of every chunk of a job: at the worker, whose memory is laid out by keys, and at the
// box, where the chunks of a queue lie one after another. Box and worker compute it with the
// functions below from the same things: the keys, the size of a chunk, and which queue has which
// chunks. The plan, the session, the transports and their checks read it; nobody else computes an
// offset.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/job_spec.h"
#include "transport/slot_format.h"
#include "transport/transport.h"

namespace phub {

// Elements. In arrays of elements a chunk has the place of kChunkAlignment, or a multiple.
constexpr uint64_t slot_elements(uint64_t elements) {
  return (elements + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
}
// Bytes. Gradients are aligned as well: whole cache lines for whole multiples of 32 elements.
inline constexpr uint64_t kSlotAlignment = 64;
// What a slot takes of the initial parameters at once (below): at least what lets them come in
// kMostInitialParts.
constexpr uint64_t initial_bytes(uint64_t elements, uint64_t slot_bytes) {
  const uint64_t least = (elements * sizeof(float) + kMostInitialParts - 1) / kMostInitialParts;
  return std::max(slot_bytes, least);
}
// `weight_bytes`: Layout::weight_bytes.
constexpr uint64_t slot_room(const SlotFormat& format, uint64_t elements,
                             uint32_t weight_bytes = 0) {
  const uint64_t whole = slot_elements(elements);
  const uint64_t bytes = initial_bytes(whole, format.bytes(whole)) + weight_bytes;
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// Behind the gradient of a rank that is a rack: how many ranks took part in it, a uint32. Here in
// elements of f32, which is a rack's format.
inline constexpr uint32_t kTrailerElements = 1;
// With a null, instead of that number: all of them sent a NaN or an infinity, and are left out.
inline constexpr uint32_t kNoneLeft = ~uint32_t{0};
inline uint32_t trailer_of(const JobSpec& spec) {
  return spec.rack_ranks.empty() ? 0 : kTrailerElements;
}

// Behind each gradient of a job with weights: the push's, an f32. It stands where the gradient
// ends, and that of a null, which has nothing else, where the longest gradient of the chunk ends.
inline constexpr uint32_t kWeightBytes = sizeof(float);
inline uint32_t weight_bytes_of(const JobSpec& spec) {
  return spec.weights == Weights::kYes ? kWeightBytes : 0;
}

// Arrays of elements (results, at the box also parameters and state) are laid out in elements,
// gradients in bytes: each key's have a format.
struct ChunkLayout {
  uint32_t key = 0;
  uint32_t elements = 0;
  uint64_t key_element = 0;      // the beginning of the chunk within its key
  uint64_t offset = 0;           // in the worker's results, elements
  uint64_t box_offset = 0;       // in the box's arrays, elements
  uint64_t gradient_offset = 0;  // in the worker's gradients, bytes
  uint64_t slot_offset = 0;      // in a rank's slots at the box, bytes
  uint32_t slot_bytes = 0;       // bytes of its gradient on the wire
  uint32_t queue = 0;
  uint32_t index = 0;  // within its queue: the number in the immediate
};

struct Layout {
  std::vector<ChunkLayout> chunks;     // key by key, ascending
  std::vector<uint64_t> key_offset;    // in the worker's results, elements
  std::vector<SlotFormat> key_format;  // format of its gradients
  uint64_t total_elements = 0;         // the worker's results: with the padding between keys
  uint64_t gradients_bytes = 0;        // the worker's gradients, the same
  std::vector<std::vector<uint32_t>> queue_chunks;  // [queue][index] = chunk
  // The beginning of each queue's chunks at the box, in elements. Empty: the box's memory is laid
  // out as the worker's.
  std::vector<uint64_t> queue_offset;
  // The beginning of each queue's slots, in bytes. Empty: they begin as the arrays do, since all
  // keys have one plain format, and each chunk has its own.
  std::vector<uint64_t> queue_slots;
  // The number of slots of each queue, at least 1, which its chunks share in turn: they are as
  // large as its largest chunk needs. A rank has one gradient in a slot at a time: it sends another
  // when the result of that one is here, or the box has said that it was taken (wire.h, kInitial).
  // Empty: each chunk has a slot.
  std::vector<uint32_t> queue_shares;
  uint64_t box_elements = 0;      // the box's arrays: with the padding between nodes
  uint64_t slots_bytes = 0;       // the box's slots of one rank, the same
  uint32_t trailer_elements = 0;  // at the box, behind each chunk: kTrailerElements below racks
  uint32_t weight_bytes = 0;      // of each slot, on both sides: kWeightBytes, or 0

  // The room of a chunk in the box's arrays, in elements, and in its slots, in bytes.
  uint64_t box_slot(const ChunkLayout& chunk) const {
    return slot_elements(uint64_t{chunk.elements} + trailer_elements);
  }
  uint64_t slot_room_of(const ChunkLayout& chunk) const {
    return slot_room(key_format[chunk.key], uint64_t{chunk.elements} + trailer_elements,
                     weight_bytes);
  }
  bool shares_slots() const { return !queue_shares.empty(); }
  // Of a slot that these chunks share.
  uint64_t shared_room(std::span<const uint32_t> of) const {
    uint64_t room = kSlotAlignment;
    for (const uint32_t id : of) room = std::max(room, slot_room_of(chunks[id]));
    return room;
  }
};

// The number of elements in a chunk of the key, but for its last. Throws Error(kInvalid) if the
// server has not decided the rows of a matrix's chunks, or if they do not fit.
uint64_t chunk_elements_of(const KeySpec& key, uint32_t chunk_elements);

// The bytes of an element, if all keys have one plain format and slots nothing else; else 0.
uint32_t element_bytes_of_all(const Layout& layout);

// The worker's side: keys one after another, each in whole slots, and cut into chunks. The
// gradients of a key in a plain format are one piece; in a coded one, or with weights, each chunk
// has its own room. `gradient_dtype`: of keys without a format of their own. Throws
// Error(kInvalid): there is no such format, or as chunk_elements_of(). REQUIRES: at most 2^32 - 1
// chunks. (If the ranks are racks, set trailer_elements before calling other functions.)
Layout lay_out_keys(std::span<const KeySpec> keys, uint32_t chunk_elements,
                    std::string_view gradient_dtype = "f32", uint32_t weight_bytes = 0);

// The beginnings of queues at the box, and how many slots chunks share: Layout::queue_offset,
// queue_slots, queue_shares.
struct QueueOffsets {
  std::vector<uint64_t> elements;
  std::vector<uint64_t> slots;
  std::vector<uint32_t> shares;
};

// The box's side. Throws Error(kInvalid) unless every chunk is in one queue exactly and the number
// of offsets is that of the queues, or 0.
void lay_out_queues(Layout& layout, std::vector<std::vector<uint32_t>> queue_chunks,
                    QueueOffsets offsets);

// Lays out the chunks of a queue, one after another from its offsets on; lay_out_queues() does so
// for each. REQUIRES: layout.queue_offset[queue], and queue_slots[queue] and queue_shares[queue]
// unless these are empty; the chunks exist. Throws Error(kInvalid): the offsets are out of range.
void lay_out_queue(Layout& layout, uint32_t queue, std::span<const uint32_t> chunks);

// The places of a rack's sums: chunk after chunk, each with its trailer, for all boxes that they go
// to. In bytes, by chunk, and at last where they end.
std::vector<uint64_t> offsets_of_sums(const Layout& layout);

// The beginnings of these nodes' queues at the box: one after another, each node on pages of its
// own. `shares`: Layout::queue_shares of these queues.
QueueOffsets offsets_of_queues(const Layout& layout,
                               std::span<const std::vector<uint32_t>> queue_chunks,
                               std::span<const uint32_t> queue_node,
                               std::vector<uint32_t> shares = {});

// Initial parameters are f32. Where a chunk's gradient takes fewer bytes, its slot takes them in
// parts of about equal size. (A part never has more bytes than the slot has room for: slot_room().)
struct InitialPart {
  uint32_t first = 0;  // index among the chunk's elements
  uint32_t count = 0;
};
constexpr uint32_t initial_parts(uint32_t elements, uint64_t slot_bytes) {
  const uint64_t of_part = initial_bytes(elements, slot_bytes);
  return static_cast<uint32_t>((uint64_t{elements} * sizeof(float) + of_part - 1) / of_part);
}
constexpr InitialPart initial_part(uint32_t elements, uint64_t slot_bytes, uint32_t part) {
  const uint64_t parts = initial_parts(elements, slot_bytes);
  const auto begin = static_cast<uint32_t>(uint64_t{elements} * part / parts);
  const auto end = static_cast<uint32_t>(uint64_t{elements} * (part + 1) / parts);
  return {begin, end - begin};
}

// The format and size of results. If they come back as differences, the memory of the results is
// the view in f32, and behind it every chunk has room for the difference of a round, which is sent.
inline constexpr uint32_t kDifferenceBytes = 2;  // per element; more than any coded format takes
struct ResultFormat {
  uint32_t element_bytes = 4;              // an element of a result, or of the view
  const SlotFormat* difference = nullptr;  // null: results are sent as they are

  uint32_t difference_bytes() const { return difference ? kDifferenceBytes : 0; }
};
// Throws Error(kInvalid): there is no such format.
ResultFormat result_format(const JobSpec& spec);

// The place of a chunk's result, or of its difference, in memory for `all` elements, and the bytes
// that are sent. The chunk's elements begin at `offset`.
struct ResultPlace {
  uint64_t byte = 0;
  uint32_t bytes = 0;
};
constexpr ResultPlace result_place(const ResultFormat& format, uint64_t offset, uint32_t elements) {
  return {offset * format.element_bytes, elements * format.element_bytes};
}
constexpr ResultPlace difference_place(const ResultFormat& format, uint64_t all, uint64_t offset,
                                       uint32_t elements) {
  return {all * format.element_bytes + offset * kDifferenceBytes,
          static_cast<uint32_t>(format.difference->bytes(elements))};
}

// The sizes of both sides of a link. `copies`: of the results, at the box.
LinkLayout link_layout(const Layout& layout, uint32_t max_ranks, const ResultFormat& results,
                       uint32_t copies);

}  // namespace phub

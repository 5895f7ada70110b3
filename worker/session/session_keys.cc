#include "worker/session/session_keys.h"

#include <algorithm>
#include <utility>

#include "transport/control/interest.h"
#include "transport/error.h"

namespace phub {
namespace {

ResultFormat result_format_of(const JobSpec& spec) {
  try {
    return result_format(spec);
  } catch (const Error& error) {
    fail(ErrorCode::kInternal, "the server's answer: {}", error.what());
  }
}

// By chunk; empty: everything.
std::vector<ChunkInterest> interest_of(const JoinReply& reply, const Layout& layout) {
  try {
    check_interest(reply.interest, reply.spec);
  } catch (const Error& error) {
    fail(ErrorCode::kInternal, "the server's answer: {}", error.what());
  }
  return interest_in_chunks(reply.interest, reply.spec.keys, layout);
}

}  // namespace

LinkLayout link_layout_of(const JoinReply& reply) {
  const bool own_results = has_own_results(reply.spec);
  if (own_results && reply.rank >= reply.spec.max_ranks) {
    fail(ErrorCode::kInternal, "the server's answer contradicts itself: rank {} of {}", reply.rank,
         reply.spec.max_ranks);
  }
  LinkLayout layout =
      link_layout(layout_of(reply), reply.spec.max_ranks, result_format_of(reply.spec),
                  own_results ? reply.spec.max_ranks : 1);
  if (own_results) layout.result_copy = reply.rank;
  return layout;
}

SessionKeys::SessionKeys(const JoinReply& reply, WorkerLink& link)
    : link_(link),
      result_format_(result_format_of(reply.spec)),
      schedules_(reply.spec),
      next_round_(reply.first_round) {
  Layout layout = layout_of(reply);
  all_elements_ = layout.total_elements;
  const uint64_t element_bytes = result_format_.element_bytes + result_format_.difference_bytes();
  if (link_.gradients().size() < layout.gradients_bytes ||
      link_.results().size() < layout.total_elements * element_bytes) {
    fail(ErrorCode::kInternal,
         "the server's answer contradicts itself: {} bytes of gradients and {} of results for "
         "{} elements",
         link_.gradients().size(), link_.results().size(), layout.total_elements);
  }
  for (size_t k = 0; k < reply.spec.keys.size(); ++k) {
    Key key;
    key.offset = layout.key_offset[k];
    key.elements = reply.spec.keys[k].elements;
    key.priority = reply.spec.keys[k].priority;
    key.lazy = reply.spec.keys[k].lazy;
    if (layout.key_format[k].is_rows()) key.columns = layout.key_format[k].columns;
    key.round = reply.first_round - 1;
    keys_.push_back(key);
  }
  const std::vector<ChunkInterest> interest = interest_of(reply, layout);
  for (uint32_t c = 0; c < layout.chunks.size(); ++c) {
    Chunk chunk;
    static_cast<ChunkLayout&>(chunk) = layout.chunks[c];
    if (!interest.empty()) chunk.writes = interest[c].writes, chunk.reads = interest[c].reads;
    chunk.awaited = reply.first_round - 1;
    chunk.outstanding = true;
    chunk.bytes = chunk.slot_bytes;
    chunks_.push_back(chunk);
    Key& key = keys_[chunk.key];
    if (key.chunks++ == 0) {
      key.first_chunk = c;
      key.gradient_begin = chunk.gradient_offset;
    }
    key.gradient_end = chunk.gradient_offset + chunk.slot_bytes;
    ++key.outstanding;
    if (chunk.exchanged()) ++key.exchanged;
  }
  divide_into_parts(reply.spec.keys);
  keys_outstanding_ = keys_.size();
  queue_shares_ = std::move(layout.queue_shares);
  for (std::vector<uint32_t>& chunks : layout.queue_chunks) {
    Queue& queue = queues_.emplace_back();
    queue.outstanding = static_cast<uint32_t>(chunks.size());
    queue.chunks = std::move(chunks);
  }
  completed_.reserve(keys_.size());
}

void SessionKeys::divide_into_parts(std::span<const KeySpec> keys) {
  uint32_t parts = 0;
  for (size_t k = 0; k < keys_.size(); ++k) {
    Key& key = keys_[k];
    key.first_part = parts;
    key.chunks_per_part = key.chunks;
    if (!is_compact(keys[k]) && exchanges_all(k)) {
      const uint64_t chunk_bytes = std::max(chunks_[key.first_chunk].slot_bytes, 1u);
      key.chunks_per_part = static_cast<uint32_t>(std::max<uint64_t>(kPartBytes / chunk_bytes, 1));
      key.parts = (key.chunks + key.chunks_per_part - 1) / key.chunks_per_part;
    }
    parts += key.parts;
  }
  part_outstanding_.resize(parts);
  completed_parts_.reserve(parts);
}

SessionKeys::Elements SessionKeys::part(size_t key_index, size_t part) const {
  const Key& key = keys_[key_index];
  const auto begins = [&](uint64_t chunk) {
    return chunk < key.chunks ? chunks_[key.first_chunk + chunk].key_element : key.elements;
  };
  return {begins(part * key.chunks_per_part), begins((part + 1) * key.chunks_per_part)};
}

SessionKeys::Slots SessionKeys::slots(size_t key_index) const {
  const Key& key = keys_[key_index];
  const Chunk& first = chunks_[key.first_chunk];
  const uint64_t all = key.gradient_end - key.gradient_begin;
  const uint64_t bytes =
      key.chunks > 1 ? chunks_[key.first_chunk + 1].gradient_offset - first.gradient_offset : all;
  return {first.elements, static_cast<uint32_t>(bytes), first.offset};
}

std::span<std::byte> SessionKeys::gradient(size_t key) {
  return link_.gradients().subspan(keys_[key].gradient_begin,
                                   keys_[key].gradient_end - keys_[key].gradient_begin);
}

std::span<const std::byte> SessionKeys::result(size_t key) const {
  const uint64_t bytes = result_format_.element_bytes;
  return link_.results().subspan(keys_[key].offset * bytes, keys_[key].elements * bytes);
}

uint64_t SessionKeys::pushed_round(size_t key_index) const {
  const Key& key = keys_[key_index];
  const auto chunks = std::span(chunks_).subspan(key.first_chunk, key.chunks);
  const bool waits = std::ranges::any_of(
      chunks, [](const Chunk& chunk) { return chunk.outstanding && chunk.pushed; });
  return key.round + (waits || is_partly_pushed(key_index) ? 1 : 0);
}

}  // namespace phub

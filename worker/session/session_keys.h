// The keys of a session and their chunks: where they lie in the link's memory, and how far each is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/key_schedules.h"
#include "transport/control/messages.h"
#include "transport/layout.h"
#include "transport/transport.h"
#include "transport/verdict.h"

namespace phub {

// The sizes that both sides of a link derive from a join's answer. Throws Error(kInternal).
LinkLayout link_layout_of(const JoinReply& reply);

// Part of a key: neighbouring chunks, which can be pushed before the rest of the key.
struct KeyPart {
  uint32_t key = 0, part = 0;
};

// The states of a key: ready → pushed: chunks are sent → all results are here → ready. At the start
// every key waits for the result of the round before the rank's first.
class SessionKeys {
 public:
  SessionKeys(const SessionKeys&) = delete;
  SessionKeys& operator=(const SessionKeys&) = delete;

  size_t keys() const { return keys_.size(); }
  bool ready(size_t key) const { return keys_[key].outstanding == 0; }
  bool all_ready() const { return keys_outstanding_ == 0; }
  size_t outstanding() const { return keys_outstanding_; }  // keys that are not ready
  // The latest round whose result is here.
  uint64_t round(size_t key) const { return keys_[key].round; }
  // The latest round that it was pushed in. A result that comes right after a join belongs to no
  // push.
  uint64_t pushed_round(size_t key) const;
  // The first round in which no key was pushed.
  uint64_t next_round() const { return next_round_; }
  // The rank writes or reads some of it.
  bool takes_part(size_t key) const { return keys_[key].exchanged > 0; }
  // Whether the content of the chunk's slot is sent, if the push is no null.
  bool writes(const ChunkLayout& chunk) const {
    return chunks_[queues_[chunk.queue].chunks[chunk.index]].writes;
  }
  // The keys that became ready in the latest poll().
  std::span<const uint32_t> completed() const { return completed_; }
  uint64_t chunks_pushed() const { return chunks_pushed_; }
  uint64_t chunks_received() const { return chunks_received_; }

  // A key has as many parts as make each of about this size, in bytes of gradients. A key whose
  // gradient is compact, or of which the rank exchanges only some chunks, has one.
  static constexpr uint64_t kPartBytes = 2 << 20;
  size_t parts(size_t key) const { return keys_[key].parts; }
  struct Elements {
    uint64_t begin = 0, end = 0;
  };
  Elements part(size_t key, size_t part) const;  // in the key
  // Some of its parts are pushed, and others are not.
  bool is_partly_pushed(size_t key) const {
    return keys_[key].parts_pushed > 0 && keys_[key].parts_pushed < keys_[key].parts;
  }
  size_t parts_pushed(size_t key) const { return keys_[key].parts_pushed; }
  // The parts whose results came in the latest poll(), if the key was pushed in parts.
  std::span<const KeyPart> completed_parts() const { return completed_parts_; }

  // Calls `work(const ChunkLayout&, size_t offset)` for the key's chunks in order; `offset` is that
  // of the chunk's slot in gradient(key). Any thread may call it.
  template <typename Work>
  void for_each_chunk(size_t key, Work work) const {
    const Key& of = keys_[key];
    for (uint32_t c = of.first_chunk; c < of.first_chunk + of.chunks; ++c) {
      const ChunkLayout& chunk = chunks_[c];
      work(chunk, static_cast<size_t>(chunk.gradient_offset - of.gradient_begin));
    }
  }
  // The place of chunks in gradient(key) and in their job. Each but the key's last has as many.
  struct Slots {
    uint32_t chunk_elements = 0, chunk_bytes = 0;  // from a slot to the next
    uint64_t first_element = 0;                    // ChunkLayout::offset of the first
  };
  Slots slots(size_t key) const;
  bool exchanges_all(size_t key) const { return keys_[key].exchanged == keys_[key].chunks; }
  std::span<std::byte> gradient(size_t key);
  std::span<const std::byte> result(size_t key) const;

 protected:
  // Throws Error(kInternal) if the answer's keys, chunks and queues contradict each other, or do
  // not fit into the link's memory.
  SessionKeys(const JoinReply& reply, WorkerLink& link);
  ~SessionKeys() = default;
  void divide_into_parts(std::span<const KeySpec> keys);

  struct Chunk : ChunkLayout {
    bool writes = true, reads = true;  // this rank
    uint64_t awaited = 0;              // the round of the next result
    bool outstanding = false;          // that result has not come yet
    bool pushed = false;               // it follows a push, which may have to be sent again
    bool null = false;
    bool early = false;        // the result is here, the verdict on its round is not
    bool posted = false;       // whether it was posted in this round
    uint32_t bytes = 0;        // the bytes of this round's gradient that are sent
    float magnitude = 0;       // the gradient's
    float weight = 1;          // the push's
    uint32_t carried = 0;      // rounds in a row
    uint8_t initial_part = 0;  // the part of the initial parameters that is being sent

    bool exchanged() const { return writes || reads; }
  };
  struct Key {
    uint64_t offset = 0, elements = 0;
    uint64_t gradient_begin = 0, gradient_end = 0;  // bytes
    uint32_t first_chunk = 0, chunks = 0;
    uint32_t exchanged = 0;  // the number of its chunks that the rank writes or reads
    uint32_t outstanding = 0;
    int32_t priority = 0;
    uint32_t parts = 1, chunks_per_part = 0;  // the last part may have fewer chunks
    uint32_t first_part = 0;                  // in part_outstanding_
    uint32_t parts_pushed = 0;                // of the latest push; 0: that was of the whole key
    uint64_t columns = 0;                     // the elements of a row, if its rows are sent
    bool lazy = false;  // a result may be that of the round before, of which nothing is sent
    uint64_t round = 0;
  };
  struct Queue {
    std::vector<uint32_t> chunks;
    uint32_t outstanding = 0;     // results
    VerdictReader verdict;        // for gated jobs
    std::vector<uint32_t> early;  // chunks
  };

  WorkerLink& link_;
  const ResultFormat result_format_;
  const KeySchedules schedules_;
  std::vector<uint32_t> queue_shares_;  // Layout's
  uint64_t all_elements_ = 0;           // the number of elements in all results
  std::vector<Key> keys_;
  std::vector<Chunk> chunks_;
  std::vector<Queue> queues_;
  std::vector<uint32_t> part_outstanding_;  // by part: results, if the key was pushed in parts
  std::vector<uint32_t> completed_;
  std::vector<KeyPart> completed_parts_;
  size_t keys_outstanding_ = 0;
  uint64_t next_round_;
  uint64_t chunks_pushed_ = 0, chunks_received_ = 0;
};

}  // namespace phub

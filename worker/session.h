// The worker's side of the exchange, driven by poll(): no threads, clocks or blocking calls. The
// library wraps it (worker.h), the simulator drives it directly.
//
// A key goes round: ready → push() → its chunks are out → all results are here → ready. At the
// start every key waits for the result of the round before the rank's first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "transport/messages.h"
#include "transport/nic.h"
#include "transport/trace.h"

namespace phub {

// The sizes that both sides of a link derive from a join's answer. Throws Error(kInternal).
LinkLayout link_layout_of(const JoinReply& reply);

class Session {
 public:
  // Checks the answer: keys, chunks and queues must fit together, and into the link's memory.
  // Throws Error(kInternal).
  Session(const JoinReply& reply, WorkerLink& link);

  size_t keys() const { return keys_.size(); }
  bool ready(size_t key) const { return keys_[key].outstanding == 0; }
  bool all_ready() const { return keys_outstanding_ == 0; }
  size_t outstanding() const { return keys_outstanding_; }  // keys that are not ready
  uint64_t round(size_t key) const {
    return keys_[key].round;
  }  // the last one whose result is here

  // What waits for room goes out by the sum of the key's priority and `priority`. REQUIRES:
  // ready(key); whoever sends the initial parameters does so to the end (all_ready())
  // first: a successor that sends them again must not find gradients in its slots.
  void push(size_t key, int32_t priority, bool null);

  // The first round that nothing was pushed in.
  uint64_t next_round() const { return next_round_; }

  // Starts sending the initial parameters: f32, `element_of(key)` gives those of a key.
  // REQUIRES: the join said send_initial, and no push before.
  void send_initial(const std::function<const float*(size_t key)>& of_key);
  bool sending_initial() const { return !initial_.empty(); }
  // The memory of the initial parameters goes: what was not sent never will be.
  void forget_initial() { initial_.clear(); }

  // Takes what has arrived, sends what waits for room. True if anything moved.
  bool poll();
  // The keys whose last missing chunk came in the last poll().
  std::span<const uint32_t> completed() const { return completed_; }
  bool waits_for_room() const { return !waiting_.empty(); }
  // The link is broken: reconnect, then resend() what is unknown.
  bool broken() const { return broken_; }
  bool misled() const { return misled_; }  // the server sent what cannot be: no way on
  const std::string& problem() const { return problem_; }
  void resend();
  // Until resend() nothing is posted: the queues are made anew.
  void suspend() { broken_ = true; }

  // From here on each exchange, from push to result, is written to `log`.
  void trace(TraceLog& log) {
    trace_ = &log;
    pushed_ns_.assign(keys_.size(), 0);
  }

  // Before sleeping on the link's endpoint until `key` (for kAllKeys everything, for kAnyKey
  // anything) may be ready.
  static constexpr size_t kAllKeys = ~size_t{0};
  static constexpr size_t kAnyKey = kAllKeys - 1;
  bool arm(size_t key);
  void disarm() { link_.endpoint().disarm(); }

  std::span<std::byte> gradient(size_t key);
  std::span<const std::byte> result(size_t key) const;
  uint64_t chunks_pushed() const { return chunks_pushed_; }
  uint64_t chunks_received() const { return chunks_received_; }

 private:
  struct Chunk : ChunkLayout {
    uint64_t awaited = 0;      // the round whose result is awaited
    bool outstanding = false;  // a result is awaited
    bool pushed = false;       // it was asked for by a push (and may have to be sent again)
    bool null = false;
    uint8_t initial_part = 0;  // the part of the initial parameters that is on its way
  };
  struct Key {
    uint64_t offset = 0, elements = 0;
    uint32_t first_chunk = 0, chunks = 0;
    uint32_t outstanding = 0;
    int32_t priority = 0;
    uint64_t round = 0;
  };
  struct Waiting {     // to be posted
    int64_t priority;  // with that of the key
    uint64_t sequence;
    uint32_t chunk;
    bool initial;
    bool operator<(const Waiting& other) const {  // of a max-heap
      return priority != other.priority ? priority < other.priority : sequence > other.sequence;
    }
  };

  void take(const Arrival& arrival);
  void fail_with(std::string problem);
  void enqueue(uint32_t chunk, int64_t priority, bool initial);
  bool post(const Waiting& waiting);
  bool post_waiting();
  void stage_initial(uint32_t chunk, uint32_t part);

  WorkerLink& link_;
  uint32_t gradient_bytes_;  // of an element
  uint32_t result_bytes_;
  std::vector<Key> keys_;
  std::vector<Chunk> chunks_;
  std::vector<std::vector<uint32_t>> queues_;
  std::vector<uint32_t> queue_outstanding_;
  std::vector<uint32_t> wake_after_;
  std::vector<Waiting> waiting_;  // heap
  std::vector<uint32_t> completed_;
  std::vector<const float*> initial_;  // of each key, while the initial parameters are sent
  uint64_t sequence_ = 0;
  size_t keys_outstanding_ = 0;
  uint64_t next_round_ = 1;
  bool broken_ = false;
  bool misled_ = false;
  std::string problem_;
  uint64_t chunks_pushed_ = 0, chunks_received_ = 0;
  TraceLog* trace_ = nullptr;        // null: nobody asked
  std::vector<uint64_t> pushed_ns_;  // by key
};

}  // namespace phub

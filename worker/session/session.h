// The worker's side of the exchange, driven by poll(): without threads or blocking calls. The
// library wraps it (worker.h), the simulator drives it directly.
//
// The states of a key: ready → push() → chunks are sent → all results are here → ready. At the
// start every key waits for the result of the round before the rank's first.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "transport/control/messages.h"
#include "transport/layout.h"
#include "transport/trace.h"
#include "transport/transport.h"
#include "transport/verdict.h"
#include "worker/session/send_order.h"

namespace phub {

// The sizes that both sides of a link derive from a join's answer. Throws Error(kInternal).
LinkLayout link_layout_of(const JoinReply& reply);

class Session {
 public:
  // Throws Error(kInternal) if the answer's keys, chunks and queues contradict each other, or do
  // not fit into the link's memory.
  Session(const JoinReply& reply, WorkerLink& link, SendOrder order = SendOrder::kPriority);

  size_t keys() const { return keys_.size(); }
  bool ready(size_t key) const { return keys_[key].outstanding == 0; }
  bool all_ready() const { return keys_outstanding_ == 0; }
  size_t outstanding() const { return keys_outstanding_; }  // keys that are not ready
  // The latest round whose result is here.
  uint64_t round(size_t key) const { return keys_[key].round; }
  // The latest round that it was pushed in. A result that comes right after a join belongs to no
  // push.
  uint64_t pushed_round(size_t key) const;
  // The rank writes or reads some of it.
  bool takes_part(size_t key) const { return keys_[key].exchanged > 0; }
  // Whether the content of the chunk's slot is sent, if the push is no null.
  bool writes(const ChunkLayout& chunk) const {
    return chunks_[queues_[chunk.queue].chunks[chunk.index]].interest.writes;
  }

  // In a job with gated rounds, the verdict on the latest round of which a result is here. nullopt
  // if there is none, as before the first push.
  const std::optional<RoundVerdict>& verdict() const { return verdict_; }

  // Pushes a key. Chunks that wait for room in a queue, or for the budget of a NIC, are sent in the
  // session's order, on each NIC by itself: by key priority + `priority`, or by `magnitudes`, one
  // of each chunk (empty: 0). REQUIRES: ready(key); and if send_initial() was called, all_ready()
  // once since then, as a successor that sends the initial parameters again must not find gradients
  // in its slots.
  //
  // If a key's rows are sent, a chunk whose slot has no row is null. A chunk that the rank only
  // reads is null, too; a chunk that it neither writes nor reads is not sent. REQUIRES:
  // takes_part(key).
  //
  // Small writes may be sent only by flush() or the next poll(). Call flush() when flush_is_due(),
  // and before polling ends for a while.
  void push(size_t key, int32_t priority, bool null, std::span<const float> magnitudes = {});
  bool flush_is_due() const;
  bool flush();  // returns whether anything was sent

  // The first round in which no key was pushed.
  uint64_t next_round() const { return next_round_; }

  // Starts to send the initial parameters; `of_key(key)` returns those of a key, in f32.
  // REQUIRES: needs_initial(), and no push before.
  void send_initial(const std::function<const float*(size_t key)>& of_key);
  bool needs_initial() const { return needs_initial_; }  // send_initial() must be called
  bool sending_initial() const { return !initial_.empty(); }
  // Stops sending them: their memory is not used afterwards.
  void forget_initial() { initial_.clear(); }

  // Handles arrivals, and sends chunks that waited for room. Returns whether anything happened.
  bool poll();
  // The keys that became ready in the latest poll().
  std::span<const uint32_t> completed() const { return completed_; }
  bool waits_for_room() const { return waiting_ > 0; }
  // The time until there is room for the chunks that wait, if nothing arrives meanwhile. 0 means
  // that it is not known.
  std::chrono::nanoseconds room_in() const;

  // Only out of lock-step, if a budget holds chunks back: chunks of the key (or of kAllKeys) that
  // wait, and that have sent nothing in this round, become nulls, which go first. keep(key, chunk,
  // offset) keeps the content of the chunk's slot, at `offset` of gradient(key), for a later round,
  // or returns false. A chunk is carried over for at most `most_rounds` rounds in a row.
  using Keep = std::function<bool(size_t key, const ChunkLayout& chunk, size_t offset)>;
  void carry_over(size_t key, uint32_t most_rounds, const Keep& keep);
  uint64_t chunks_carried_over() const { return chunks_carried_over_; }
  // The link is broken: reconnect, then resend().
  bool broken() const { return broken_; }
  // The server violated the protocol. broken() is true as well, and reconnecting does not help.
  bool protocol_violation() const { return protocol_violation_; }
  const std::string& problem() const { return problem_; }
  // Sends again everything that the server may not have received.
  void resend();
  // Stops posting until resend(), while the queues are made anew.
  void suspend() { broken_ = true; }

  // From now on writes each exchange, from push to result, to `log`.
  void trace(TraceLog& log) {
    trace_ = &log;
    pushed_ns_.assign(keys_.size(), 0);
  }

  // Prepares for a sleep on the link's endpoint, until `key` may be ready; kAllKeys: all keys,
  // kAnyKey: any of them. False: do not sleep, poll.
  static constexpr size_t kAllKeys = ~size_t{0};
  static constexpr size_t kAnyKey = kAllKeys - 1;
  bool arm(size_t key);
  void disarm() { link_.endpoint().disarm(); }

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
  std::span<std::byte> gradient(size_t key);
  std::span<const std::byte> result(size_t key) const;
  uint64_t chunks_pushed() const { return chunks_pushed_; }
  uint64_t chunks_received() const { return chunks_received_; }

 private:
  struct Chunk : ChunkLayout {
    ChunkInterest interest;
    uint64_t awaited = 0;      // the round of the next result
    bool outstanding = false;  // that result has not come yet
    bool pushed = false;       // it follows a push, which may have to be sent again
    bool null = false;
    bool early = false;        // the result is here, the verdict on its round is not
    bool posted = false;       // whether it was posted in this round
    uint32_t bytes = 0;        // the bytes of this round's gradient that are sent
    float magnitude = 0;       // the gradient's
    uint32_t carried = 0;      // rounds in a row
    uint8_t initial_part = 0;  // the part of the initial parameters that is being sent
  };
  struct Key {
    uint64_t offset = 0, elements = 0;
    uint64_t gradient_begin = 0, gradient_end = 0;  // bytes
    uint32_t first_chunk = 0, chunks = 0;
    uint32_t exchanged = 0;  // the number of its chunks that the rank writes or reads
    uint32_t outstanding = 0;
    int32_t priority = 0;
    uint64_t columns = 0;  // the elements of a row, if its rows are sent
    bool lazy = false;     // a result may be that of the round before, of which nothing is sent
    uint64_t round = 0;
  };
  struct Queue {
    std::vector<uint32_t> chunks;
    uint32_t outstanding = 0;     // results
    VerdictReader verdict;        // for gated jobs
    std::vector<uint32_t> early;  // chunks
    uint32_t nic = 0;             // index into waiting_of_
  };
  struct Waiting {     // a message to be posted
    int64_t priority;  // its place in the session's order
    uint64_t sequence;
    uint32_t chunk;
    ImmKind kind;                                 // kData: a push, which may be null
    bool operator<(const Waiting& other) const {  // the order of a max-heap
      return priority != other.priority ? priority < other.priority : sequence > other.sequence;
    }
  };

  void measure(Chunk& chunk, bool null) const;
  void handle(const Arrival& arrival);
  void read_verdict(Queue& queue, const Imm& imm);
  ResultPlace place_of_result(const Chunk& chunk) const;
  void add_difference(const Chunk& chunk);
  void complete(Chunk& chunk);
  void violation(std::string problem);
  void find_nics();
  int64_t priority_of(uint32_t chunk, int32_t priority) const;
  void enqueue(uint32_t chunk, int32_t priority, ImmKind kind);
  bool post(const Waiting& waiting);
  void post_waiting();
  void carry_over_of(std::vector<Waiting>& waiting, size_t key, uint32_t most_rounds,
                     const Keep& keep);
  void stage_initial(uint32_t chunk, uint32_t part);

  WorkerLink& link_;
  const SendOrder order_;
  const uint64_t shuffle_;  // the seed of job and rank
  const bool gathers_;      // small writes, for one flush
  uint32_t gathered_ = 0;
  uint64_t gathered_bytes_ = 0;
  std::chrono::steady_clock::time_point flushed_;
  const bool gated_;
  const ResultFormat result_format_;
  // If results come back as differences: their format, and the round whose result comes whole.
  std::optional<kernels::DType> difference_;
  uint64_t whole_round_ = 0;
  uint64_t all_elements_ = 0;   // the number of elements in all results
  std::vector<float> decoded_;  // room for the largest chunk
  std::vector<Key> keys_;
  std::vector<Chunk> chunks_;
  std::vector<Queue> queues_;
  std::vector<uint32_t> wake_after_;
  std::vector<std::vector<Waiting>> waiting_of_;  // by NIC: heaps
  size_t waiting_ = 0;                            // the number in all of these heaps
  std::vector<uint32_t> completed_;
  std::vector<const float*> initial_;  // by key, while the initial parameters are sent
  uint64_t sequence_ = 0;
  size_t keys_outstanding_ = 0;
  uint64_t next_round_ = 1;
  std::optional<RoundVerdict> verdict_;
  bool broken_ = false;
  bool protocol_violation_ = false;
  bool needs_initial_;
  std::string problem_;
  uint64_t chunks_pushed_ = 0, chunks_received_ = 0, chunks_carried_over_ = 0;
  TraceLog* trace_ = nullptr;        // null: no trace
  std::vector<uint64_t> pushed_ns_;  // by key
};

}  // namespace phub

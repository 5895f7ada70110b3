// The worker's side of the exchange, driven by poll(): without threads or blocking calls. The
// library wraps it (worker.h), the simulator drives it directly.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/control/messages.h"
#include "transport/trace.h"
#include "transport/transport.h"
#include "transport/verdict.h"
#include "worker/session/initial_parameters.h"
#include "worker/session/results.h"
#include "worker/session/send_order.h"
#include "worker/session/session_keys.h"
#include "worker/session/slot_turns.h"
#include "worker/session/waiting_sends.h"

namespace phub {

class Session : public SessionKeys {
 public:
  // Throws Error(kInternal) if the answer's keys, chunks and queues contradict each other, or do
  // not fit into the link's memory.
  Session(const JoinReply& reply, WorkerLink& link, SendOrder order = SendOrder::kPriority);

  // In a job with gated rounds, the verdict on the latest round of which a result is here. nullopt
  // if there is none, as before the first push.
  const std::optional<RoundVerdict>& verdict() const { return verdict_; }

  // The weight of the pushes that follow. REQUIRES: is_weight(weight) in
  // transport/contribution_weight.h; it is 1 unless the job has weights.
  void set_weight(float weight) { weight_ = weight; }
  float weight() const { return weight_; }
  // What the box did not count, as it came too late (JobSpec::late_decay): is called for a chunk
  // that was pushed with a gradient, when the result of a round comes that the box dropped it in.
  // The slot still has what was sent.
  using Dropped = std::function<void(size_t key, const ChunkLayout& chunk, const std::byte* slot)>;
  void when_dropped(Dropped dropped) { dropped_ = std::move(dropped); }

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
  // Pushes one of the key's parts(), with the rest to follow: the first one begins the key's round,
  // and the key is ready again when all were pushed and have their results. REQUIRES: for part 0 as
  // push(); for others, the part before it was the latest.
  void push_part(size_t key, size_t part, int32_t priority, bool null);
  bool flush_is_due() const;
  bool flush();  // returns whether anything was sent

  // Starts to send the initial parameters; `of_key(key)` returns those of a key, in f32.
  // REQUIRES: initial().needed(), and no push before.
  void send_initial(const std::function<const float*(size_t key)>& of_key);
  const InitialParameters& initial() const { return initial_; }
  // Stops sending them: their memory is not used afterwards.
  void forget_initial() { initial_.forget(); }

  // Handles arrivals, and sends chunks that waited for room. Returns whether anything happened.
  bool poll();
  bool waits_for_room() const { return waiting_.size() > 0 || turns_.waiting() > 0; }
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

 private:
  void begin_push(size_t key);
  void push_chunk(Chunk& chunk, bool null);
  void measure(Chunk& chunk, bool null) const;
  uint64_t weight_at(const Chunk& chunk) const {  // in its slot
    return chunk.null ? chunk.slot_bytes : chunk.bytes;
  }
  void handle(const Arrival& arrival);
  void read_verdict(Queue& queue, const Imm& imm);
  void note_late(const Chunk& chunk, uint32_t rounds);
  void complete(Chunk& chunk);
  void violation(std::string problem);
  void begin_waiting();
  void enqueue(uint32_t chunk, int32_t priority, ImmKind kind);
  bool needs_shared_slot(const WaitingSend& waiting) const;
  void leave_slot(const Chunk& chunk);
  bool post(const WaitingSend& waiting);
  void post_waiting();

  const bool gated_;
  const bool skips_;  // a result may be that of a later round: this rank was late
  const float late_decay_;
  const uint32_t weight_bytes_;  // behind each gradient; 0: there is no weight
  float weight_ = 1;
  Dropped dropped_;
  const bool gathers_;  // small writes, for one flush
  uint32_t gathered_ = 0;
  uint64_t gathered_bytes_ = 0;
  std::chrono::steady_clock::time_point flushed_;
  Results results_;
  std::vector<uint32_t> wake_after_;
  WaitingSends waiting_;
  SlotTurns turns_;
  InitialParameters initial_;
  std::optional<RoundVerdict> verdict_;
  bool broken_ = false;
  bool protocol_violation_ = false;
  std::string problem_;
  uint64_t chunks_carried_over_ = 0;
  size_t partly_pushed_ = 0;         // keys
  TraceLog* trace_ = nullptr;        // null: no trace
  std::vector<uint64_t> pushed_ns_;  // by key
};

}  // namespace phub

#include "worker/session/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/slots.h"
#include "transport/contribution_weight.h"
#include "transport/error.h"
#include "transport/switch/generation.h"

namespace phub {
namespace {

// If a flush is a system call, small writes that follow each other closely share one.
constexpr uint32_t kGatheredWrites = 64;
constexpr uint64_t kGatheredBytes = 32 << 10;
constexpr std::chrono::microseconds kGatherFor{50};

uint32_t largest_of(const auto& chunks) {  // elements
  uint32_t largest = 0;
  for (const ChunkLayout& chunk : chunks) largest = std::max(largest, chunk.elements);
  return largest;
}

}  // namespace

Session::Session(const JoinReply& reply, WorkerLink& link, SendOrder order)
    : SessionKeys(reply, link),
      gated_(is_gated(reply.spec)),
      skips_(reply.spec.quorum > 0),
      late_decay_(static_cast<float>(reply.spec.late_decay)),
      weight_bytes_(weight_bytes_of(reply.spec)),
      gathers_(link.needs_polling()),
      results_(result_format_, reply.first_round - 1, all_elements_, !link.zero_copy(),
               largest_of(chunks_)),
      wake_after_(queues_.size()),
      waiting_(order, shuffled(rounding_seed(reply.spec.name) ^ shuffled(reply.rank))),
      turns_(queue_shares_),
      initial_(reply.send_initial) {
  if (gated_) {
    for (Queue& queue : queues_) queue.early.reserve(queue.chunks.size());
  }
  begin_waiting();
}

void Session::begin_waiting() {
  std::vector<size_t> chunks;
  for (const Queue& queue : queues_) chunks.push_back(queue.chunks.size());
  waiting_.begin(link_, chunks);
  turns_.begin();
}

void Session::push(size_t key_index, int32_t priority, bool null,
                   std::span<const float> magnitudes) {
  begin_push(key_index);
  const Key& key = keys_[key_index];
  for (uint32_t c = key.first_chunk; c < key.first_chunk + key.chunks; ++c) {
    Chunk& chunk = chunks_[c];
    if (!chunk.exchanged()) continue;
    push_chunk(chunk, null);
    chunk.magnitude = magnitudes.empty() ? 0 : magnitudes[c - key.first_chunk];
    enqueue(c, priority, ImmKind::kData);
  }
  post_waiting();
}

void Session::push_part(size_t key_index, size_t part, int32_t priority, bool null) {
  if (part == 0) begin_push(key_index);
  Key& key = keys_[key_index];
  PHUB_CHECK(part == key.parts_pushed && part < key.parts);
  ++key.parts_pushed;
  if (part == 0) ++partly_pushed_;
  if (key.parts_pushed == key.parts) --partly_pushed_;
  const uint32_t first = static_cast<uint32_t>(part) * key.chunks_per_part;
  const uint32_t end = std::min(first + key.chunks_per_part, key.chunks);
  part_outstanding_[key.first_part + part] = end - first;
  for (uint32_t c = key.first_chunk + first; c < key.first_chunk + end; ++c) {
    push_chunk(chunks_[c], null);
    enqueue(c, priority, ImmKind::kData);
  }
  post_waiting();
}

void Session::begin_push(size_t key_index) {
  Key& key = keys_[key_index];
  PHUB_CHECK(key.outstanding == 0 && key.exchanged > 0 && !initial_.sending());
  if (trace_) pushed_ns_[key_index] = trace_now_ns();
  key.outstanding = key.exchanged;
  key.parts_pushed = 0;
  next_round_ = std::max(next_round_, key.round + 2);
  ++keys_outstanding_;
}

void Session::push_chunk(Chunk& chunk, bool null) {
  chunk.awaited = keys_[chunk.key].round + 1;
  chunk.outstanding = true;
  chunk.pushed = true;
  measure(chunk, null || !chunk.writes);
  chunk.posted = false;
  chunk.magnitude = 0;
  chunk.weight = weight_;
  if (weight_bytes_ > 0) {
    std::memcpy(link_.gradients().data() + chunk.gradient_offset + weight_at(chunk), &chunk.weight,
                weight_bytes_);
  }
  ++queues_[chunk.queue].outstanding;
  ++chunks_pushed_;
}

// What is sent of the chunk's gradient.
void Session::measure(Chunk& chunk, bool null) const {
  chunk.null = null;
  chunk.bytes = chunk.slot_bytes;
  if (const FormatSchedule* const schedule = schedules_.of(chunk.key)) {
    chunk.bytes = static_cast<uint32_t>(schedule->at(chunk.awaited).bytes(chunk.elements));
  }
  const uint64_t columns = keys_[chunk.key].columns;
  if (columns == 0 || null) return;
  const uint32_t rows = kernels::row_count(link_.gradients().data() + chunk.gradient_offset);
  chunk.null = rows == 0;
  chunk.bytes =
      static_cast<uint32_t>(kernels::bytes_behind(rows, chunk.elements / columns, columns));
  PHUB_CHECK(chunk.bytes <= chunk.slot_bytes);
}

void Session::send_initial(const std::function<const float*(size_t key)>& of_key) {
  initial_.begin(keys(), of_key);
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    if (!chunks_[c].outstanding) continue;
    initial_.stage(link_, chunks_[c], 0);
    chunks_[c].initial_part = 0;
    enqueue(c, 0, ImmKind::kInitial);
  }
  post_waiting();
  flush();
  initial_.all_begun();
}

bool Session::post(const WaitingSend& waiting) {
  const Chunk& chunk = chunks_[waiting.chunk];
  Imm imm{chunk.index, low8(chunk.awaited), waiting.kind};
  uint64_t bytes = 0, at = 0;  // of the slot
  if (waiting.kind == ImmKind::kData) {
    if (chunk.null) imm.kind = ImmKind::kNull;
    bytes = (chunk.null ? 0 : chunk.bytes) + weight_bytes_;
    if (chunk.null && weight_bytes_ > 0) at = weight_at(chunk);
  }
  if (waiting.kind == ImmKind::kInitial) {
    imm.round = chunk.initial_part;
    bytes =
        initial_part(chunk.elements, chunk.slot_bytes, chunk.initial_part).count * sizeof(float);
  }
  return link_.endpoint().post({chunk.queue}, {.local_offset = chunk.gradient_offset + at,
                                               .remote_offset = chunk.slot_offset + at,
                                               .bytes = static_cast<uint32_t>(bytes),
                                               .imm = encode(imm)});
}

bool Session::needs_shared_slot(const WaitingSend& waiting) const {
  const bool has_payload = waiting.kind == ImmKind::kInitial ||
                           (waiting.kind == ImmKind::kData && !chunks_[waiting.chunk].null);
  return turns_.are_there() && has_payload;
}

// If it has one that it shares: the next one may.
void Session::leave_slot(const Chunk& chunk) {
  const auto id = queues_[chunk.queue].chunks[chunk.index];
  if (const auto next = turns_.release(chunk.queue, chunk.index, id)) {
    waiting_.add_again(chunk.queue, *next);
  }
}

// Posts waiting chunks, highest priority first, as long as there is room.
void Session::post_waiting() {
  waiting_.post_all([this](const WaitingSend& first) {
    Chunk& chunk = chunks_[first.chunk];
    const bool takes = needs_shared_slot(first);
    if (takes && !turns_.may_take(chunk.queue, chunk.index, first)) return true;
    const auto post_first = [&] { return !broken_ && post(first); };
    // An endpoint that takes no more may do so once it has sent what it holds.
    if (!post_first() && !(flush() && post_first())) return false;
    if (takes) turns_.take(chunk.queue, chunk.index, first.chunk);
    if (!chunk.null) gathered_bytes_ += chunk.bytes;
    chunk.posted = true;
    ++gathered_;
    return true;
  });
}

void Session::enqueue(uint32_t id, int32_t priority, ImmKind kind) {
  const Chunk& chunk = chunks_[id];
  waiting_.add(chunk.queue, id,
               {.priority = int64_t{keys_[chunk.key].priority} + priority,
                .round = chunk.awaited,
                .magnitude = chunk.magnitude},
               kind);
}

bool Session::flush_is_due() const {
  if (gathered_ == 0 || !gathers_) return gathered_ > 0;
  return gathered_ >= kGatheredWrites || gathered_bytes_ >= kGatheredBytes ||
         std::chrono::steady_clock::now() - flushed_ > kGatherFor;
}

bool Session::flush() {
  if (gathered_ == 0) return false;
  gathered_ = 0;
  gathered_bytes_ = 0;
  if (gathers_) flushed_ = std::chrono::steady_clock::now();
  link_.endpoint().flush();
  return true;
}

bool Session::poll() {
  std::array<Arrival, 256> arrivals;
  bool any = false;
  completed_.clear();
  completed_parts_.clear();
  for (;;) {
    const size_t n = link_.endpoint().poll(arrivals);
    for (size_t i = 0; i < n; ++i) handle(arrivals[i]);
    any |= n > 0;
    if (n < arrivals.size()) break;
  }
  post_waiting();
  return flush() || any;
}

void Session::violation(std::string problem) {
  broken_ = protocol_violation_ = true;
  problem_ = std::move(problem);
}

void Session::handle(const Arrival& arrival) {
  if (broken_) return;
  if (!arrival.ok && arrival.violation) {
    return violation(fmt::format("protocol violation by the server on queue {}", arrival.queue));
  }
  if (!arrival.ok) {
    broken_ = true;
    problem_ = fmt::format("the connection of queue {} broke", arrival.queue);
    return;
  }
  const Imm imm = decode(arrival.imm);
  if (is_switch_beginning(imm)) return;  // this rank does not use the switch
  if (imm.kind == ImmKind::kControl && arrival.queue < queues_.size()) {
    return read_verdict(queues_[arrival.queue], imm);
  }
  if (arrival.queue >= queues_.size() || imm.chunk >= queues_[arrival.queue].chunks.size()) {
    return violation(fmt::format("the server named chunk {} of queue {}, which does not exist",
                                 imm.chunk, arrival.queue));
  }
  Queue& queue = queues_[arrival.queue];
  const uint32_t id = queue.chunks[imm.chunk];
  Chunk& chunk = chunks_[id];
  const ResultPlace place = results_.place(chunk, chunk.awaited);
  const uint64_t bytes = imm.kind == ImmKind::kData ? place.bytes : 0;
  if (!arrival.fits(bytes, place.byte)) {
    return violation(fmt::format("the server sent {} bytes to {} for chunk {}, which has {} at {}",
                                 arrival.bytes, arrival.offset, id, bytes, place.byte));
  }
  if (imm.kind == ImmKind::kInitial && chunk.pushed) {  // its gradient was taken
    if (imm.round == low8(chunk.awaited)) leave_slot(chunk);
    return;
  }
  if (imm.kind == ImmKind::kInitial) {
    if (!chunk.outstanding || !initial_.sending() || imm.round != chunk.initial_part) return;
    initial_.stage(link_, chunk, ++chunk.initial_part);
    return enqueue(id, 0, ImmKind::kInitial);
  }
  if (imm.kind == ImmKind::kNull && chunk.reads && !keys_[chunk.key].lazy) {
    return violation(fmt::format(
        "the server sent no result for chunk {}, which this rank reads and whose key is not lazy",
        id));
  }
  // A rank of a job with a quorum that was late takes part in a later round than it pushed for.
  constexpr uint32_t kMostSkipped = 127;
  const uint32_t skipped = low8(imm.round - low8(chunk.awaited));
  const bool skips = skips_ && chunk.outstanding && chunk.pushed && skipped <= kMostSkipped;
  // No result comes twice: the second could land on the one after it.
  if (!chunk.outstanding || chunk.early || (skipped != 0 && !skips)) {
    return violation(fmt::format("the server sent round {} (mod 256) of chunk {}, {} is {}",
                                 imm.round, id, chunk.outstanding ? "awaited" : "already here",
                                 chunk.awaited));
  }
  if (skipped > 0) note_late(chunk, skipped);
  chunk.awaited += skipped;
  if (gated_ && chunk.pushed && !queue.verdict.has(chunk.awaited)) {
    chunk.early = true;
    return queue.early.push_back(id);
  }
  complete(chunk);
}

void Session::note_late(const Chunk& chunk, uint32_t rounds) {
  if (chunk.null || !dropped_) return;
  if (reduced_weight(chunk.weight, late_factor(late_decay_, rounds)) > 0) return;
  dropped_(chunk.key, chunk, link_.gradients().data() + chunk.gradient_offset);
}

void Session::read_verdict(Queue& queue, const Imm& imm) {
  if (!gated_) return violation("the server sent a verdict, and no round of this job has one");
  if (!queue.verdict.read(imm)) {
    return violation(
        fmt::format("the server sent part {} of a verdict, which does not exist", imm.round & 3));
  }
  if (queue.early.empty() || !queue.verdict.has(chunks_[queue.early.front()].awaited)) return;
  for (const uint32_t id : queue.early) complete(chunks_[id]);
  queue.early.clear();
}

void Session::complete(Chunk& chunk) {
  if (chunk.reads && results_.adds(chunk.awaited)) {
    results_.add(link_.writable_results(), chunk, chunk.awaited);
  }
  ++chunks_received_;
  Queue& queue = queues_[chunk.queue];
  if (gated_ && chunk.pushed) verdict_ = queue.verdict.verdict(chunk.awaited);
  leave_slot(chunk);
  if (!chunk.null) chunk.carried = 0;
  chunk.outstanding = chunk.pushed = chunk.early = false;
  --queue.outstanding;
  Key& key = keys_[chunk.key];
  if (key.parts_pushed > 0) {
    const uint32_t part = (queue.chunks[chunk.index] - key.first_chunk) / key.chunks_per_part;
    if (--part_outstanding_[key.first_part + part] == 0) {
      completed_parts_.push_back({.key = chunk.key, .part = part});
    }
  }
  if (--key.outstanding > 0) return;
  key.round = chunk.awaited;  // of any chunk that it awaited a result of
  next_round_ = std::max(next_round_, key.round + 1);
  completed_.push_back(chunk.key);
  if (trace_ && pushed_ns_[chunk.key] > 0) {
    trace_->add({.name = "exchange",
                 .begin_ns = pushed_ns_[chunk.key],
                 .duration_ns = trace_now_ns() - pushed_ns_[chunk.key],
                 .round = key.round,
                 .subject = chunk.key,
                 .kind = TraceEvent::Kind::kOverlapping});
  }
  if (--keys_outstanding_ == 0) initial_.forget();
}

std::chrono::nanoseconds Session::room_in() const {
  return std::chrono::nanoseconds(waits_for_room() ? link_.endpoint().refused_for_ns() : 0);
}

void Session::carry_over(size_t key, uint32_t most_rounds, const Keep& keep) {
  if (broken_ || (key != kAllKeys && ready(key))) return;
  if (room_in().count() == 0) return;  // what waits for room alone goes soon
  std::vector<uint32_t> leaving;
  waiting_.advance([&](const WaitingSend& each) {
    Chunk& chunk = chunks_[each.chunk];
    const bool asked = key == kAllKeys || chunk.key == key;
    const bool may = each.kind == ImmKind::kData && !chunk.null && !chunk.posted;
    if (!asked || !may || chunk.carried >= most_rounds) return false;
    const uint64_t offset = chunk.gradient_offset - keys_[chunk.key].gradient_begin;
    if (!keep(chunk.key, chunk, offset)) return false;
    chunk.null = true;
    ++chunk.carried;
    ++chunks_carried_over_;
    if (turns_.are_there()) leaving.push_back(each.chunk);
    return true;
  });
  // A null is never told to be taken. Its result may wait for a chunk that waits for this slot.
  for (const uint32_t chunk : leaving) leave_slot(chunks_[chunk]);
  post_waiting();
}

// Chunks without a result may or may not have arrived. They are sent again byte-identical, and
// count once. A result that is awaited without a push before it is asked for.
void Session::resend() {
  broken_ = false;
  begin_waiting();
  for (Queue& queue : queues_) {
    queue.early.clear();
    queue.verdict = {};  // or parts that the box sends once more would meet those of the next round
  }
  const ImmKind before_pushes = initial_.sending() ? ImmKind::kInitial : ImmKind::kControl;
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    Chunk& chunk = chunks_[c];
    chunk.early = false;
    if (chunk.outstanding) enqueue(c, 0, chunk.pushed ? ImmKind::kData : before_pushes);
  }
  post_waiting();
  flush();
}

// The missing chunks of all queues are needed, so one wake-up is enough: when the queue that misses
// most of them has got them. (Where a result waits for its verdict, less may come. While a key is
// pushed in parts, more chunks will be missing.)
bool Session::arm(size_t key_index) {
  std::fill(wake_after_.begin(), wake_after_.end(), 0);
  if (broken_) return false;
  if (waits_for_room() || key_index == kAnyKey || partly_pushed_ > 0) {
    return link_.endpoint().arm({});
  }
  if (key_index == kAllKeys) {
    const auto most = std::ranges::max_element(queues_, {}, &Queue::outstanding);
    const auto at = static_cast<size_t>(most - queues_.begin());
    wake_after_[at] = most->early.empty() ? most->outstanding : 1;
  } else {
    const Key& key = keys_[key_index];
    for (uint32_t c = key.first_chunk; c < key.first_chunk + key.chunks; ++c) {
      if (chunks_[c].outstanding) ++wake_after_[chunks_[c].queue];
    }
    auto most = std::max_element(wake_after_.begin(), wake_after_.end());
    if (!queues_[static_cast<size_t>(most - wake_after_.begin())].early.empty()) *most = 1;
    for (uint32_t& count : wake_after_) {
      if (&count != &*most) count = 0;
    }
  }
  return link_.endpoint().arm(wake_after_);
}

}  // namespace phub

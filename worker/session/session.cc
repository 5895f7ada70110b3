#include "worker/session/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/encode.h"
#include "kernels/slots.h"
#include "transport/error.h"
#include "transport/switch/generation.h"

namespace phub {
namespace {

// If a flush is a system call, small writes that follow each other closely share one.
constexpr uint32_t kGatheredWrites = 64;
constexpr uint64_t kGatheredBytes = 32 << 10;
constexpr std::chrono::microseconds kGatherFor{50};

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
  const bool lock_step = reply.spec.consistency == "bsp";
  if (!lock_step && reply.rank >= reply.spec.max_ranks) {
    fail(ErrorCode::kInternal, "the server's answer contradicts itself: rank {} of {}", reply.rank,
         reply.spec.max_ranks);
  }
  LinkLayout layout =
      link_layout(layout_of(reply), reply.spec.max_ranks, result_format_of(reply.spec),
                  lock_step ? 1 : reply.spec.max_ranks);
  if (!lock_step) layout.result_copy = reply.rank;
  return layout;
}

Session::Session(const JoinReply& reply, WorkerLink& link, SendOrder order)
    : link_(link),
      order_(order),
      shuffle_(shuffled(rounding_seed(reply.spec.name) ^ shuffled(reply.rank))),
      gathers_(link.needs_polling()),
      gated_(is_gated(reply.spec)),
      result_format_(result_format_of(reply.spec)),
      whole_round_(reply.first_round - 1) {
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
  if (result_format_.difference && !link_.zero_copy()) {
    difference_ = kernels::parse_format(result_format_.difference->name);
    uint32_t largest = 0;
    for (const ChunkLayout& chunk : layout.chunks) largest = std::max(largest, chunk.elements);
    decoded_.resize(largest);
  }
  next_round_ = reply.first_round;
  needs_initial_ = reply.send_initial;
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
    if (!interest.empty()) chunk.interest = interest[c];
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
    if (chunk.interest.any()) ++key.exchanged;
  }
  keys_outstanding_ = keys_.size();
  for (std::vector<uint32_t>& chunks : layout.queue_chunks) {
    Queue& queue = queues_.emplace_back();
    queue.outstanding = static_cast<uint32_t>(chunks.size());
    if (gated_) queue.early.reserve(chunks.size());
    queue.chunks = std::move(chunks);
  }
  wake_after_.assign(queues_.size(), 0);
  find_nics();
  completed_.reserve(keys_.size());
}

std::span<std::byte> Session::gradient(size_t key) {
  return link_.gradients().subspan(keys_[key].gradient_begin,
                                   keys_[key].gradient_end - keys_[key].gradient_begin);
}

std::span<const std::byte> Session::result(size_t key) const {
  const uint64_t bytes = result_format_.element_bytes;
  return link_.results().subspan(keys_[key].offset * bytes, keys_[key].elements * bytes);
}

uint64_t Session::pushed_round(size_t key_index) const {
  const Key& key = keys_[key_index];
  const auto chunks = std::span(chunks_).subspan(key.first_chunk, key.chunks);
  const bool waits = std::ranges::any_of(
      chunks, [](const Chunk& chunk) { return chunk.outstanding && chunk.pushed; });
  return key.round + (waits ? 1 : 0);
}

void Session::push(size_t key_index, int32_t priority, bool null,
                   std::span<const float> magnitudes) {
  Key& key = keys_[key_index];
  PHUB_CHECK(key.outstanding == 0 && key.exchanged > 0 && initial_.empty());
  if (trace_) pushed_ns_[key_index] = trace_now_ns();
  for (uint32_t c = key.first_chunk; c < key.first_chunk + key.chunks; ++c) {
    Chunk& chunk = chunks_[c];
    if (!chunk.interest.any()) continue;
    chunk.awaited = key.round + 1;
    chunk.outstanding = true;
    chunk.pushed = true;
    measure(chunk, null || !chunk.interest.writes);
    chunk.posted = false;
    chunk.magnitude = magnitudes.empty() ? 0 : magnitudes[c - key.first_chunk];
    ++queues_[chunk.queue].outstanding;
    enqueue(c, priority, ImmKind::kData);
  }
  key.outstanding = key.exchanged;
  next_round_ = std::max(next_round_, key.round + 2);
  ++keys_outstanding_;
  chunks_pushed_ += key.exchanged;
  post_waiting();
}

// What is sent of the chunk's gradient.
void Session::measure(Chunk& chunk, bool null) const {
  chunk.null = null;
  chunk.bytes = chunk.slot_bytes;
  const uint64_t columns = keys_[chunk.key].columns;
  if (columns == 0 || null) return;
  const uint32_t rows = kernels::row_count(link_.gradients().data() + chunk.gradient_offset);
  chunk.null = rows == 0;
  chunk.bytes = static_cast<uint32_t>(kernels::bytes_of_rows(columns, rows));
  PHUB_CHECK(chunk.bytes <= chunk.slot_bytes);
}

void Session::send_initial(const std::function<const float*(size_t key)>& of_key) {
  std::vector<const float*> initial;
  for (size_t k = 0; k < keys_.size(); ++k) initial.push_back(of_key(k));
  initial_ = std::move(initial);
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    if (!chunks_[c].outstanding) continue;
    stage_initial(c, 0);
    enqueue(c, 0, ImmKind::kInitial);
  }
  post_waiting();
  flush();
  needs_initial_ = false;
}

void Session::stage_initial(uint32_t c, uint32_t part) {
  Chunk& chunk = chunks_[c];
  const auto [first, count] = initial_part(chunk.elements, chunk.slot_bytes, part);
  const float* const from = initial_[chunk.key] + chunk.key_element + first;
  link_.write_gradients(chunk.gradient_offset, std::as_bytes(std::span(from, count)));
  chunk.initial_part = static_cast<uint8_t>(part);
}

bool Session::post(const Waiting& waiting) {
  const Chunk& chunk = chunks_[waiting.chunk];
  Imm imm{chunk.index, low8(chunk.awaited), waiting.kind};
  uint64_t bytes = 0;
  if (waiting.kind == ImmKind::kData) {
    if (chunk.null) imm.kind = ImmKind::kNull;
    bytes = chunk.null ? 0 : chunk.bytes;
  }
  if (waiting.kind == ImmKind::kInitial) {
    imm.round = chunk.initial_part;
    bytes =
        initial_part(chunk.elements, chunk.slot_bytes, chunk.initial_part).count * sizeof(float);
  }
  return link_.endpoint().post({chunk.queue}, {.local_offset = chunk.gradient_offset,
                                               .remote_offset = chunk.slot_offset,
                                               .bytes = static_cast<uint32_t>(bytes),
                                               .imm = encode(imm)});
}

// Posts waiting chunks, highest priority first, as long as there is room.
void Session::post_waiting() {
  for (std::vector<Waiting>& waiting : waiting_of_) {
    const auto post_first = [&] { return !broken_ && post(waiting.front()); };
    // An endpoint that takes no more may do so once it has sent what it holds.
    while (!waiting.empty() && (post_first() || (flush() && post_first()))) {
      Chunk& chunk = chunks_[waiting.front().chunk];
      if (!chunk.null) gathered_bytes_ += chunk.bytes;
      chunk.posted = true;
      ++gathered_;
      std::pop_heap(waiting.begin(), waiting.end());
      waiting.pop_back();
      --waiting_;
    }
  }
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
  const ResultPlace place = place_of_result(chunk);
  const uint64_t bytes = imm.kind == ImmKind::kData ? place.bytes : 0;
  if (!arrival.fits(bytes, place.byte)) {
    return violation(fmt::format("the server sent {} bytes to {} for chunk {}, which has {} at {}",
                                 arrival.bytes, arrival.offset, id, bytes, place.byte));
  }
  if (imm.kind == ImmKind::kInitial) {
    if (!chunk.outstanding || initial_.empty() || imm.round != chunk.initial_part) return;
    stage_initial(id, chunk.initial_part + 1u);
    return enqueue(id, 0, ImmKind::kInitial);
  }
  if (imm.kind == ImmKind::kNull && chunk.interest.reads && !keys_[chunk.key].lazy) {
    return violation(fmt::format(
        "the server sent no result for chunk {}, which this rank reads and whose key is not lazy",
        id));
  }
  // No result comes twice: the second could land on the one after it.
  if (!chunk.outstanding || chunk.early || imm.round != low8(chunk.awaited)) {
    return violation(fmt::format("the server sent round {} (mod 256) of chunk {}, {} is {}",
                                 imm.round, id, chunk.outstanding ? "awaited" : "already here",
                                 chunk.awaited));
  }
  if (gated_ && chunk.pushed && !queue.verdict.has(chunk.awaited)) {
    chunk.early = true;
    return queue.early.push_back(id);
  }
  complete(chunk);
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

ResultPlace Session::place_of_result(const Chunk& chunk) const {
  if (!result_format_.difference || chunk.awaited == whole_round_) {
    return result_place(result_format_, chunk.offset, chunk.elements);
  }
  return difference_place(result_format_, all_elements_, chunk.offset, chunk.elements);
}

void Session::add_difference(const Chunk& chunk) {
  const std::span<std::byte> results = link_.writable_results();
  auto* const view = reinterpret_cast<float*>(
      results.data() + result_place(result_format_, chunk.offset, chunk.elements).byte);
  kernels::add_decoded(results.data() + place_of_result(chunk).byte, *difference_, decoded_.data(),
                       view, chunk.elements);
}

void Session::complete(Chunk& chunk) {
  const bool adds = difference_ && chunk.interest.reads;
  if (adds && chunk.awaited != whole_round_) add_difference(chunk);
  ++chunks_received_;
  Queue& queue = queues_[chunk.queue];
  if (gated_ && chunk.pushed) verdict_ = queue.verdict.verdict(chunk.awaited);
  if (!chunk.null) chunk.carried = 0;
  chunk.outstanding = chunk.pushed = chunk.early = false;
  --queue.outstanding;
  Key& key = keys_[chunk.key];
  if (--key.outstanding > 0) return;
  key.round = chunk.awaited;  // of any chunk that it awaited a result of
  completed_.push_back(chunk.key);
  if (trace_ && pushed_ns_[chunk.key] > 0) {
    trace_->add({.name = "exchange",
                 .begin_ns = pushed_ns_[chunk.key],
                 .duration_ns = trace_now_ns() - pushed_ns_[chunk.key],
                 .round = key.round,
                 .subject = chunk.key,
                 .kind = TraceEvent::Kind::kOverlapping});
  }
  if (--keys_outstanding_ == 0) initial_.clear();
}

// Chunks without a result may or may not have arrived. They are sent again byte-identical, and
// count once. A result that is awaited without a push before it is asked for.
void Session::resend() {
  broken_ = false;
  for (std::vector<Waiting>& waiting : waiting_of_) waiting.clear();
  waiting_ = 0;
  find_nics();
  for (Queue& queue : queues_) {
    queue.early.clear();
    queue.verdict = {};  // or parts that the box sends once more would meet those of the next round
  }
  const ImmKind before_pushes = initial_.empty() ? ImmKind::kControl : ImmKind::kInitial;
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    Chunk& chunk = chunks_[c];
    chunk.early = false;
    if (chunk.outstanding) enqueue(c, 0, chunk.pushed ? ImmKind::kData : before_pushes);
  }
  post_waiting();
  flush();
}

// The missing chunks of all queues are needed, so one wake-up is enough: when the queue that misses
// most of them has got them. (Where a result waits for its verdict, less may come.)
bool Session::arm(size_t key_index) {
  std::fill(wake_after_.begin(), wake_after_.end(), 0);
  if (broken_) return false;
  if (waiting_ > 0 || key_index == kAnyKey) return link_.endpoint().arm({});
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

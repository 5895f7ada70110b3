#include "worker/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/kernels.h"
#include "transport/error.h"

namespace phub {
namespace {

size_t element_bytes(const std::string& dtype) {
  auto t = kernels::parse_dtype(dtype);
  if (!t) fail(ErrorCode::kInternal, "the server's answer has an unknown format '{}'", dtype);
  return kernels::bytes_of(*t);
}

constexpr uint32_t low8(uint64_t round) { return static_cast<uint32_t>(round & 0xff); }

}  // namespace

LinkLayout link_layout_of(const JoinReply& reply) {
  LinkLayout layout;
  layout.max_ranks = reply.spec.max_ranks;
  layout.cores = static_cast<uint32_t>(reply.layout.queue_chunks.size());
  for (const auto& chunks : reply.layout.queue_chunks) {
    layout.queue_chunks.push_back(static_cast<uint32_t>(chunks.size()));
  }
  layout.gradient_bytes = static_cast<uint32_t>(element_bytes(reply.spec.gradient_dtype));
  layout.result_bytes = static_cast<uint32_t>(element_bytes(reply.spec.parameter_dtype));
  layout.ingress_bytes = reply.layout.total_elements * layout.gradient_bytes;
  layout.egress_bytes = reply.layout.total_elements * layout.result_bytes;
  if (reply.spec.consistency != "bsp") {
    layout.egress_copies = reply.spec.max_ranks;
    layout.egress_copy = reply.rank;
  }
  return layout;
}

Session::Session(const JoinReply& reply, WorkerLink& link)
    : link_(link),
      gradient_bytes_(element_bytes(reply.spec.gradient_dtype)),
      result_bytes_(element_bytes(reply.spec.parameter_dtype)),
      queues_(reply.layout.queue_chunks) {
  const JobSpec& spec = reply.spec;
  auto malformed = [](const std::string& what) {
    fail(ErrorCode::kInternal, "the server's answer does not fit together: {}", what);
  };
  const bool laid_out_by_keys = reply.layout.queue_offset.empty();
  if (reply.layout.key_offset.size() != spec.keys.size() || spec.chunk_elements == 0 ||
      reply.first_round == 0) {
    malformed("keys and offsets");
  }
  if (!laid_out_by_keys && reply.layout.queue_offset.size() != queues_.size()) {
    malformed("queues and their offsets");
  }
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    Key key;
    key.offset = reply.layout.key_offset[k];
    key.elements = spec.keys[k].elements;
    key.first_chunk = static_cast<uint32_t>(chunks_.size());
    key.round = reply.first_round - 1;
    if (key.offset > reply.layout.total_elements ||
        key.elements > reply.layout.total_elements - key.offset) {
      malformed(fmt::format("key '{}' ends behind the layout", spec.keys[k].name));
    }
    for (uint64_t begin = 0; begin < key.elements; begin += spec.chunk_elements) {
      Chunk chunk;
      chunk.offset = key.offset + begin;
      chunk.elements =
          static_cast<uint32_t>(std::min<uint64_t>(spec.chunk_elements, key.elements - begin));
      chunk.key = static_cast<uint32_t>(k);
      chunk.queue = static_cast<uint32_t>(queues_.size());  // none yet
      chunk.awaited = reply.first_round - 1;
      chunk.outstanding = true;
      chunks_.push_back(chunk);
    }
    key.chunks = static_cast<uint32_t>(chunks_.size()) - key.first_chunk;
    key.outstanding = key.chunks;
    keys_.push_back(key);
  }
  keys_outstanding_ = keys_.size();
  size_t routed = 0;
  for (uint32_t q = 0; q < queues_.size(); ++q) {
    uint64_t box_offset = laid_out_by_keys ? 0 : reply.layout.queue_offset[q];
    for (uint32_t i = 0; i < queues_[q].size(); ++i, ++routed) {
      const uint32_t id = queues_[q][i];
      if (id >= chunks_.size() || chunks_[id].queue != queues_.size()) {
        malformed(fmt::format("chunk {} of queue {}", id, q));
      }
      chunks_[id].queue = q;
      chunks_[id].index = i;
      chunks_[id].box_offset = laid_out_by_keys ? chunks_[id].offset : box_offset;
      box_offset +=
          (chunks_[id].elements + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
    }
    queue_outstanding_.push_back(static_cast<uint32_t>(queues_[q].size()));
  }
  if (routed != chunks_.size()) malformed(fmt::format("{} chunks are routed", routed));
  wake_after_.assign(queues_.size(), 0);
  waiting_.reserve(chunks_.size());
}

std::span<std::byte> Session::gradient(size_t key) {
  return link_.gradients().subspan(keys_[key].offset * gradient_bytes_,
                                   keys_[key].elements * gradient_bytes_);
}

std::span<const std::byte> Session::result(size_t key) const {
  return link_.results().subspan(keys_[key].offset * result_bytes_,
                                 keys_[key].elements * result_bytes_);
}

void Session::push(size_t key_index, int32_t priority, bool null) {
  Key& key = keys_[key_index];
  PHUB_CHECK(key.outstanding == 0 && initial_.empty());
  if (trace_) pushed_ns_[key_index] = trace_now_ns();
  for (uint32_t c = key.first_chunk; c < key.first_chunk + key.chunks; ++c) {
    Chunk& chunk = chunks_[c];
    chunk.awaited = key.round + 1;
    chunk.outstanding = true;
    chunk.pushed = true;
    chunk.null = null;
    ++queue_outstanding_[chunk.queue];
    enqueue(c, priority, false);
  }
  key.outstanding = key.chunks;
  ++keys_outstanding_;
  chunks_pushed_ += key.chunks;
  post_waiting();
}

void Session::send_initial(const std::function<const float*(size_t key)>& of_key) {
  initial_.resize(keys_.size());
  for (size_t k = 0; k < keys_.size(); ++k) initial_[k] = of_key(k);
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    if (!chunks_[c].outstanding) continue;
    stage_initial(c, 0);
    enqueue(c, 0, true);
  }
  post_waiting();
}

// Initial parameters are f32 whatever the gradients' format, so a 16-bit slot takes them in two
// parts.
void Session::stage_initial(uint32_t c, uint32_t part) {
  Chunk& chunk = chunks_[c];
  const uint32_t half = gradient_bytes_ == sizeof(float) ? chunk.elements : chunk.elements / 2;
  const uint32_t begin = part == 0 ? 0 : half;
  const uint32_t count = part == 0 ? half : chunk.elements - half;
  const uint64_t in_key = chunk.offset - keys_[chunk.key].offset;
  std::memcpy(link_.gradients().data() + chunk.offset * gradient_bytes_,
              initial_[chunk.key] + in_key + begin, count * sizeof(float));
  chunk.initial_part = static_cast<uint8_t>(part);
}

void Session::enqueue(uint32_t chunk, int32_t priority, bool initial) {
  waiting_.push_back({priority, sequence_++, chunk, initial});
  std::push_heap(waiting_.begin(), waiting_.end());
}

bool Session::post(const Waiting& waiting) {
  const Chunk& chunk = chunks_[waiting.chunk];
  const bool bare = chunk.null && !waiting.initial;
  // The last part of the initial parameters of an odd chunk is two bytes longer than its gradient:
  // the padding between keys has room for it.
  const uint32_t spill = waiting.initial && gradient_bytes_ == 2 && chunk.elements % 2 ? 2 : 0;
  const Imm imm{chunk.index, waiting.initial ? chunk.initial_part : low8(chunk.awaited),
                waiting.initial ? ImmKind::kInitial
                : bare          ? ImmKind::kNull
                                : ImmKind::kData};
  const auto bytes = static_cast<uint32_t>(chunk.elements * gradient_bytes_ + spill);
  return link_.endpoint().post(chunk.queue, {.local_offset = chunk.offset * gradient_bytes_,
                                             .remote_offset = chunk.box_offset * gradient_bytes_,
                                             .bytes = bare ? 0 : bytes,
                                             .imm = encode(imm)});
}

// Highest priority first, as far as there is room.
bool Session::post_waiting() {
  bool posted = false;
  while (!waiting_.empty() && !broken_ && post(waiting_.front())) {
    std::pop_heap(waiting_.begin(), waiting_.end());
    waiting_.pop_back();
    posted = true;
  }
  if (posted) link_.endpoint().flush();
  return posted;
}

bool Session::poll() {
  std::array<Arrival, 256> arrivals;
  bool any = false;
  for (;;) {
    const size_t n = link_.endpoint().poll(arrivals);
    for (size_t i = 0; i < n; ++i) take(arrivals[i]);
    any |= n > 0;
    if (n < arrivals.size()) break;
  }
  return post_waiting() || any;
}

void Session::fail_with(std::string problem) {
  broken_ = misled_ = true;
  problem_ = std::move(problem);
}

void Session::take(const Arrival& arrival) {
  if (broken_) return;
  if (!arrival.ok) {
    broken_ = true;
    problem_ = fmt::format("the connection of queue {} broke", arrival.qp);
    return;
  }
  const Imm imm = decode(arrival.imm);
  if (arrival.qp >= queues_.size() || imm.chunk >= queues_[arrival.qp].size()) {
    return fail_with(fmt::format("the server named chunk {} of queue {}, which is not there",
                                 imm.chunk, arrival.qp));
  }
  const uint32_t id = queues_[arrival.qp][imm.chunk];
  Chunk& chunk = chunks_[id];
  if (imm.kind == ImmKind::kInitial) {
    if (!chunk.outstanding || initial_.empty() || imm.round != chunk.initial_part) return;
    stage_initial(id, chunk.initial_part + 1u);
    return enqueue(id, 0, true);
  }
  if (!chunk.outstanding || imm.round != low8(chunk.awaited)) {
    if (imm.round == low8(chunk.awaited - (chunk.outstanding ? 1 : 0))) return;  // once more
    return fail_with(fmt::format("the server sent round {} (mod 256) of chunk {}, awaited is {}",
                                 imm.round, id, chunk.awaited));
  }
  ++chunks_received_;
  chunk.outstanding = false;
  chunk.pushed = false;
  --queue_outstanding_[chunk.queue];
  Key& key = keys_[chunk.key];
  if (--key.outstanding > 0) return;
  key.round = chunk.awaited;
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

// After a reconnection: whatever was posted and not answered may or may not have arrived. What is
// sent again is byte-identical, and counts once.
void Session::resend() {
  broken_ = false;
  waiting_.clear();
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    if (!chunks_[c].outstanding) continue;
    if (chunks_[c].pushed) enqueue(c, 0, false);
    if (!chunks_[c].pushed && !initial_.empty()) enqueue(c, 0, true);
  }
  post_waiting();
}

// All of the queues' missing chunks are needed, so it is enough to be woken when the first of the
// queues has them all; no earlier.
bool Session::arm(size_t key_index) {
  std::fill(wake_after_.begin(), wake_after_.end(), 0);
  if (broken_) return false;
  if (!waiting_.empty() || key_index == kAnyKey) return link_.endpoint().arm({});
  if (key_index == kAllKeys) {
    auto most = std::max_element(queue_outstanding_.begin(), queue_outstanding_.end());
    wake_after_[static_cast<size_t>(most - queue_outstanding_.begin())] = *most;
  } else {
    const Key& key = keys_[key_index];
    for (uint32_t c = key.first_chunk; c < key.first_chunk + key.chunks; ++c) {
      if (chunks_[c].outstanding) ++wake_after_[chunks_[c].queue];
    }
    auto most = std::max_element(wake_after_.begin(), wake_after_.end());
    for (uint32_t& count : wake_after_) {
      if (&count != &*most) count = 0;
    }
  }
  return link_.endpoint().arm(wake_after_);
}

}  // namespace phub

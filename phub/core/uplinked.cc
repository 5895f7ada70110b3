#include "phub/core/uplinked.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>

#include "transport/error.h"
#include "transport/layout.h"

namespace phub {

Uplinked::Uplinked(const Stages& stages, CoreUplink uplink)
    : LockStep(stages),
      uplink_(std::move(uplink)),
      result_bytes_(
          static_cast<uint32_t>(kernels::bytes_of(stages.parameters.rules.parameter_dtype))),
      sent_(stages.table.size(), kNothing),
      place_(stages.table.size()) {
  for (uint32_t i = 0; i < uplink_.places.size(); ++i) {
    const CoreUplink::Place& place = uplink_.places[i];
    if (queues_.size() <= place.queue) queues_.resize(place.queue + 1);
    std::vector<uint32_t>& chunks = queues_[place.queue].chunks;
    if (chunks.size() <= place.index) chunks.resize(place.index + 1, kNoChunk);
    chunks[place.index] = i;
  }
  for (Queue& queue : queues_) {
    std::ranges::copy_if(queue.chunks, std::back_inserter(queue.order),
                         [](uint32_t chunk) { return chunk != kNoChunk; });
    std::ranges::sort(queue.order);
    std::ranges::stable_sort(queue.order, std::greater(),
                             [this](uint32_t chunk) { return stages_.table[chunk].priority; });
    for (uint32_t at = 0; at < queue.order.size(); ++at) place_[queue.order[at]] = at;
    queue.unposted = IndexSet(queue.order.size());
  }
  if (!stages_.parameters.rules.gated) return;
  for (Queue& queue : queues_) queue.early.reserve(queue.chunks.size());
  done_.reserve(uplink_.places.size());
}

Way::Closed Uplinked::close(uint32_t index) {
  const CoreChunk& chunk = stages_.table[index];
  std::byte* const to = uplink_.sums.data() + uplink_.places[index].sum;
  uint32_t participants = 0;
  bool null = true;
  if (!chunk.vacant || chunk.arrived > 0) {
    const auto sum = stages_.reducer.sum_for_parent(index, reinterpret_cast<float*>(to));
    if (!sum) return Closed::kNotNow;
    participants = sum->participants;
    null = sum->null;
  }
  std::memcpy(to + chunk.elements * sizeof(float), &participants, sizeof participants);
  post(index, null ? ImmKind::kNull : ImmKind::kData);
  return Closed::kPending;
}

void Uplinked::post(uint32_t index, ImmKind kind) {
  sent_[index] = kind;
  const bool first = queues_[uplink_.places[index].queue].unposted.empty();
  if (!first || !post_again(index)) wait_for_room(index);
}

void Uplinked::wait_for_room(uint32_t index) {
  IndexSet& unposted = queues_[uplink_.places[index].queue].unposted;
  const size_t before = unposted.size();
  unposted.insert(place_[index]);
  unposted_ += unposted.size() - before;
}

void Uplinked::post_unposted() {
  for (Queue& queue : queues_) {
    while (!queue.unposted.empty() && post_again(queue.order[queue.unposted.lowest()])) {
      queue.unposted.erase(queue.unposted.lowest());
      --unposted_;
    }
  }
}

// False: there is no room, or no budget.
bool Uplinked::post_again(uint32_t index) {
  if (broken_) return false;
  const CoreChunk& chunk = stages_.table[index];
  const CoreUplink::Place& place = uplink_.places[index];
  const uint32_t gradient = chunk.elements * static_cast<uint32_t>(sizeof(float));
  constexpr uint32_t kTrailer = kTrailerElements * sizeof(float);
  Write write{.local_offset = place.sum,
              .remote_offset = place.slot,
              .bytes = gradient,
              .imm = encode({place.index, low8(chunk.round), sent_[index]})};
  switch (sent_[index]) {
    case ImmKind::kData:
      write.bytes += kTrailer;
      break;
    case ImmKind::kNull:  // its trailer alone
      write.local_offset += gradient;
      write.remote_offset += gradient;
      write.bytes = kTrailer;
      break;
    case ImmKind::kInitial:
      write.imm = encode({place.index, 0, ImmKind::kInitial});
      break;
    case ImmKind::kControl:  // the result of the round before the first is awaited
      if (!chunk.closed) return true;
      write.bytes = 0;
      break;
  }
  if (!uplink_.endpoint->post({place.queue}, write)) return false;
  unflushed_ = true;
  return true;
}

uint32_t Uplinked::next_done() {
  if (broken_) return kNoChunk;
  if (unposted_ > 0) post_unposted();
  if (std::exchange(unflushed_, false)) uplink_.endpoint->flush();
  for (;;) {
    if (!done_.empty()) {
      const uint32_t index = done_.back();
      done_.pop_back();
      return take_result(index);
    }
    if (taken_ == arrived_) {
      taken_ = 0;
      arrived_ = uplink_.endpoint->poll(arrivals_);
      if (arrived_ == 0) return kNoChunk;
    }
    const uint32_t index = take(arrivals_[taken_++]);
    if (index != kNoChunk) return index;
    if (broken_) return kNoChunk;
  }
}

// The chunk whose result came. kNoChunk: it came before, or the connection broke. Throws Error.
uint32_t Uplinked::take(const Arrival& arrival) {
  if (!arrival.ok) {
    if (arrival.violation) fail(ErrorCode::kInternal, "the parent violates the protocol");
    broken_ = true;
    taken_ = arrived_ = 0;
    stages_.reports.add(CoreReport::kParentBroke, CoreReport::kNoRank);
    return kNoChunk;
  }
  const Imm imm = decode(arrival.imm);
  const bool is_verdict = imm.kind == ImmKind::kControl && stages_.parameters.rules.gated;
  if (is_verdict && arrival.queue < queues_.size()) {
    read_verdict(arrival.queue, imm);
    return kNoChunk;
  }
  const bool known =
      arrival.queue < queues_.size() && imm.chunk < queues_[arrival.queue].chunks.size();
  const uint32_t index = known ? queues_[arrival.queue].chunks[imm.chunk] : kNoChunk;
  if (index == kNoChunk) {
    fail(ErrorCode::kInternal, "the parent sent chunk {} of queue {}, which is not of this core",
         imm.chunk, arrival.queue);
  }
  if (imm.kind == ImmKind::kInitial) return kNoChunk;  // the result follows
  const CoreChunk& chunk = stages_.table[index];
  const CoreUplink::Place& place = uplink_.places[index];
  const uint64_t bytes = uint64_t{chunk.elements} * result_bytes_;
  if (imm.kind != ImmKind::kData || !arrival.fits(bytes, place.result)) {
    fail(ErrorCode::kInternal, "the parent sent kind {} with {} bytes to {}, not {} bytes to {}",
         static_cast<uint32_t>(imm.kind), arrival.bytes, arrival.offset, bytes, place.result);
  }
  if (!chunk.closed || imm.round != low8(chunk.round)) {
    fail(ErrorCode::kInternal, "the parent sent round {} (mod 256) of a chunk in round {}",
         imm.round, chunk.round);
  }
  // A round that this rack took part in has a verdict, which may come later.
  Queue& queue = queues_[place.queue];
  const bool has_verdict = stages_.parameters.rules.gated && sent_[index] <= ImmKind::kNull;
  if (has_verdict && !queue.verdict.has(chunk.round)) {
    queue.early.push_back(index);
    return kNoChunk;
  }
  return take_result(index);
}

void Uplinked::read_verdict(uint32_t number, const Imm& imm) {
  Queue& queue = queues_[number];
  if (!queue.verdict.read(imm)) {
    fail(ErrorCode::kInternal, "the parent sent part {} of a verdict", imm.round & 3);
  }
  if (queue.early.empty()) return;
  if (!queue.verdict.has(stages_.table[queue.early.front()].round)) return;
  done_.insert(done_.end(), queue.early.begin(), queue.early.end());
  queue.early.clear();
}

uint32_t Uplinked::take_result(uint32_t index) {
  const CoreChunk& chunk = stages_.table[index];
  const CoreUplink::Place& place = uplink_.places[index];
  std::memcpy(uplink_.rack_results + chunk.offset * result_bytes_,
              uplink_.results.data() + place.result, uint64_t{chunk.elements} * result_bytes_);
  if (stages_.parameters.rules.gated) pass_verdict_on(place.queue, chunk.round);
  sent_[index] = kNothing;
  return index;
}

// Whichever queue has it first: it is the same on all.
void Uplinked::pass_verdict_on(uint32_t queue, uint64_t round) {
  if (round == verdict_round_ || !queues_[queue].verdict.has(round)) return;
  verdict_round_ = round;
  stages_.outbox.announce(queues_[queue].verdict.verdict(round));
}

void Uplinked::finish(uint32_t index) {
  const uint64_t round = stages_.table[index].round;
  if (round >= stages_.parameters.first_round) stages_.table.count_completed(index);
  begin_round(index, round + 1);
  find_vacant(index);
}

void Uplinked::find_vacant(uint32_t index) {
  CoreChunk& chunk = stages_.table[index];
  const bool empty = !chunk.closed && chunk.arrived == 0 && chunk.missing == 0;
  if (!empty || stages_.table.next_round(index, chunk.round - 1) == chunk.round) return;
  chunk.vacant = true;
  moved_on_ = true;
}

void Uplinked::store_initial(uint32_t index, uint32_t part) {
  if (sent_[index] == ImmKind::kInitial) return;  // a successor of rank 0 sends them once more
  const CoreChunk& chunk = stages_.table[index];
  const auto [begin, count] =
      initial_part(chunk.elements, stages_.table.most_slot_bytes(chunk), part);
  std::memcpy(uplink_.sums.data() + uplink_.places[index].sum + begin * sizeof(float),
              stages_.table.slot(0, index), count * sizeof(float));
}

void Uplinked::begin(uint32_t index) {
  if (sent_[index] != ImmKind::kInitial) post(index, ImmKind::kInitial);
}

void Uplinked::settle(uint32_t index) { find_vacant(index); }

void Uplinked::suspend_parent() {
  broken_ = true;
  unflushed_ = false;
  taken_ = arrived_ = 0;
}

void Uplinked::resume_parent() {
  broken_ = false;
  done_.clear();
  for (Queue& queue : queues_) {
    queue.early.clear();
    queue.verdict = {};
  }
  for (uint32_t i = 0; i < sent_.size(); ++i) {
    if (sent_[i] != kNothing || stages_.table[i].closed) wait_for_room(i);
  }
}

bool Uplinked::arm() {
  if (broken_) return true;
  if (unflushed_ || !done_.empty() || taken_ < arrived_) return false;
  return uplink_.endpoint->arm({});
}

}  // namespace phub

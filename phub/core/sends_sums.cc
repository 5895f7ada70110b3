#include "phub/core/sends_sums.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>

#include "transport/error.h"
#include "transport/layout.h"

namespace phub {

SumSender::SumSender(const Stages& stages, CoreUplink uplink)
    : uplink_(std::move(uplink)),
      sent_(stages.table.size(), kNothing),
      chunks_(stages.table),
      reports_of_sums_(stages.reports),
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
                             [this](uint32_t chunk) { return chunks_[chunk].priority; });
    for (uint32_t at = 0; at < queue.order.size(); ++at) place_[queue.order[at]] = at;
    queue.unposted = IndexSet(queue.order.size());
  }
}

void SumSender::post_sum(uint32_t index, uint32_t participants, bool null) {
  float* const to = sum_of(index);
  std::memcpy(to + chunks_[index].elements, &participants, sizeof participants);
  post(index, null ? ImmKind::kNull : ImmKind::kData);
}

void SumSender::post(uint32_t index, ImmKind kind) {
  sent_[index] = kind;
  const bool first = queues_[uplink_.places[index].queue].unposted.empty();
  if (!first || !post_again(index)) wait_for_room(index);
}

void SumSender::wait_for_room(uint32_t index) {
  IndexSet& unposted = queues_[uplink_.places[index].queue].unposted;
  const size_t before = unposted.size();
  unposted.insert(place_[index]);
  unposted_ += unposted.size() - before;
}

void SumSender::post_unposted() {
  for (Queue& queue : queues_) {
    while (!queue.unposted.empty() && post_again(queue.order[queue.unposted.lowest()])) {
      queue.unposted.erase(queue.unposted.lowest());
      --unposted_;
    }
  }
}

// False: there is no room, or no budget.
bool SumSender::post_again(uint32_t index) {
  if (broken_) return false;
  const CoreChunk& chunk = chunks_[index];
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

bool SumSender::next_arrival(Arrival& arrival) {
  if (broken_) return false;
  if (unposted_ > 0) post_unposted();
  if (std::exchange(unflushed_, false)) uplink_.endpoint->flush();
  if (taken_ == arrived_) {
    taken_ = 0;
    arrived_ = uplink_.endpoint->poll(arrivals_);
    if (arrived_ == 0) return false;
  }
  arrival = arrivals_[taken_++];
  return true;
}

bool SumSender::is_break(const Arrival& arrival) {
  if (arrival.ok) return false;
  if (arrival.violation) fail(ErrorCode::kInternal, "the box above violates the protocol");
  break_off();
  return true;
}

void SumSender::break_off() {
  broken_ = true;
  taken_ = arrived_ = 0;
  reports_of_sums_.add(CoreReport::kParentBroke, CoreReport::kNoRank);
}

uint32_t SumSender::chunk_of(const Arrival& arrival, const Imm& imm) const {
  const bool known =
      arrival.queue < queues_.size() && imm.chunk < queues_[arrival.queue].chunks.size();
  const uint32_t index = known ? queues_[arrival.queue].chunks[imm.chunk] : kNoChunk;
  if (index == kNoChunk) {
    fail(ErrorCode::kInternal, "the box above sent chunk {} of queue {}, which is not of this core",
         imm.chunk, arrival.queue);
  }
  return index;
}

void SumSender::suspend() {
  broken_ = true;
  unflushed_ = false;
  taken_ = arrived_ = 0;
}

bool SumSender::arm_endpoint() {
  if (broken_) return true;
  if (unflushed_ || taken_ < arrived_) return false;
  return uplink_.endpoint->arm({});
}

}  // namespace phub

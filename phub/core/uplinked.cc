#include "phub/core/uplinked.h"

#include <algorithm>
#include <cstring>

#include "transport/error.h"
#include "transport/layout.h"

namespace phub {

Uplinked::Uplinked(const Stages& stages, CoreUplink uplink)
    : LockStep(stages),
      uplink_(std::move(uplink)),
      result_bytes_(static_cast<uint32_t>(kernels::bytes_of(stages.parameters.parameter_dtype))),
      sent_(stages.table.size(), kNothing),
      unposted_(stages.table.size()) {
  for (uint32_t i = 0; i < uplink_.places.size(); ++i) {
    const CoreUplink::Place& place = uplink_.places[i];
    if (by_queue_.size() <= place.queue) by_queue_.resize(place.queue + 1);
    std::vector<uint32_t>& chunks = by_queue_[place.queue];
    if (chunks.size() <= place.index) chunks.resize(place.index + 1, kNoChunk);
    chunks[place.index] = i;
  }
  verdicts_.resize(by_queue_.size());
  if (!stages.parameters.gated) return;
  for (size_t q = 0; q < by_queue_.size(); ++q) verdicts_[q].early.reserve(by_queue_[q].size());
  done_.reserve(sent_.size());
}

Way::Closed Uplinked::close(uint32_t index) {
  const CoreChunk& chunk = stages_.table[index];
  std::byte* const slot = uplink_.slots.data() + uplink_.places[index].slot;
  uint32_t participants = 0;
  bool null = true;
  if (!chunk.vacant || chunk.arrived > 0) {
    const auto sum = stages_.reducer.sum_for_parent(index, reinterpret_cast<float*>(slot));
    if (!sum) return Closed::kNotNow;
    participants = sum->participants;
    null = sum->null;
  }
  std::memcpy(slot + chunk.elements * sizeof(float), &participants, sizeof participants);
  post(index, null ? ImmKind::kNull : ImmKind::kData);
  return Closed::kPending;
}

void Uplinked::post(uint32_t index, ImmKind kind) {
  sent_[index] = kind;
  if (!unposted_.empty() || !post_again(index)) unposted_.insert(index);
}

// False: there is no room.
bool Uplinked::post_again(uint32_t index) {
  if (broken_) return false;
  const CoreChunk& chunk = stages_.table[index];
  const CoreUplink::Place& place = uplink_.places[index];
  const uint32_t gradient = chunk.elements * static_cast<uint32_t>(sizeof(float));
  constexpr uint32_t kTrailer = kTrailerElements * sizeof(float);
  Write write{.local_offset = place.slot,
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
    case ImmKind::kControl:  // asks for the first result
      write.bytes = 0;
      break;
  }
  if (!uplink_.endpoint->post({place.queue}, write)) return false;
  unflushed_ = true;
  return true;
}

uint32_t Uplinked::next_done() {
  if (!done_.empty()) {
    const uint32_t index = done_.back();
    done_.pop_back();
    return taken(index);
  }
  if (broken_) return kNoChunk;
  while (!unposted_.empty() && post_again(unposted_.lowest())) unposted_.erase(unposted_.lowest());
  if (std::exchange(unflushed_, false)) uplink_.endpoint->flush();
  for (;;) {
    if (taken_ == arrived_) {
      taken_ = 0;
      arrived_ = uplink_.endpoint->poll(arrivals_);
      if (arrived_ == 0) return kNoChunk;
    }
    const uint32_t index = take(arrivals_[taken_++]);
    if (index != kNoChunk) return taken(index);
    if (broken_) return kNoChunk;
  }
}

// The chunk whose result is there, with the verdict on its round. kNoChunk: none is, or the
// connection broke. Throws Error.
uint32_t Uplinked::take(const Arrival& arrival) {
  if (!arrival.ok) {
    if (arrival.violation) fail(ErrorCode::kInternal, "the parent violates the protocol");
    broken_ = true;
    taken_ = arrived_ = 0;
    stages_.reports.add(CoreReport::kParentBroke, CoreReport::kNoRank);
    return kNoChunk;
  }
  const Imm imm = decode(arrival.imm);
  const bool is_verdict = imm.kind == ImmKind::kControl && stages_.parameters.gated;
  if (is_verdict && arrival.queue < verdicts_.size()) return take_verdict(arrival.queue, imm);
  const bool known =
      arrival.queue < by_queue_.size() && imm.chunk < by_queue_[arrival.queue].size();
  const uint32_t index = known ? by_queue_[arrival.queue][imm.chunk] : kNoChunk;
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
    if (imm.round == low8(chunk.round - 1)) return kNoChunk;  // sent twice
    fail(ErrorCode::kInternal, "the parent sent round {} (mod 256) of a chunk in round {}",
         imm.round, chunk.round);
  }
  if (has_verdict(chunk) && !verdicts_[place.queue].reader.has(chunk.round)) {
    verdicts_[place.queue].early.push_back(index);
    return kNoChunk;
  }
  return index;
}

// The round is one of those that this rack takes part in: the parent tells it the verdict.
bool Uplinked::has_verdict(const CoreChunk& chunk) const {
  return stages_.parameters.gated && chunk.round >= stages_.parameters.first_round;
}

uint32_t Uplinked::take_verdict(uint32_t queue, const Imm& imm) {
  Verdicts& verdicts = verdicts_[queue];
  if (!verdicts.reader.read(imm)) {
    fail(ErrorCode::kInternal, "the parent sent part {} of a verdict", imm.round & 3);
  }
  if (verdicts.early.empty()) return kNoChunk;
  if (!verdicts.reader.has(stages_.table[verdicts.early.front()].round)) return kNoChunk;
  const uint32_t index = verdicts.early.back();
  verdicts.early.pop_back();
  done_.insert(done_.end(), verdicts.early.begin(), verdicts.early.end());
  verdicts.early.clear();
  return index;
}

// Its result goes on to the ranks, and the verdict with it: whichever queue has that first, it is
// the same on all.
uint32_t Uplinked::taken(uint32_t index) {
  const CoreChunk& chunk = stages_.table[index];
  const CoreUplink::Place& place = uplink_.places[index];
  std::memcpy(uplink_.rack_results + chunk.offset * result_bytes_,
              uplink_.results.data() + place.result, uint64_t{chunk.elements} * result_bytes_);
  sent_[index] = kNothing;
  if (has_verdict(chunk) && chunk.round != verdict_round_) {
    verdict_round_ = chunk.round;
    stages_.outbox.announce(verdicts_[place.queue].reader.verdict(chunk.round));
  }
  return index;
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
      initial_part(chunk.elements, kernels::bytes_of(stages_.parameters.gradient_dtype), part);
  std::memcpy(uplink_.slots.data() + uplink_.places[index].slot + begin * sizeof(float),
              stages_.table.rank(0).slots +
                  kernels::slot_bytes(stages_.parameters.gradient_dtype, chunk.offset),
              count * sizeof(float));
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

// A result that no push asked for is asked for.
void Uplinked::resume_parent() {
  broken_ = false;
  for (Verdicts& verdicts : verdicts_) {
    verdicts.reader = {};  // or parts that come once more would meet those of the next round
    verdicts.early.clear();
  }
  for (uint32_t i = 0; i < sent_.size(); ++i) {
    const CoreChunk& chunk = stages_.table[i];
    const bool awaits_first = chunk.closed && chunk.round < stages_.parameters.first_round;
    const bool is_done = std::ranges::find(done_, i) != done_.end();
    if ((sent_[i] != kNothing || awaits_first) && !is_done) unposted_.insert(i);
  }
}

bool Uplinked::arm() {
  if (!done_.empty()) return false;
  if (broken_) return true;
  if (unflushed_ || !unposted_.empty() || taken_ < arrived_) return false;
  return uplink_.endpoint->arm({});
}

}  // namespace phub

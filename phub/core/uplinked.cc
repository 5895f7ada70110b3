#include "phub/core/uplinked.h"

#include <cstring>
#include <utility>

#include "transport/error.h"
#include "transport/layout.h"

namespace phub {

Uplinked::Uplinked(const Stages& stages, CoreUplink uplink)
    : SendsSums(std::move(uplink), stages),
      result_bytes_(
          static_cast<uint32_t>(kernels::bytes_of(stages.parameters.rules.parameter_dtype))) {
  if (!stages_.parameters.rules.gated) return;
  verdicts_.resize(queues_.size());
  for (size_t q = 0; q < queues_.size(); ++q) verdicts_[q].early.reserve(queues_[q].chunks.size());
  done_.reserve(uplink_.places.size());
}

Way::Closed Uplinked::close(uint32_t index) {
  const CoreChunk& chunk = stages_.table[index];
  uint32_t participants = 0;
  bool null = true;
  if (!chunk.vacant || chunk.arrived > 0) {
    const auto sum = stages_.reducer.sum_for_parent(index, sum_of(index));
    if (!sum) return Closed::kNotNow;
    participants = sum->participants;
    null = sum->null;
  }
  post_sum(index, participants, null);
  return Closed::kPending;
}

uint32_t Uplinked::next_done() {
  Arrival arrival;
  do {
    if (!broken_ && !done_.empty()) {
      const uint32_t index = done_.back();
      done_.pop_back();
      return take_result(index);
    }
    if (!next_arrival(arrival)) return kNoChunk;
    const uint32_t index = take(arrival);
    if (index != kNoChunk) return index;
  } while (!broken_);
  return kNoChunk;
}

// The chunk whose result came. kNoChunk: it came before, or the connection broke. Throws Error.
uint32_t Uplinked::take(const Arrival& arrival) {
  if (is_break(arrival)) return kNoChunk;
  const Imm imm = decode(arrival.imm);
  const bool is_verdict = imm.kind == ImmKind::kControl && stages_.parameters.rules.gated;
  if (is_verdict && arrival.queue < queues_.size()) {
    read_verdict(arrival.queue, imm);
    return kNoChunk;
  }
  const uint32_t index = chunk_of(arrival, imm);
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
  const bool has_verdict = stages_.parameters.rules.gated && sent_[index] <= ImmKind::kNull;
  if (has_verdict && !verdicts_[place.queue].verdict.has(chunk.round)) {
    verdicts_[place.queue].early.push_back(index);
    return kNoChunk;
  }
  return take_result(index);
}

void Uplinked::read_verdict(uint32_t number, const Imm& imm) {
  Verdicts& queue = verdicts_[number];
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
  std::memcpy(uplink_.own_results + chunk.offset * result_bytes_,
              uplink_.results.data() + place.result, uint64_t{chunk.elements} * result_bytes_);
  if (stages_.parameters.rules.gated) pass_verdict_on(place.queue, chunk.round);
  sent_[index] = kNothing;
  return index;
}

// Whichever queue has it first: it is the same on all.
void Uplinked::pass_verdict_on(uint32_t queue, uint64_t round) {
  if (round == verdict_round_ || !verdicts_[queue].verdict.has(round)) return;
  verdict_round_ = round;
  stages_.outbox.announce(verdicts_[queue].verdict.verdict(round));
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

void Uplinked::resume_parent() {
  broken_ = false;
  done_.clear();
  for (Verdicts& queue : verdicts_) {
    queue.verdict = {};
    queue.early.clear();
  }
  for (uint32_t i = 0; i < sent_.size(); ++i) {
    if (sent_[i] != kNothing || stages_.table[i].closed) wait_for_room(i);
  }
}

bool Uplinked::arm() { return (broken_ || done_.empty()) && SendsSums::arm(); }

}  // namespace phub

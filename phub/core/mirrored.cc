#include "phub/core/mirrored.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/error.h"

namespace phub {

Mirrored::Mirrored(const Stages& stages, CoreUplink uplink)
    : SendsSums(stages, std::move(uplink)), applies_(stages.table.size()) {
  stages_.table.closes_up_to = 1;
  unapplied_ = stages_.table.size();
}

Way::Closed Mirrored::close(uint32_t index) {
  if (is_alone_) return SendsSums::close(index);
  bool null = true;
  if (!stages_.reducer.sum_aside(index, sum_of(index), null)) return Closed::kNotNow;
  applies_[index] = 1;
  post_sum(index, stages_.table.participants(index) > 0 ? 1 : 0, null);
  return Closed::kPending;
}

uint32_t Mirrored::next_done() {
  for (; is_alone_ && next_alone_ < sent_.size(); ++next_alone_) {
    if (sent_[next_alone_] != kNothing) return done(next_alone_);
  }
  Arrival arrival;
  while (next_arrival(arrival)) {
    try {
      const uint32_t index = take(arrival);
      if (index != kNoChunk) return index;
    } catch (const Error&) {  // it violates the protocol
      break_off();
    }
  }
  return kNoChunk;
}

// The chunk that is done now; kNoChunk: none. Throws Error.
uint32_t Mirrored::take(const Arrival& arrival) {
  if (is_break(arrival)) return kNoChunk;
  const Imm imm = decode(arrival.imm);
  if (imm.kind == ImmKind::kControl) return kNoChunk;  // the verdict of its gate
  const uint32_t index = chunk_of(arrival, imm);
  const CoreChunk& chunk = stages_.table[index];
  if (imm.kind == ImmKind::kData || arrival.bytes > 0) {
    fail(ErrorCode::kInternal, "the standby sent kind {} with {} bytes, and it sends no results",
         static_cast<uint32_t>(imm.kind), arrival.bytes);
  }
  const bool is_pending = sent_[index] != kNothing;
  // A part of the initial parameters was taken: the answer to all of them follows.
  if (imm.kind == ImmKind::kInitial && (!is_pending || chunk.round == 0)) return kNoChunk;
  const uint64_t of_round = is_pending ? chunk.round : chunk.round - 1;
  if (imm.round != low8(of_round)) return kNoChunk;  // it has said so before
  const bool is_taken = is_pending;
  if (imm.kind == ImmKind::kNull) applied(index);
  return is_taken ? done(index) : kNoChunk;
}

uint32_t Mirrored::done(uint32_t index) {
  const ImmKind kind = std::exchange(sent_[index], kNothing);
  if (kind != ImmKind::kInitial) stages_.reducer.apply(index, sum_of(index), store_of(index));
  return index;
}

void Mirrored::applied(uint32_t index) {
  if (std::exchange(applies_[index], 0) == 0 || --unapplied_ > 0) return;
  ++stages_.table.closes_up_to;
  unapplied_ = stages_.table.size();
  moved_on_ = true;
}

void Mirrored::finish(uint32_t index) {
  if (stages_.table[index].round > 0) return SendsSums::finish(index);
  begin_round(index, 1);  // the standby has the initial parameters
  find_vacant(index);
}

// The standby has them, or gets them: a successor of rank 0 sends others in vain.
void Mirrored::store_initial(uint32_t index, uint32_t part) {
  if (!stages_.table[index].closed) SendsSums::store_initial(index, part);
}

void Mirrored::begin(uint32_t index) {
  CoreChunk& chunk = stages_.table[index];
  if (chunk.closed) return;
  if (is_alone_) return finish(index);
  std::memcpy(sum_of(index), stages_.reducer.initial_of(chunk), chunk.elements * sizeof(float));
  chunk.closed = true;
  post(index, ImmKind::kInitial);
}

void Mirrored::resume_parent() {
  is_alone_ = true;
  broken_ = true;
  stages_.table.closes_up_to = kNever;
  moved_on_ = true;
}

}  // namespace phub

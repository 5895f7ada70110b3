// A way with a standby: another box that makes the same steps on the same parameters, and goes on
// with the job when this one dies (phub/job/standby.h).
//
// A chunk closes when its gradient, divided as it is to be, is on its way to the standby. It is
// done when the standby has taken it, so no rank has a result that could be lost with this box. The
// standby applies the gradients of a round once it has all of them, and says so for each chunk. No
// chunk here closes the next round before that: so the standby is at most one round behind, and
// always between two rounds.
//
// When the standby is given up, this is the plain way.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "phub/core/sends_sums.h"
#include "transport/error.h"

namespace phub {

// `Base` says which ranks make a round; each of its chunks has all rounds.
template <typename Base>
class Mirrored final : public SendsSums<Base> {
 public:
  using Closed = Way::Closed;

  template <typename... OfBase>
  Mirrored(CoreUplink uplink, const Stages& stages, OfBase&&... of_base)
      : SendsSums<Base>(std::move(uplink), stages, std::forward<OfBase>(of_base)...),
        applies_(stages.table.size()),
        unapplied_(stages.table.size()) {
    stages.table.closes_up_to = 1;
  }
  static constexpr uint64_t bytes(uint64_t chunks) {
    return sizeof(Mirrored) + SendsSums<Base>::bytes(chunks) + chunks;
  }

  Closed close(uint32_t index) override;
  uint32_t next_done() override;
  void finish(uint32_t index) override;
  void store_initial(uint32_t index, uint32_t part) override;
  void begin(uint32_t index) override;
  bool moved_on() override {
    const bool moved = Base::moved_on();
    return std::exchange(moved_on_, false) || moved;
  }
  void resume_parent() override;  // the standby is given up: goes on alone
  bool arm() override {
    return SendsSums<Base>::arm() && (!is_alone_ || next_alone_ == sent_.size());
  }

 private:
  using SendsSums<Base>::stages_, SendsSums<Base>::sent_, SendsSums<Base>::broken_;
  using SendsSums<Base>::kNothing, SendsSums<Base>::sum_of, SendsSums<Base>::store_of;

  uint32_t take(const Arrival& arrival);
  uint32_t done(uint32_t index);
  void applied(uint32_t index);

  std::vector<uint8_t> applies_;  // by chunk: the standby has still to apply its latest gradient
  uint32_t unapplied_;            // chunks whose gradient of the round it has not applied
  bool moved_on_ = false;
  bool is_alone_ = false;
  uint32_t next_alone_ = 0;  // then: the first chunk that may still be pending
};

template <typename Base>
Way::Closed Mirrored<Base>::close(uint32_t index) {
  if (is_alone_) return Base::close(index);
  bool null = true;
  if (!stages_.reducer.sum_aside(index, sum_of(index), null)) return Closed::kNotNow;
  applies_[index] = 1;
  this->post_sum(index, stages_.table.participants(index) > 0 ? 1 : 0, null);
  return Closed::kPending;
}

template <typename Base>
uint32_t Mirrored<Base>::next_done() {
  for (; is_alone_ && next_alone_ < sent_.size(); ++next_alone_) {
    if (sent_[next_alone_] != kNothing) return done(next_alone_);
  }
  Arrival arrival;
  while (this->next_arrival(arrival)) {
    try {
      const uint32_t index = take(arrival);
      if (index != kNoChunk) return index;
    } catch (const Error&) {  // it violates the protocol
      this->break_off();
    }
  }
  return kNoChunk;
}

// The chunk that is done now; kNoChunk: none. Throws Error.
template <typename Base>
uint32_t Mirrored<Base>::take(const Arrival& arrival) {
  if (this->is_break(arrival)) return kNoChunk;
  const Imm imm = decode(arrival.imm);
  if (imm.kind == ImmKind::kControl) return kNoChunk;  // the verdict of its gate
  const uint32_t index = this->chunk_of(arrival, imm);
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

template <typename Base>
uint32_t Mirrored<Base>::done(uint32_t index) {
  const ImmKind kind = std::exchange(sent_[index], kNothing);
  if (kind != ImmKind::kInitial) stages_.reducer.apply(index, sum_of(index), store_of(index));
  return index;
}

template <typename Base>
void Mirrored<Base>::applied(uint32_t index) {
  if (std::exchange(applies_[index], 0) == 0 || --unapplied_ > 0) return;
  ++stages_.table.closes_up_to;
  unapplied_ = stages_.table.size();
  moved_on_ = true;
}

template <typename Base>
void Mirrored<Base>::finish(uint32_t index) {
  if (stages_.table[index].round > 0) return Base::finish(index);
  Base::begin(index);  // the standby has the initial parameters
  Base::settle(index);
}

// The standby has them, or gets them: a successor of rank 0 sends others in vain.
template <typename Base>
void Mirrored<Base>::store_initial(uint32_t index, uint32_t part) {
  if (!stages_.table[index].closed) Base::store_initial(index, part);
}

template <typename Base>
void Mirrored<Base>::begin(uint32_t index) {
  CoreChunk& chunk = stages_.table[index];
  if (chunk.closed) return;
  if (is_alone_) return finish(index);
  std::memcpy(sum_of(index), stages_.reducer.initial_of(chunk), chunk.elements * sizeof(float));
  chunk.closed = true;
  this->post(index, ImmKind::kInitial);
}

template <typename Base>
void Mirrored<Base>::resume_parent() {
  is_alone_ = broken_ = moved_on_ = true;
  stages_.table.closes_up_to = kNever;
}

}  // namespace phub

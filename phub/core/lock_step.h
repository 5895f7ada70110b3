// Lock-step (BSP): a chunk completes a round when all expected ranks have arrived. The sum in the
// order of ranks and groups is its result, and the same for all.
//
// A way whose chunks close like this, but whose results depend on more, derives from it (gated.h)
// with a close() of its own, which may answer kPending, and its own next_done(). Arrivals,
// boundaries and losses are the same.
#pragma once

#include "phub/core/way.h"

namespace phub {

// What lock-step (LockStep) and rounds with a quorum (quorum.h) have in common: a chunk completes
// one round after the other, with one sum of all that take part.
class InStep : public Way {
 public:
  using Way::Way;

  Closed close(uint32_t index) override {
    return stages_.reducer.reduce(index, store_of(index)) ? Closed::kDone : Closed::kNotNow;
  }
  // Counts a round that is complete here: ranks may have sent other chunks of it, which are still
  // on their way through a switch.
  uint64_t started(uint32_t index) const final {
    const CoreChunk& chunk = stages_.table[index];
    return chunk.round - (chunk.arrived == 0 && chunk.round > 0 ? 1 : 0);
  }
  void lose(const Boundary::Lost& lost) override;
  void save(uint32_t index, uint64_t round, const SavedClocks& to) const final {
    const CoreChunk& chunk = stages_.table[index];
    to.steps[chunk.id] = chunk.steps_before(round);
  }
  void restore(const SavedClocks& from) final;
  uint64_t steps_before(uint32_t index, uint64_t round) const final {
    return stages_.table[index].steps_before(round);
  }
  void set_steps_before(uint32_t index, uint64_t round, uint64_t steps) final {
    stages_.table[index].set_steps_before(round, steps);
  }
  uint64_t lacking(uint32_t index, uint32_t word) const override {
    return stages_.table.lacking(index, word);
  }

 protected:
  // All ranks of the round in progress have arrived, and nothing holds the round back.
  bool may_close(const CoreChunk& chunk, bool has_contributions) const {
    return chunk.missing == 0 && has_contributions && !chunk.closed &&
           chunk.round < stages_.table.hold_from && chunk.round <= stages_.table.closes_up_to;
  }
  // The store of the step in the round in progress: kCached if an order reads the result next.
  kernels::Store store_of(uint32_t index) const {
    const bool is_last = stages_.shelves.next_order(index) == stages_.table[index].round + 1;
    return is_last ? kernels::Store::kCached : stages_.parameters.store;
  }
};

class LockStep : public InStep {
 public:
  using InStep::InStep;

  Verdict accept(uint32_t rank, uint32_t index, const Imm& imm) final;
  bool ready(uint32_t index) const final {
    const CoreChunk& chunk = stages_.table[index];
    return may_close(chunk, chunk.arrived > 0 || chunk.vacant || stages_.table.follows(index));
  }
  void finish(uint32_t index) override {
    const uint64_t round = stages_.table[index].round;
    if (round >= stages_.parameters.first_round) stages_.table.count_completed(index);
    begin_round(index, stages_.table.next_round(index, round));
    if (stages_.table.every_round) settle(index);
  }
  uint64_t completed(uint32_t /*rank*/, uint32_t index) const final {
    return stages_.table[index].round - 1;
  }

  uint64_t taken(uint32_t rank, uint32_t index) const final {
    const ChunkTable& table = stages_.table;
    const bool is_out = table[index].closed || table.is_moved(rank, index);
    return is_out && table.has(rank, index) ? table[index].round : kNever;
  }

  void begin(uint32_t index) override { begin_round(index, stages_.table.next_round(index, 0)); }
  uint64_t last_round(uint32_t rank, uint32_t index) const final {
    const uint64_t round = stages_.table[index].round;
    if (stages_.table.is_idle(rank, index) && stages_.table.follows(index)) {
      return stages_.table.open_round(index) - 1;
    }
    return stages_.table.has(rank, index) || round == 0 ? round : round - 1;
  }
  void admit(const Boundary::Admitted& admitted) final;
  void settle(uint32_t index) override;
  bool anyone_waits(uint32_t index) const override {
    return stages_.table[index].arrived > 0 && stages_.table[index].missing > 0;
  }
  uint32_t indispensable_rank() const final;

 protected:
  // The rounds before are complete: their result, or another branch's parameters, go to all ranks.
  void begin_round(uint32_t index, uint64_t round) {
    if (stages_.shelves.before_round(index, round, *this)) {
      stages_.table[index].same = false;
      stages_.reducer.publish(index);
    }
    stages_.table.begin_round(index, round);
    stages_.outbox.send_to_all(index, round - 1);
  }
};

inline Way::Verdict LockStep::accept(uint32_t rank, uint32_t index, const Imm& imm) {
  const CoreChunk& chunk = stages_.table[index];
  const uint64_t first_round = stages_.table.rank(rank).first_round;
  if (chunk.round == 0 || chunk.round < first_round) return Verdict::kWrongRound;
  if (imm.round != low8(chunk.round)) {
    const bool before = imm.round == low8(chunk.round - 1) && chunk.round > first_round;
    return before ? Verdict::kComplete : Verdict::kWrongRound;
  }
  if (stages_.table.has(rank, index)) return Verdict::kDuplicate;
  stages_.table.mark(rank, index, imm.kind == ImmKind::kNull);
  stages_.trace.arrival(index, chunk, chunk.round, rank, chunk.arrived == 1, chunk.missing == 0);
  return Verdict::kAccepted;
}

}  // namespace phub

// Not in lock-step (SSP, async): every contribution is applied when it arrives, as an update of its
// own, and a rank gets the parameters back as soon as the slowest is within the slack.
//
// Others may change a chunk while its parameters are on their way: each rank has results of its
// own, copied at one instant. The round in progress of a chunk is the slowest rank's next one.
//
// What is ordered about branches before round R is a wall: nobody gets the result of R − 1 before
// the slowest rank has come as far, so that the chunk has all updates up to it and no later one.
// Then the order is carried out, and everybody gets what the branch has with which R begins.
#pragma once

#include "phub/core/clocks.h"
#include "phub/core/way.h"

namespace phub {

class Clocked final : public Way {
 public:
  // Everybody who is expected begins with clock 0; in a job that goes on, with the round before its
  // first.
  explicit Clocked(const Stages& stages);

  Verdict accept(uint32_t rank, uint32_t index, const Imm& imm) override;
  // During a boundary nobody's clock moves.
  bool ready(uint32_t index) const override {
    const CoreChunk& chunk = stages_.table[index];
    return chunk.arrived > 0 && chunk.round > 0 && stages_.table.hold_from == kNever;
  }
  // Applies what has arrived in the order of the ranks.
  Closed close(uint32_t index) override;
  void finish(uint32_t index) override { release(index); }
  uint64_t completed(uint32_t rank, uint32_t index) const override {
    return clocks_.withheld(index, rank) ? kNever : clocks_.of(index, rank);
  }

  void begin(uint32_t index) override;
  uint64_t started(uint32_t index) const override {
    return clocks_.fastest(index) + (stages_.table[index].arrived > 0 ? 1 : 0);
  }
  uint64_t last_round(uint32_t rank, uint32_t index) const override {
    const uint64_t clock = clocks_.of(index, rank);
    return clock == kNever ? 0 : clock;
  }
  void lose(const Boundary::Lost& lost) override;
  void settle(uint32_t index) override { release(index); }  // there may be more slack
  void admit(const Boundary::Admitted& admitted) override;
  void resend(uint32_t rank, uint32_t index) override;
  void save(uint32_t index, uint64_t /*round*/, const SavedClocks& to) const override {
    clocks_.save(index, to, stages_.table[index].id);
  }
  void restore(const SavedClocks& from) override;
  uint64_t steps_before(uint32_t index, uint64_t /*round*/) const override {
    return clocks_.steps(index);
  }
  void set_steps_before(uint32_t index, uint64_t /*round*/, uint64_t steps) override {
    clocks_.steps(index) = steps;
  }
  bool anyone_waits(uint32_t index) const override;
  uint64_t lacking(uint32_t index, uint32_t word) const override;

 private:
  bool apply(uint32_t rank, uint32_t index);
  void release(uint32_t index);
  bool may_have(uint32_t index, uint64_t clock, uint64_t slowest) const;

  CoreClocks clocks_;
};

}  // namespace phub

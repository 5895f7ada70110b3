// Jobs that are not in lock-step (SSP, async): every contribution is applied when it arrives, as an
// update of its own, and a rank gets the parameters back as soon as the slowest is within the
// slack.
//
// Other ranks may change a chunk while its parameters are on their way, so each rank has results of
// its own, copied at one instant. The round in progress of a chunk is the slowest rank's next one.
// What a rank has of a lazy key's chunk is not sent again while no update has changed it.
//
// The slack is the number of rounds of one branch that the slowest rank may be behind. A rank that
// waits for no other in the next round's branch goes on with that round, however many rounds of
// other branches the slowest has not made ("free slack"). An update changes the branch of its
// round, at whatever place the branch lies until the slowest rank has come as far.
//
// A copy that is ordered before round R is a wall in its two branches: no rank gets the state of
// either in R or later before the slowest rank has come to R. So the copy has all updates of the
// rounds before R, and no later one.
#pragma once

#include "phub/core/clocks.h"
#include "phub/core/way.h"

namespace phub {

class Clocked final : public Way {
 public:
  // Every expected rank begins with clock 0; in a job that goes on, with the round before the job's
  // first.
  explicit Clocked(const Stages& stages);

  Verdict accept(uint32_t rank, uint32_t index, const Imm& imm) override;
  // No clock moves during a boundary.
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

  uint64_t taken(uint32_t rank, uint32_t index) const override {
    if (stages_.table.is_moved(rank, index)) return clocks_.of(index, rank) + 1;
    return clocks_.withheld(index, rank) ? clocks_.of(index, rank) : kNever;
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
  bool update(uint32_t rank, uint32_t index, uint64_t round);
  void release(uint32_t index);
  bool may_have(uint64_t clock, const Shelves::Ahead& next) const;

  CoreClocks clocks_;
};

}  // namespace phub

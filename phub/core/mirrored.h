// Lock-step with a standby: another box that makes the same steps on the same parameters, and goes
// on with the job when this one dies (phub/job/standby.h).
//
// A chunk closes when its gradient, divided as it is to be, is on its way to the standby. It is
// done when the standby has taken it, so no rank has a result that could be lost with this box. The
// standby applies the gradients of a round once it has all of them, and says so for each chunk. No
// chunk here closes the next round before that: so the standby is at most one round behind, and
// always between two rounds.
//
// When the standby is given up, this is plain lock-step.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/core/sends_sums.h"

namespace phub {

class Mirrored final : public SendsSums {
 public:
  Mirrored(const Stages& stages, CoreUplink uplink);
  static constexpr uint64_t bytes(uint64_t chunks) {
    return sizeof(Mirrored) + SendsSums::bytes(chunks) + chunks;
  }

  Closed close(uint32_t index) override;
  uint32_t next_done() override;
  void finish(uint32_t index) override;
  void store_initial(uint32_t index, uint32_t part) override;
  void begin(uint32_t index) override;
  void settle(uint32_t index) override {
    if (stages_.table[index].round > 0) find_vacant(index);
  }
  void resume_parent() override;  // the standby is given up: goes on alone
  bool arm() override { return is_alone_ ? next_alone_ == sent_.size() : SendsSums::arm(); }

 private:
  uint32_t take(const Arrival& arrival);
  uint32_t done(uint32_t index);
  void applied(uint32_t index);

  std::vector<uint8_t> applies_;  // by chunk: the standby has still to apply its latest gradient
  uint32_t unapplied_ = 0;        // chunks whose gradient of the round it has not applied
  bool is_alone_ = false;
  uint32_t next_alone_ = 0;  // then: the first chunk that may still be pending
};

}  // namespace phub

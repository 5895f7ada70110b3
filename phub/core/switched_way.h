// Lock-step behind a switch that adds: a chunk's contributions come either from its ranks, one by
// one, or all at once, as the sum that the switch has made of them (switch_intake.h).
//
// A sum has a contribution of every rank: it counts as the first rank's, and the others' count as
// null. The first direct contribution to a chunk of the switch's ends the generation, and so do
// changes of the ranks. Another one begins with a round of which no rank can have sent anything:
// every rank is told before it gets a result with which it could send that round.
//
// Base: LockStep or Gated.
#pragma once

#include <memory>
#include <utility>

#include "phub/core/gated.h"
#include "phub/core/index_set.h"
#include "phub/core/lock_step.h"
#include "phub/core/switch_intake.h"

namespace phub {

template <class Base>
class Switched final : public Base, public Intake {
 public:
  template <typename... More>
  Switched(std::unique_ptr<SwitchIntake> intake, const Stages& stages, More&&... more)
      : Base(stages, std::forward<More>(more)...),
        intake_(std::move(intake)),
        summed_(stages.table.size()) {
    stages.outbox.tell_of_switch(intake_->ranks());
  }

  Intake* intake() override { return this; }
  uint32_t take_in(uint64_t& bytes) override;
  void took_directly(uint32_t rank, uint32_t index) override;
  Way::Closed close(uint32_t index) override;
  bool is_fixed(uint32_t index) const override {
    return Base::is_fixed(index) || summed_.contains(index);
  }
  void hold(CoreReport& held) override;
  void begin_boundary(const Boundary& boundary) override;
  void detached(uint32_t rank) override {
    intake_->end("the connection of a rank is made anew", rank);
  }
  void probe(Probe& out) override;
  bool arm() override { return intake_->drained() && Base::arm(); }
  int fd() const override { return intake_->fd(); }

 private:
  using Base::stages_;

  bool accept_sum(uint32_t index);
  uint64_t highest_of_stream() const;
  CoreReport& report_end();
  void begin_again();
  bool may_begin(uint64_t round) const;

  const std::unique_ptr<SwitchIntake> intake_;
  IndexSet summed_;  // chunks whose round in progress has a sum that is not closed
  bool polled_ = false;
  bool end_reported_ = false;
};

extern template class Switched<LockStep>;
extern template class Switched<Gated>;

}  // namespace phub

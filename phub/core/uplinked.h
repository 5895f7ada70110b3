// Lock-step below a parent: this box is a rack, one rank of the parent's job. A chunk closes when
// its sum is in the parent's slot for this rack, and is pending until the parent's result is there.
// The parent has the optimizer; a rack has neither parameters nor state.
//
// The rounds are the parent's. Every chunk begins closed, in the round before the first: its result
// is the parent's state of the chunk, which the parent sends to a rank that joins. A round in which
// this rack has no rank any more, while others come later, completes all the same: with a null of
// no rank.
//
// Where rounds are gated, the gate is the root's: its verdict is passed on with the results.
//
// The connection may break. Then this says so once, and goes on when there is a new one: unanswered
// sums are sent again, byte for byte.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/core/lock_step.h"
#include "phub/core/sends_sums.h"
#include "transport/transport.h"
#include "transport/verdict.h"

namespace phub {

class Uplinked final : public SendsSums<LockStep> {
 public:
  Uplinked(const Stages& stages, CoreUplink uplink);
  static constexpr uint64_t bytes(uint64_t chunks) {
    return sizeof(Uplinked) + SendsSums::bytes(chunks) + 2 * chunks * sizeof(uint32_t);
  }

  Closed close(uint32_t index) override;
  uint32_t next_done() override;
  void store_initial(uint32_t index, uint32_t part) override;
  void begin(uint32_t index) override;
  void resume_parent() override;
  bool arm() override;

 private:
  uint32_t take(const Arrival& arrival);
  void read_verdict(uint32_t queue, const Imm& imm);
  uint32_t take_result(uint32_t index);
  void pass_verdict_on(uint32_t queue, uint64_t round);

  const uint32_t result_bytes_;  // per element
  struct Verdicts {              // of a gated job
    VerdictReader verdict;
    std::vector<uint32_t> early;  // results that came before the verdict on their round
  };
  std::vector<Verdicts> verdicts_;   // by queue of the parent's plan
  std::vector<uint32_t> done_;       // results whose verdict has come
  uint64_t verdict_round_ = kNever;  // the round of the latest that ranks are told
};

}  // namespace phub

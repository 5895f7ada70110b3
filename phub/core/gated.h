// Lock-step with a gate: no chunk of a round is applied before all of them are summed. Then the
// gradient is clipped to a norm of the whole model, or the round is skipped because its gradient is
// not finite: by all cores, or by none. An optimizer with trust ratios (kernels/trust.h) steps each
// key by norms of all its chunks.
//
// A chunk closes when its sum is in the job's arena, and is pending until the verdict. A round goes
// through these stages:
//
//   closing    chunks close; the last one of this core closes the gate for it
//   waiting    for the other cores
//   finishing  chunks are applied, in the order of ready chunks; then the next round is closed
//
// So all chunks of a core are in the round that is being closed, or, if no rank took part in it, in
// later ones.
#pragma once

#include <utility>

#include "phub/core/lock_step.h"
#include "phub/core/ready_chunks.h"
#include "phub/core/round_gate.h"

namespace phub {

class Gated : public LockStep {
 public:
  // The gate outlives this. `core` is the core's index in the job.
  Gated(const Stages& stages, RoundGate& gate, uint32_t core);
  static constexpr uint64_t bytes(uint64_t chunks) {
    return sizeof(Gated) + ReadyChunks::bytes(chunks);
  }

  Closed close(uint32_t index) override;
  uint32_t next_done() override;
  bool moved_on() override { return std::exchange(moved_on_, false); }
  void begin(uint32_t index) override;
  void settle(uint32_t index) override;
  bool anyone_waits(uint32_t index) const override;
  bool is_called() const override {
    return stage_ == Stage::kWaiting && gate_.has_decided(round());
  }
  bool arm() override { return stage_ != Stage::kWaiting || gate_.arm(core_, round()); }
  std::array<int, 2> wake_fds() const override { return {gate_.wake_fd(core_), -1}; }

 private:
  enum class Stage : uint8_t { kClosing, kWaiting, kFinishing };

  uint64_t round() const { return stages_.table.closes_up_to; }
  void close_round(uint64_t round);
  uint32_t count_open() const;
  void take(const Decision& decision);
  void apply(uint32_t index);

  RoundGate& gate_;
  const uint32_t core_;
  Stage stage_ = Stage::kClosing;
  uint32_t open_ = 0;     // chunks that have still to close the round
  bool recount_ = false;  // open_: a boundary may have changed it
  bool moved_on_ = false;
  Decision decision_;  // the latest
  ReadyChunks pending_;
};

}  // namespace phub

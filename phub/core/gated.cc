#include "phub/core/gated.h"

#include <algorithm>

namespace phub {

Gated::Gated(const Stages& stages, RoundGate& gate, uint32_t core)
    : LockStep(stages), gate_(gate), core_(core), pending_(stages.table.chunks()) {
  close_round(std::max<uint64_t>(stages.parameters.first_round, 1));
  recount_ = true;  // no chunk has its first round yet
}

void Gated::close_round(uint64_t round) {
  stages_.table.closes_up_to = round;
  stage_ = Stage::kClosing;
  open_ = count_open();
  moved_on_ = true;
}

uint32_t Gated::count_open() const {
  return static_cast<uint32_t>(std::ranges::count_if(
      stages_.table.chunks(),
      [this](const CoreChunk& chunk) { return chunk.round <= round() && !chunk.closed; }));
}

Way::Closed Gated::close(uint32_t index) {
  ChunkSquares squares;
  if (!stages_.reducer.sum_for_gate(index, squares)) return Closed::kNotNow;
  const CoreChunk& chunk = stages_.table[index];
  gate_.set_squares(chunk.id, squares);
  if (KeySteps* const steps = gate_.key_steps(); steps && steps->has(chunk.id)) {
    steps->close(core_, chunk.id, chunk.round, chunk.steps_before(chunk.round) + 1, chunk.unused,
                 stages_.reducer.settings());
  }
  if (pending_.empty()) gate_.begin(round());
  pending_.insert(index);
  --open_;
  return Closed::kPending;
}

uint32_t Gated::next_done() {
  for (;;) {
    if (stage_ == Stage::kClosing) {
      if (std::exchange(recount_, false)) open_ = count_open();
      if (open_ > 0) return kNoChunk;
      if (gate_.close(core_, round(), stages_.reducer.max_norm(round()),
                      &stages_.reducer.settings())) {
        stages_.reports.add(CoreReport::kClosed, CoreReport::kNoRank).round = round();
      }
      stage_ = Stage::kWaiting;
    }
    if (stage_ == Stage::kWaiting) {
      if (!gate_.has_decided(round())) return kNoChunk;
      take(gate_.decision());
      if (core_ == 0 && gate_.decides_for_others()) {
        stages_.reports.add(CoreReport::kDecided, CoreReport::kNoRank).round = round();
      }
      stage_ = Stage::kFinishing;
    }
    if (!pending_.empty()) break;
    close_round(round() + 1);
  }
  const uint32_t index = pending_.first();
  pending_.erase(index);
  apply(index);
  return index;
}

// A round that was skipped is none of the optimizer's steps, on any chunk that was in it.
void Gated::take(const Decision& decision) {
  decision_ = decision;
  stages_.outbox.announce(decision_);
  if (!decision_.skipped) return;
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    CoreChunk& chunk = stages_.table[i];
    if (chunk.closed && chunk.round == round()) --chunk.step_offset;
  }
}

void Gated::apply(uint32_t index) {
  const uint32_t chunk = stages_.table[index].id;
  const KeySteps* const steps = gate_.key_steps();
  if (decision_.skipped) {
    stages_.reducer.publish(index);
  } else if (steps && steps->has(chunk)) {
    stages_.reducer.apply(index, steps->part_of(chunk));
  } else {
    stages_.reducer.apply(index, decision_.factor, gate_.norms_of(chunk), store_of(index));
  }
}

void Gated::begin(uint32_t index) {
  LockStep::begin(index);
  recount_ = true;
}

void Gated::settle(uint32_t index) {
  LockStep::settle(index);
  recount_ = true;
}

// No chunk is done before all are closed: ranks that have sent one wait for the rest.
bool Gated::anyone_waits(uint32_t index) const {
  const CoreChunk& chunk = stages_.table[index];
  if (LockStep::anyone_waits(index)) return true;
  return chunk.round > 0 && chunk.missing > 0 && gate_.has_begun(chunk.round);
}

}  // namespace phub

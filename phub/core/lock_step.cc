#include "phub/core/lock_step.h"

namespace phub {

void InStep::lose(const Boundary::Lost& lost) {
  ChunkTable& table = stages_.table;
  for (uint32_t i = 0; i < table.size(); ++i) {
    // The core has not read the slot yet, so the worker may still change it.
    if (table.has(lost.rank, i) && stages_.parameters.slots_belong_to_worker && !table[i].closed &&
        !table.is_null(lost.rank, i)) {
      table.unmark(lost.rank, i);
    }
    note_last_round(lost, i);
  }
}

void LockStep::admit(const Boundary::Admitted& admitted) {
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    if (stages_.table[i].round > 0) send(admitted.rank, i);
  }
}

// Skips rounds in which no rank takes part any more, or makes them without any.
void LockStep::settle(uint32_t index) {
  CoreChunk& chunk = stages_.table[index];
  if (chunk.round == 0 || chunk.arrived > 0 || chunk.missing > 0 || chunk.closed) return;
  const uint64_t next = stages_.table.round_with_ranks(index, chunk.round - 1);
  if (next == chunk.round) return;
  if (!stages_.table.every_round) return begin_round(index, next);
  chunk.vacant = true;
}

void InStep::restore(const SavedClocks& from) {
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    CoreChunk& chunk = stages_.table[i];
    chunk.set_steps_before(stages_.parameters.first_round, from.steps[chunk.id]);
  }
}

// A rank that has sent nothing that is still open: no chunk completes without it, so its first
// arrival is early enough to wake for. That is one wake-up a round, not one per rank.
uint32_t LockStep::indispensable_rank() const {
  if (!stages_.table.settled() || stages_.table.any_selective()) return CoreReport::kNoRank;
  for (uint32_t r = 0; r < stages_.table.attached_end; ++r) {
    const CoreRank& rank = stages_.table.rank(r);
    if (rank.attached && !rank.broken && rank.first_round != kNever && rank.open == 0) return r;
  }
  return CoreReport::kNoRank;
}

}  // namespace phub

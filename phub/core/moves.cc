#include "phub/core/moves.h"

#include <algorithm>

namespace phub {

void Moves::begin(const Boundary& boundary) {
  if (boundary.snapshot) {
    const bool at_end = boundary.snapshot_at_end;
    const uint64_t round = at_end || boundary.snapshot_exact
                               ? boundary.snapshot_round
                               : std::max(boundary.round, boundary.snapshot_round);
    snapshot_.begin(round, at_end, boundary.snapshot_exact);
  }
  if (boundary.get_state) get_.begin(*boundary.get_state, boundary.round);
  if (boundary.set_state) set_.begin(*boundary.set_state, boundary.round);
}

uint64_t Moves::needs_round() const {
  uint64_t round = 0;
  for (const Move* move : all_) round = std::max(round, move->needs_round());
  return round;
}

uint64_t Moves::make_before(uint32_t index, uint64_t round, const Way& way) {
  uint64_t bytes = 0;
  for (;;) {
    Move* first = nullptr;
    for (Move* move : all_) {
      if (!move->chunks.is_before(index, round)) continue;
      if (first == nullptr || move->chunks.round() < first->chunks.round()) first = move;
    }
    if (first == nullptr) return bytes;
    bytes += first->make(index, way);
  }
}

bool Moves::make_when_idle(const Way& way, uint64_t& bytes) {
  for (Move* move : all_) {
    if (!move->when_idle() || !move->chunks.any_due()) continue;
    bytes += move->make(move->chunks.next(), way);
    return true;
  }
  return false;
}

bool Moves::are_due() const {
  return std::ranges::any_of(all_, [](const Move* move) {
    return (move->when_idle() && move->chunks.any_due()) || move->chunks.is_complete();
  });
}

// Copies are reported before the set that came after them.
Move* Moves::take_complete() {
  for (Move* move : {all_[0], all_[2], all_[1]}) {
    if (move->chunks.take_complete()) return move;
  }
  return nullptr;
}

}  // namespace phub

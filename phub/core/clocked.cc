#include "phub/core/clocked.h"

#include <algorithm>

namespace phub {

Clocked::Clocked(const Stages& stages)
    : Way(stages), clocks_(stages.table.size(), stages.table.max_ranks()) {
  const uint64_t first = stages.parameters.first_round;
  for (uint32_t i = 0; i < stages.table.size(); ++i) {
    for (uint32_t r = 0; r < stages.table.max_ranks(); ++r) {
      if (stages.table.rank(r).first_round == kNever) continue;
      clocks_.set(i, r, first > 0 ? first - 1 : 0);
    }
  }
}

Way::Verdict Clocked::accept(uint32_t rank, uint32_t index, const Imm& imm) {
  const CoreChunk& chunk = stages_.table[index];
  const uint64_t clock = clocks_.of(index, rank);
  if (chunk.round == 0 || clock == kNever) return Verdict::kWrongRound;
  if (imm.round == low8(clock) && clock >= stages_.table.rank(rank).first_round) {
    return Verdict::kComplete;
  }
  if (imm.round != low8(clock + 1)) return Verdict::kWrongRound;
  if (stages_.table.has(rank, index)) return Verdict::kDuplicate;
  stages_.table.mark(rank, index, imm.kind == ImmKind::kNull);
  stages_.trace.arrival(index, chunk, clock + 1, rank, true, true);
  return Verdict::kAccepted;
}

Way::Closed Clocked::close(uint32_t index) {
  bool all = true;
  stages_.table.for_each_arrived(index, [&](uint32_t rank) { all = all && apply(rank, index); });
  return all ? Closed::kDone : Closed::kNotNow;
}

// In a job that went on from a checkpoint the chunk may have the update already: then it counts as
// done. Returns false if it cannot be done now.
bool Clocked::apply(uint32_t rank, uint32_t index) {
  const uint64_t round = clocks_.of(index, rank) + 1;
  if (round > clocks_.latest(index, rank)) {
    if (!stages_.table.is_null(rank, index) && !update(rank, index, round)) return false;
    clocks_.set_latest(index, rank, round);
  }
  const bool is_gradient = !stages_.table.is_null(rank, index);
  stages_.table.unmark(rank, index);
  clocks_.tick(index, rank);
  clocks_.withhold(index, rank, true);
  // Its result may wait for slower ranks, and they for other chunks of the slot.
  if (is_gradient) stages_.outbox.tell_taken(rank, index, taken(rank, index));
  return true;
}

bool Clocked::update(uint32_t rank, uint32_t index, uint64_t round) {
  const uint32_t place = stages_.shelves.ahead(index, round).place;
  uint64_t& steps =
      place == 0 ? clocks_.steps(index) : stages_.shelves.steps_of(place, stages_.table[index]);
  if (!stages_.reducer.update(rank, index, round, place, steps)) return false;
  if (stages_.table[index].lazy) clocks_.change(index);
  return true;
}

// The slowest rank may have moved: carries out the orders before the round in progress, notes that
// round, and sends the results that are no longer withheld.
void Clocked::release(uint32_t index) {
  CoreChunk& chunk = stages_.table[index];
  const uint64_t slowest = clocks_.slowest(index);
  if (slowest == kNever || chunk.round == 0) return;
  if (stages_.shelves.before_round(index, slowest + 1, *this)) clocks_.change(index);
  if (slowest + 1 > chunk.round) stages_.table.count_completed(index, slowest + 1 - chunk.round);
  chunk.round = slowest + 1;
  uint64_t looked_at = kNever;  // most ranks have one clock
  Shelves::Ahead next;
  for (uint32_t rank = 0; rank < stages_.table.attached_end; ++rank) {
    if (!clocks_.withheld(index, rank) || !stages_.table.rank(rank).attached) continue;
    const uint64_t clock = clocks_.of(index, rank);
    if (clock != looked_at) next = stages_.shelves.ahead(index, clock + 1);
    looked_at = clock;
    if (!may_have(clock, next)) continue;
    clocks_.withhold(index, rank, false);
    const bool is_same = chunk.lazy && next.place == 0 && clocks_.current(index, rank);
    stages_.table.set_same(rank, index, is_same);
    if (!is_same) stages_.reducer.copy_result(rank, chunk, next.place);
    clocks_.set_current(index, rank, next.place == 0);
    send(rank, index);
  }
}

// The slack is that of the round which begins with the result of `clock`.
bool Clocked::may_have(uint64_t clock, const Shelves::Ahead& next) const {
  const uint64_t slack = std::min(stages_.parameters.slack, stages_.reducer.slack(clock + 1));
  return next.is_settled && next.rounds <= slack;
}

// Everyone gets the initial parameters.
void Clocked::begin(uint32_t index) {
  stages_.table[index].round = 1;
  for (uint32_t rank = 0; rank < stages_.table.max_ranks(); ++rank) {
    if (clocks_.of(index, rank) != kNever) clocks_.withhold(index, rank, true);
  }
  release(index);
}

// The rank's reliable contributions are applied now. The other ranks go on in settle(), as a rank
// that the same boundary admits may be slower than they are.
void Clocked::lose(const Boundary::Lost& lost) {
  const ChunkTable& table = stages_.table;
  for (uint32_t i = 0; i < table.size(); ++i) {
    if (table.has(lost.rank, i)) {
      const bool reliable =
          !stages_.parameters.slots_belong_to_worker || table.is_null(lost.rank, i);
      if (!reliable || stages_.reducer.stopped() || !apply(lost.rank, i)) {
        stages_.table.unmark(lost.rank, i);
      }
    }
    note_last_round(lost, i);
    clocks_.withhold(i, lost.rank, false);
    clocks_.set(i, lost.rank, lost.expected_again == kNever ? kNever : lost.expected_again - 1);
  }
}

void Clocked::admit(const Boundary::Admitted& admitted) {
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    clocks_.set(i, admitted.rank, admitted.first_round - 1);
    clocks_.set_current(i, admitted.rank, false);
    clocks_.withhold(i, admitted.rank, true);
  }
}

void Clocked::resend(uint32_t rank, uint32_t index) {
  if (clocks_.withheld(index, rank)) {
    release(index);  // the slowest may have come closer meanwhile
  } else {
    Way::resend(rank, index);
  }
}

void Clocked::restore(const SavedClocks& from) {
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    clocks_.restore(i, from, stages_.table[i].id);
  }
}

// Whether a result is withheld from an attached rank. A rank that has not joined yet does not wait.
bool Clocked::anyone_waits(uint32_t index) const {
  if (stages_.table[index].round == 0)
    return false;  // before the initial parameters no rank can push
  for (uint32_t rank = 0; rank < stages_.table.attached_end; ++rank) {
    if (clocks_.withheld(index, rank) && stages_.table.rank(rank).attached) return true;
  }
  return false;
}

// Those whose clock is the lowest.
uint64_t Clocked::lacking(uint32_t index, uint32_t word) const {
  const uint64_t clock = clocks_.slowest(index);
  uint64_t bits = 0;
  const uint32_t end = std::min((word + 1) * 64, stages_.table.max_ranks());
  for (uint32_t r = word * 64; r < end && clock != kNever; ++r) {
    bits |= uint64_t{clocks_.of(index, r) == clock} << (r % 64);
  }
  return bits & ~stages_.table.arrived_word(index, word);
}

}  // namespace phub

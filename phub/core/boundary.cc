// CoreJob at a boundary (messages.h): its ranks change, and their connections.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/core/core_job.h"
#include "phub/core/lock_step.h"

namespace phub {

CoreReport CoreJob::hold() {
  CoreReport held{.type = CoreReport::kHeld};
  held.min_round = held.lowest = kNever;
  for (uint32_t i = 0; i < table_.size(); ++i) {
    // A new rank cannot take part in a round whose participants are fixed.
    const uint64_t open = table_[i].round + (way_->is_fixed(i) ? 1 : 0);
    held.round = std::max({held.round, open, table_.open_round(i)});
    held.lowest = std::min(held.lowest, table_[i].round);
    if (table_.is_left_alone(i)) continue;  // it may be far ahead
    held.min_round = std::min(held.min_round, table_[i].round);
    held.started = std::max(held.started, way_->started(i));
  }
  if (intake_) intake_->hold(held);
  shortage_.in_boundary(true);
  if (!is_frozen_) table_.hold_from = held.round;
  return held;
}

uint64_t CoreJob::commit(const Boundary& boundary) {
  note_activity();
  if (intake_) intake_->begin_boundary(boundary);
  for (uint32_t i = 0; i < table_.size(); ++i) table_.follow(i, boundary.round, false);
  // First of all notes the last rounds of the lost ranks, and detaches them, whatever fails
  // afterwards.
  for (const Boundary::Lost& lost : boundary.lost) {
    for (uint32_t i = 0; i < table_.size(); ++i) way_->note_last_round(lost, i);
  }
  for (const Boundary::Lost& lost : boundary.lost) detach(lost.rank);
  for (const Boundary::Lost& lost : boundary.lost) lose(lost);
  for (const uint32_t rank : boundary.forgotten) lose({.rank = rank});
  for (const Boundary::Admitted& admitted : boundary.admitted) admit(admitted);
  if (boundary.hyper) reducer_.set_hyper(*boundary.hyper);
  if (boundary.orders) shelves_.take(*boundary.orders);
  if (!is_frozen_) table_.hold_from = kNever;
  // Moves begin before rounds without ranks are passed over: another branch may run after those.
  // Moves of an earlier boundary go on.
  moves_.begin(boundary);
  const uint64_t follow_to =
      std::max({boundary.round, boundary.snapshot_round, moves_.needs_round()});
  uint64_t min_round = kNever;
  for (uint32_t i = 0; i < table_.size(); ++i) {
    table_.follow(i, follow_to, true);
    way_->settle(i);
    if (way_->ready(i)) make_ready(i);
    if (!table_.is_left_alone(i)) min_round = std::min(min_round, table_[i].round);
    moves_.reached(i);
  }
  shortage_.in_boundary(false);
  endpoint_.flush();
  return min_round;
}

// The rank's reliable contributions stay; chunks no longer wait for it, unless the job pauses for
// it. REQUIRES: it is not attached.
void CoreJob::lose(const Boundary::Lost& lost) {
  for (uint32_t i = 0; i < table_.size() && lost.rank == 0; ++i) {
    if (table_[i].round == 0) table_[i].initial_parts = 0;
  }
  way_->lose(lost);
  table_.expect(lost.rank, lost.expected_again);  // an absent rank is expected at all chunks
  outbox_.forget(lost.rank);
  table_.rank(lost.rank).results_from = kNever;
  table_.rank(lost.rank).broken = false;
}

void CoreJob::admit(const Boundary::Admitted& admitted) {
  CoreRank& rank = table_.rank(admitted.rank);
  rank.results_from = admitted.first_round - 1;
  rank.slots = admitted.slots.data();
  attach(admitted.rank, admitted.incarnation);
  table_.joined(admitted.rank);
  table_.expect(admitted.rank, admitted.first_round, admitted.interest);
  way_->admit(admitted);
  endpoint_.flush();
}

void CoreJob::attach(uint32_t rank, uint32_t incarnation) {
  shortage_.clear_slots(table_, rank);  // those of an earlier incarnation, or connection
  endpoint_.attach(rank, incarnation);
  table_.rank(rank).incarnation = incarnation;
  table_.rank(rank).attached = true;
  table_.rank(rank).broken = false;
  outbox_.attached(rank);
  table_.attached_end = std::max(table_.attached_end, rank + 1);
}

void CoreJob::reattach(uint32_t rank, uint32_t incarnation) {
  note_activity();
  if (rank == CoreReport::kNoRank) return way_->resume_parent();
  attach(rank, incarnation);
  table_.reconnected(rank);
}

void CoreJob::detach(uint32_t rank) {
  if (rank == CoreReport::kNoRank) return way_->suspend_parent();
  if (!table_.rank(rank).attached) return;  // a reconnection that was given up
  endpoint_.detach(rank);
  table_.rank(rank).attached = false;
  if (parameters_.rules.mirrors) {  // without its source no chunk closes a round any more
    is_frozen_ = true;
    table_.hold_from = 0;
    moves_.drop_snapshot();
    uint64_t bytes = 0;  // its part of the gate is closed, so that it decides all it will
    while (finish_pending(static_cast<LockStep&>(*way_), bytes)) {
    }
  }
  table_.free_unread_slots(rank);
  if (intake_) intake_->detached(rank);
}

void CoreJob::detach_all() {
  for (uint32_t rank = 0; rank < table_.attached_end; ++rank) detach(rank);
}

void CoreJob::probe(Probe& out) const {
  out.min_round = kNever;
  out.chunks_completed = table_.chunks_completed();
  out.switch_chunks = 0;
  out.endpoint = endpoint_.counters();
  std::fill(out.waited_for.begin(), out.waited_for.end(), 0);
  std::fill(out.lacks.begin(), out.lacks.end(), Lack());
  for (uint32_t i = 0; i < table_.size(); ++i) {
    const CoreChunk& chunk = table_[i];
    if (!table_.is_left_alone(i)) out.min_round = std::min(out.min_round, chunk.round);
    if (!way_->anyone_waits(i)) continue;
    for (uint32_t w = 0; w < table_.words(); ++w) {
      out.add(chunk.id, chunk.round, w, table_.not_held_up(i, way_->lacking(i, w), w));
    }
  }
  if (intake_) intake_->probe(out);
  for (uint32_t r = 0; r < table_.max_ranks(); ++r) out.arrivals[r] = table_.rank(r).arrivals;
  const std::span counters = table_.counters();
  std::copy_n(counters.begin(), std::min(counters.size(), out.queues.size()), out.queues.begin());
}

}  // namespace phub

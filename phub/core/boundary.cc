// CoreJob at a boundary (messages.h): who takes part changes, and the connections with it.
#include <algorithm>

#include "phub/core/core_job.h"

namespace phub {

CoreReport CoreJob::hold() {
  CoreReport held{.type = CoreReport::kHeld};
  held.min_round = kNever;
  for (uint32_t i = 0; i < table_.size(); ++i) {
    // Who comes cannot take part in a round that is closed.
    held.round = std::max(held.round, table_[i].round + (table_[i].closed ? 1 : 0));
    held.min_round = std::min(held.min_round, table_[i].round);
    held.started = std::max(held.started, way_->started(i));
  }
  table_.hold_from = held.round;
  return held;
}

uint64_t CoreJob::commit(const Boundary& boundary) {
  note_activity();
  // Whatever fails afterwards: what the lost ranks took part in is known, and they are detached.
  for (const Boundary::Lost& lost : boundary.lost) {
    for (uint32_t i = 0; i < table_.size(); ++i) way_->note_last_round(lost, i);
  }
  for (const Boundary::Lost& lost : boundary.lost) detach(lost.rank);
  for (const Boundary::Lost& lost : boundary.lost) lose(lost);
  for (const uint32_t rank : boundary.forgotten) lose({.rank = rank});
  for (const Boundary::Admitted& admitted : boundary.admitted) admit(admitted);
  if (boundary.hyper) reducer_.set_hyper(*boundary.hyper);
  table_.hold_from = kNever;
  uint64_t min_round = kNever;
  for (uint32_t i = 0; i < table_.size(); ++i) {
    way_->settle(i);
    if (way_->ready(i)) ready_.insert(i);
    min_round = std::min(min_round, table_[i].round);
    reached(i);
  }
  if (boundary.snapshot) snapshot_.begin(std::max(boundary.round, boundary.snapshot_round));
  if (boundary.get_state) states_.begin_get(*boundary.get_state, boundary.round);
  if (boundary.set_state) states_.begin_set(*boundary.set_state, boundary.round);
  endpoint_.flush();
  return min_round;
}

// The rank's contributions that can still be relied on stay; it is not waited for any more, unless
// the job pauses for it. REQUIRES: it is not attached.
void CoreJob::lose(const Boundary::Lost& lost) {
  for (uint32_t i = 0; i < table_.size() && lost.rank == 0; ++i) {
    if (table_[i].round == 0) table_[i].initial_parts = 0;
  }
  way_->lose(lost);
  table_.expect(lost.rank, lost.expected_again);
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
  table_.expect(admitted.rank, admitted.first_round);
  way_->admit(admitted);
  endpoint_.flush();
}

void CoreJob::attach(uint32_t rank, uint32_t incarnation) {
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
}

void CoreJob::detach_all() {
  for (uint32_t rank = 0; rank < table_.attached_end; ++rank) detach(rank);
}

void CoreJob::probe(Probe& out) const {
  out.min_round = kNever;
  out.chunks_completed = table_.chunks_completed();
  out.endpoint = endpoint_.counters();
  std::fill(out.waited_for.begin(), out.waited_for.end(), 0);
  std::fill(out.lacks.begin(), out.lacks.end(), Lack());
  for (uint32_t i = 0; i < table_.size(); ++i) {
    const CoreChunk& chunk = table_[i];
    out.min_round = std::min(out.min_round, chunk.round);
    if (!way_->anyone_waits(i)) continue;
    for (uint32_t w = 0; w < table_.words(); ++w) {
      const uint64_t lacking = way_->lacking(i, w);
      out.waited_for[w] |= lacking;
      if (out.lacks.empty()) continue;
      for_each_bit(lacking, w, [&](uint32_t rank) {
        out.lacks[rank].add({.chunks = 1, .chunk = chunk.id, .round = chunk.round});
      });
    }
  }
  for (uint32_t r = 0; r < table_.max_ranks(); ++r) out.arrivals[r] = table_.rank(r).arrivals;
  const std::span counters = table_.counters();
  std::copy_n(counters.begin(), std::min(counters.size(), out.queues.size()), out.queues.begin());
}

}  // namespace phub

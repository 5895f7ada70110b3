#include "phub/core/quorum.h"

#include <algorithm>
#include <utility>

namespace phub {

Quorum::Quorum(const Stages& stages, QuorumGate& gate, uint32_t core)
    : InStep(stages),
      gate_(gate),
      core_(core),
      round_(std::max<uint64_t>(stages.parameters.first_round, 1)),
      ranks_(stages.table.max_ranks()),
      has_of_(size_t{stages.table.size()} * stages.table.max_ranks(), kNever),
      expected_(bit_words(stages.table.max_ranks())),
      aside_(stages.table.size(), stages.table.max_ranks()),
      null_aside_(stages.table.size(), stages.table.max_ranks()) {
  stages.table.closes_up_to = round_ - 1;
}

// --- what a rank has sent ------------------------------------------------------------------------

void Quorum::count_chunk(uint32_t rank) {
  OfRank& of = ranks_[rank];
  if (++of.chunks < stages_.table.size()) return;
  of.sent = true;
  if (!gate_.sent_here(rank)) return;
  if (QuorumTimes* const times = gate_.times()) {
    times->came(has_of(rank, 0) + 1, stages_.endpoint.now_ns());
  }
  check();
}

void Quorum::forget_chunks(uint32_t rank) {
  OfRank& of = ranks_[rank];
  of.chunks = 0;
  if (std::exchange(of.sent, false)) gate_.took_here(rank);
}

// --- who takes part ------------------------------------------------------------------------------

void Quorum::find_expected() {
  std::ranges::fill(expected_, 0);
  for (uint32_t r = 0; r < stages_.table.max_ranks(); ++r) {
    if (stages_.table.rank(r).first_round <= round_) expected_[r / 64] |= uint64_t{1} << (r % 64);
  }
}

// Decides the round if nobody is missing. During a boundary its ranks are not final.
void Quorum::check() {
  if (!waits() || stages_.table.hold_from != kNever || gate_.collecting() != round_) return;
  find_expected();
  uint32_t all = 0;
  for (const uint64_t word : expected_) all += static_cast<uint32_t>(__builtin_popcountll(word));
  if (gate_.has_decided(round_) || gate_.decide(round_, expected_, all, core_)) return;
  if (gate_.senders_among(expected_) < gate_.quorum() || !gate_.say_is_there(round_)) return;
  if (QuorumTimes* const times = gate_.times()) {
    times->is_there(round_, stages_.endpoint.now_ns());
  }
  stages_.reports.add(CoreReport::kQuorum, CoreReport::kNoRank).round = round_;
}

// Every chunk has completed the round before, so all are in this one, or past it if no rank that
// is left takes part in it.
void Quorum::take_decision() {
  completes_ = true;
  stages_.table.closes_up_to = round_;
  for (uint32_t rank = 0; rank < stages_.table.attached_end; ++rank) {
    if (stages_.table.rank(rank).first_round > round_) continue;
    if (gate_.is_late(rank)) {
      put_aside(rank);
      stages_.table.excuse(rank, round_);
      continue;
    }
    forget_chunks(rank);
    const uint64_t sent_for = has_of(rank, 0) + 1;
    if (sent_for == round_) continue;
    ranks_[rank].late_from = sent_for, ranks_[rank].late_in = round_;
    for (uint32_t i = 0; i < stages_.table.size(); ++i) decay(rank, i);
  }
  open_ = static_cast<uint32_t>(std::ranges::count_if(
      stages_.table.chunks(), [this](const CoreChunk& chunk) { return chunk.round <= round_; }));
  for (uint32_t i = 0; i < stages_.table.size(); ++i) pass_over(i);
}

void Quorum::put_aside(uint32_t rank) {
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    if (!stages_.table.has(rank, i)) continue;
    aside_.set(rank, i);
    null_aside_.set_to(rank, i, stages_.table.is_null(rank, i));
    stages_.table.put_aside(rank, i);
  }
}

// The contribution has arrived, and counts in the chunk's round.
void Quorum::decay(uint32_t rank, uint32_t index) {
  if (!stages_.table.has_weights() || !stages_.table.has(rank, index)) return;
  const uint64_t late = stages_.table[index].round - (has_of(rank, index) + 1);
  if (late == 0) return;
  stages_.table.reduce_weight(rank, index, late_factor(stages_.parameters.rules.late_decay, late));
}

bool Quorum::moved_on() {
  if (completes_ && open_ > 0) return false;
  if (std::exchange(completes_, false)) {
    gate_.completed_here(round_++);
    recheck_ = true;
  }
  if (std::exchange(recheck_, false)) check();
  if (!is_decided()) return false;
  take_decision();
  return true;
}

bool Quorum::anyone_waits(uint32_t index) const {
  const CoreChunk& chunk = stages_.table[index];
  return chunk.arrived > 0 && chunk.missing > 0 && !gate_.is_there(round_);
}

// --- results -------------------------------------------------------------------------------------

void Quorum::finish(uint32_t index) {
  const uint64_t round = stages_.table[index].round;
  stages_.table.count_completed(index);
  stages_.table.for_each_arrived(index, [&](uint32_t rank) { has_of(rank, index) = kNever; });
  begin_round(index, stages_.table.next_round(index, round));
}

// The rounds before are complete: their result goes to the ranks that took part, and to those that
// wait for their first one.
void Quorum::begin_round(uint32_t index, uint64_t round) {
  ChunkTable& table = stages_.table;
  if (completes_ && table[index].round <= round_ && round > round_) --open_;
  table.begin_round(index, round);
  for (uint32_t rank = 0; rank < table.attached_end; ++rank) {
    if (has_of(rank, index) == kNever) give(rank, index);
    if (!aside_.has(rank, index) || !table.is_in_round(rank, index)) continue;
    aside_.clear(rank, index);
    table.bring_back(rank, index, null_aside_.has(rank, index));
  }
}

void Quorum::give(uint32_t rank, uint32_t index) {
  const uint64_t round = stages_.table[index].round - 1;
  const uint64_t from = stages_.table.rank(rank).results_from;
  if (from == kNever || round < from) return;
  has_of(rank, index) = round;
  stages_.reducer.copy_result(rank, stages_.table[index], 0);
  if (stages_.table.rank(rank).attached) send(rank, index);
}

// --- boundaries ----------------------------------------------------------------------------------

uint64_t Quorum::last_round(uint32_t rank, uint32_t index) const {
  if (stages_.table.has(rank, index)) return stages_.table[index].round;
  const uint64_t has = has_of(rank, index);
  return has == kNever ? 0 : has;
}

// What it has put aside takes part in nothing any more. If it was late in a decided round, it did
// so before it was lost.
void Quorum::lose(const Boundary::Lost& lost) {
  if (is_decided()) take_decision();
  InStep::lose(lost);
  forget_chunks(lost.rank);
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    // In the round that is decided next it counts without the decision.
    if (!completes_ || stages_.table[i].round > round_) decay(lost.rank, i);
    has_of(lost.rank, i) = kNever;
    aside_.clear(lost.rank, i);
  }
}

void Quorum::admit(const Boundary::Admitted& admitted) {
  ranks_[admitted.rank] = {};
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    if (stages_.table[i].round > 0) give(admitted.rank, i);
  }
}

void Quorum::settle(uint32_t index) {
  recheck_ = true;
  pass_over(index);
}

// No rank that is left takes part in the chunk's round: then nothing comes any more.
void Quorum::pass_over(uint32_t index) {
  const CoreChunk& chunk = stages_.table[index];
  if (chunk.round == 0 || chunk.arrived > 0 || chunk.missing > 0 || chunk.closed) return;
  if (!gate_.has_decided(chunk.round) || stages_.table.expected_count() == 0) return;
  begin_round(index, chunk.round + 1);
}

}  // namespace phub

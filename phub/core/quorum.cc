#include "phub/core/quorum.h"

#include <algorithm>
#include <utility>

namespace phub {

Quorum::Quorum(const Stages& stages, QuorumGates& gates, uint32_t core,
               std::span<const uint32_t> fragment_of)
    : InStep(stages),
      gates_(gates),
      core_(core),
      fragments_(gates.size()),
      has_of_(size_t{stages.table.size()} * stages.table.max_ranks(), kNever),
      expected_(bit_words(stages.table.max_ranks())),
      aside_(stages.table.size(), stages.table.max_ranks()),
      null_aside_(stages.table.size(), stages.table.max_ranks()) {
  if (gates.size() > 1) fragment_of_.assign(fragment_of.begin(), fragment_of.end());
  for (uint32_t i = 0; i < stages.table.size(); ++i) at_fragment(i).chunks.push_back(i);
  for (uint32_t f = 0; f < gates.size(); ++f) {
    Fragment& of = fragments_[f];
    of.gate = &gates[f];
    of.ranks.resize(stages.table.max_ranks());
    of.round = std::max<uint64_t>(stages.parameters.first_round, 1);
    of.closes_up_to = of.round - 1;
  }
}

// --- what a rank has sent ------------------------------------------------------------------------

void Quorum::count_chunk(Fragment& of, uint32_t rank) {
  OfRank& sender = of.ranks[rank];
  if (++sender.chunks < of.chunks.size()) return;
  sender.sent = true;
  if (!of.gate->sent_here(rank)) return;
  if (QuorumTimes* const times = of.gate->times()) {
    times->came(has_of(rank, of.chunks.front()) + 1, stages_.endpoint.now_ns());
  }
  check(of);
}

void Quorum::forget_chunks(Fragment& of, uint32_t rank) {
  OfRank& sender = of.ranks[rank];
  sender.chunks = 0;
  if (std::exchange(sender.sent, false)) of.gate->took_here(rank);
}

// --- who takes part ------------------------------------------------------------------------------

void Quorum::find_expected(const Fragment& of) {
  std::ranges::fill(expected_, 0);
  for (uint32_t r = 0; r < stages_.table.max_ranks(); ++r) {
    if (stages_.table.rank(r).first_round <= of.round) expected_[r / 64] |= uint64_t{1} << (r % 64);
  }
}

// Decides the round if nobody is missing. During a boundary its ranks are not final.
void Quorum::check(Fragment& of) {
  QuorumGate& gate = *of.gate;
  of.held = false;
  if (!waits(of) || stages_.table.hold_from != kNever || gate.collecting() != of.round) return;
  of.held = of.recheck = gate.is_held(of.round);
  if (of.held) return;
  find_expected(of);
  uint32_t all = 0;
  for (const uint64_t word : expected_) all += static_cast<uint32_t>(__builtin_popcountll(word));
  if (gate.has_decided(of.round) || gate.decide(of.round, expected_, all, core_)) return;
  if (gate.senders_among(expected_) < gate.quorum() || !gate.say_is_there(of.round)) return;
  if (QuorumTimes* const times = gate.times()) {
    times->is_there(of.round, stages_.endpoint.now_ns());
  }
  stages_.reports.add(CoreReport::kQuorum, CoreReport::kNoRank).round = of.round;
}

// Every chunk has completed the round before, so all are in this one, or past it if no rank that
// is left takes part in it.
void Quorum::take_decision(Fragment& of) {
  of.completes = true;
  of.closes_up_to = of.round;
  for (uint32_t rank = 0; rank < stages_.table.attached_end; ++rank) {
    if (stages_.table.rank(rank).first_round > of.round) continue;
    if (of.gate->is_late(rank)) {
      put_aside(of, rank);
      stages_.table.excuse(rank, of.round, of.chunks);
      continue;
    }
    forget_chunks(of, rank);
    const uint64_t sent_for = has_of(rank, of.chunks.front()) + 1;
    if (sent_for == of.round) continue;
    of.ranks[rank].late_from = sent_for, of.ranks[rank].late_in = of.round;
    for (const uint32_t i : of.chunks) decay(rank, i);
  }
  of.open = static_cast<uint32_t>(std::ranges::count_if(
      of.chunks, [&](uint32_t i) { return stages_.table[i].round <= of.round; }));
  for (const uint32_t i : of.chunks) pass_over(i);
}

void Quorum::put_aside(const Fragment& of, uint32_t rank) {
  for (const uint32_t i : of.chunks) {
    if (!stages_.table.has(rank, i)) continue;
    aside_.set(rank, i);
    null_aside_.set_to(rank, i, stages_.table.is_null(rank, i));
    stages_.table.put_aside(rank, i);
  }
}

// The contribution has arrived, and counts in the chunk's round. That of an earlier incarnation did
// so when that was lost.
void Quorum::decay(uint32_t rank, uint32_t index) {
  if (!stages_.table.has_weights() || !stages_.table.has(rank, index)) return;
  if (has_of(rank, index) == kNever) return;
  const uint64_t late = stages_.table[index].round - (has_of(rank, index) + 1);
  if (late == 0) return;
  stages_.table.reduce_weight(rank, index, late_factor(stages_.parameters.rules.late_decay, late));
}

bool Quorum::moved_on() {
  bool moved = false;
  for (Fragment& of : fragments_) moved |= moved_on(of);
  return moved;
}

bool Quorum::moved_on(Fragment& of) {
  if (of.completes && of.open > 0) return false;
  if (std::exchange(of.completes, false)) {
    of.gate->completed_here(of.round++);
    of.recheck = true;
  }
  if (std::exchange(of.recheck, false)) check(of);
  if (!is_decided(of)) return false;
  take_decision(of);
  return true;
}

bool Quorum::anyone_waits(uint32_t index) const {
  const CoreChunk& chunk = stages_.table[index];
  const Fragment& of = at_fragment(index);
  return chunk.arrived > 0 && chunk.missing > 0 && !of.gate->is_there(of.round);
}

uint64_t Quorum::lacking(uint32_t index, uint32_t word) const {
  uint64_t lacking = InStep::lacking(index, word);
  if (fragments_.size() == 1) return lacking;
  for_each_bit(lacking, word, [&](uint32_t rank) {
    if (waits_elsewhere(rank, at_fragment(index))) lacking &= ~(uint64_t{1} << (rank % 64));
  });
  return lacking;
}

// For the result of what it has sent, or for that of the round before its first.
bool Quorum::waits_elsewhere(uint32_t rank, const Fragment& than) const {
  const uint64_t first_round = stages_.table.rank(rank).first_round;
  return std::ranges::any_of(fragments_, [&](const Fragment& of) {
    return &of != &than && (of.gate->has_sent(rank) || first_round > of.gate->collecting());
  });
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
  Fragment& of = at_fragment(index);
  if (of.completes && table[index].round <= of.round && round > of.round) --of.open;
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
  for (Fragment& of : fragments_) {
    if (is_decided(of)) take_decision(of);
  }
  InStep::lose(lost);
  for (Fragment& of : fragments_) forget_chunks(of, lost.rank);
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    // In the round that is decided next it counts without the decision.
    const Fragment& of = at_fragment(i);
    if (!of.completes || stages_.table[i].round > of.round) decay(lost.rank, i);
    has_of(lost.rank, i) = kNever;
    aside_.clear(lost.rank, i);
  }
}

void Quorum::admit(const Boundary::Admitted& admitted) {
  for (Fragment& of : fragments_) of.ranks[admitted.rank] = {};
  for (uint32_t i = 0; i < stages_.table.size(); ++i) {
    if (stages_.table[i].round > 0) give(admitted.rank, i);
  }
}

void Quorum::settle(uint32_t index) {
  at_fragment(index).recheck = true;
  pass_over(index);
}

// No rank that is left takes part in the chunk's round: then nothing comes any more.
void Quorum::pass_over(uint32_t index) {
  CoreChunk& chunk = stages_.table[index];
  if (chunk.round == 0 || chunk.arrived > 0 || chunk.missing > 0 || chunk.closed) return;
  if (!at_fragment(index).gate->has_decided(chunk.round)) return;
  if (stages_.table.expected_count() == 0) return;
  if (!stages_.table.every_round) return begin_round(index, chunk.round + 1);
  chunk.vacant = true;
}

}  // namespace phub

#include "phub/core/chunk_table.h"

#include <algorithm>
#include <utility>

#include "phub/job_rules.h"

namespace phub {

ChunkTable::ChunkTable(std::vector<CoreChunk> chunks, uint32_t queues, uint32_t max_ranks,
                       std::span<const uint32_t> expected, GradientPlaces places,
                       std::span<const FormatSchedule> schedules)
    : Contributions(std::move(chunks), queues, max_ranks, places),
      in_round_(size(), max_ranks),
      idle_(size(), max_ranks),
      unread_(size(), max_ranks),
      same_(size(), max_ranks),
      follows_to_(size()),
      schedules_(schedules) {
  for (const uint32_t r : expected) rank(r).first_round = 1;
  count_expected();
}

void ChunkTable::begin_round(uint32_t index, uint64_t round) {
  CoreChunk& chunk = (*this)[index];
  unmark_all(index);
  const bool some_may_begin = chunk.round < std::max(all_from_, excused_until_);
  chunk.round = round;
  if (chunk.schedule != 0) chunk.dtype = dtype_at(schedule_of(chunk), round);
  chunk.closed = false;
  chunk.vacant = false;
  if (!participants_.empty()) participants_[index] = 0;
  chunk.missing = chunk.expected;
  if (!some_may_begin) return;
  for (uint32_t r = 0; r < max_ranks(); ++r) set_in_round(r, index, rank(r).first_round <= round);
}

uint64_t ChunkTable::round_with_ranks(uint32_t index, uint64_t round) const {
  if ((*this)[index].expected > 0 || round + 1 < follows_to_[index]) return round + 1;
  uint64_t next = kNever;
  for (uint32_t r = 0; r < max_ranks(); ++r) {
    const uint64_t first = rank(r).first_round;
    if (first != kNever) next = std::min(next, std::max(first, round + 1));
  }
  return next == kNever || next > hold_from ? round + 1 : next;
}

void ChunkTable::expect(uint32_t rank, uint64_t first_round,
                        std::span<const ChunkInterest> interest) {
  CoreRank& expected = this->rank(rank);
  if (expected.selective || !interest.empty()) set_interest(rank, interest);
  expected.first_round = first_round;
  for (uint32_t i = 0; i < size(); ++i) set_in_round(rank, i, first_round <= (*this)[i].round);
  count_expected();
}

void ChunkTable::excuse(uint32_t rank, uint64_t round, std::span<const uint32_t> indices) {
  for (const uint32_t i : indices) {
    if ((*this)[i].round == round) set_in_round(rank, i, false);
  }
  excused_until_ = std::max(excused_until_, round + 1);
}

void ChunkTable::set_interest(uint32_t rank, std::span<const ChunkInterest> interest) {
  for (uint32_t i = 0; i < size(); ++i) set_in_round(rank, i, false);
  bool& selective = this->rank(rank).selective;
  selective_ -= selective ? 1 : 0;
  selective = !interest.empty();
  selective_ += selective ? 1 : 0;
  for (uint32_t i = 0; i < size(); ++i) {
    const ChunkInterest of = interest.empty() ? ChunkInterest() : interest[(*this)[i].id];
    idle_.set_to(rank, i, !of.any());
    unread_.set_to(rank, i, !of.reads);
  }
}

uint32_t ChunkTable::idle_in_round(uint32_t index) const {
  int ranks = 0;
  for (uint32_t w = 0; w < words(); ++w) {
    ranks += __builtin_popcountll(in_round_.word(index, w) & idle_.word(index, w));
  }
  return static_cast<uint32_t>(ranks);
}

void ChunkTable::follow(uint32_t index, uint64_t round, bool after) {
  const CoreChunk& chunk = (*this)[index];
  if (chunk.expected > 0 || (chunk.arrived > 0 && !after)) return;
  // In round 0 no rank is counted, but round 1 may still be left alone.
  const bool some_are_idle = selective_ > 0 && (chunk.round == 0 || idle_in_round(index) > 0);
  if (!some_are_idle) {  // no idle rank is in the chunk's round
    if (chunk.arrived > 0) follows_to_[index] = 0;
    return;
  }
  uint64_t next = kNever;  // the next round in which a rank is expected
  for (uint32_t r = 0; r < max_ranks(); ++r) {
    const uint64_t first = rank(r).first_round;
    if (first > chunk.round && !is_idle(r, index)) next = std::min(next, first);
  }
  const bool somebody_comes = after && next != kNever;
  follows_to_[index] = std::max(follows_to_[index], somebody_comes ? next : std::min(round, next));
}

void ChunkTable::set_in_round(uint32_t rank, uint32_t index, bool yes) {
  if (in_round_.has(rank, index) == yes) return;
  in_round_.set_to(rank, index, yes);
  if (is_idle(rank, index)) return;
  CoreChunk& chunk = (*this)[index];
  const auto change = static_cast<uint16_t>(yes ? 1 : -1);
  chunk.expected += change;
  if (!has(rank, index)) chunk.missing += change;
}

void ChunkTable::count_expected() {
  expected_count_ = 0;
  all_from_ = 0;
  settled_ = false;
  for (uint32_t r = 0; r < max_ranks(); ++r) {
    const uint64_t first = rank(r).first_round;
    if (first == kNever) continue;
    ++expected_count_;
    all_from_ = std::max(all_from_, first);
  }
}

bool ChunkTable::settled() {
  if (!settled_) {
    const uint64_t from = std::max<uint64_t>(all_from_, 1);
    settled_ =
        std::ranges::all_of(chunks(), [from](const CoreChunk& c) { return c.round >= from; });
  }
  return settled_;
}

}  // namespace phub

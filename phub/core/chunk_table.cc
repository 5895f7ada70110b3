#include "phub/core/chunk_table.h"

#include <algorithm>
#include <utility>

#include "transport/error.h"

namespace phub {

ChunkTable::ChunkTable(std::vector<CoreChunk> chunks, uint32_t queues, uint32_t max_ranks,
                       std::span<const uint32_t> expected)
    : chunks_(std::move(chunks)),
      ranks_(max_ranks),
      words_(static_cast<uint32_t>(bit_words(max_ranks))),
      arrived_(chunks_.size() * words_),
      null_(chunks_.size() * words_),
      in_round_(chunks_.size() * words_),
      idle_(chunks_.size() * words_),
      unread_(chunks_.size() * words_),
      unheard_(chunks_.size() * words_),
      follows_to_(chunks_.size()),
      counters_(queues) {
  for (uint32_t i = 0; i < size(); ++i) {
    while (queue_first_.size() <= chunks_[i].queue) queue_first_.push_back(i);
  }
  PHUB_CHECK(queue_first_.size() <= queues);
  queue_first_.resize(queues + 1, size());
  for (const uint32_t rank : expected) ranks_[rank].first_round = 1;
  count_expected();
}

void ChunkTable::unmark(uint32_t rank, uint32_t index) {
  const uint64_t bit = uint64_t{1} << (rank % 64);
  arrived_[at(index, rank / 64)] &= ~bit;
  null_[at(index, rank / 64)] &= ~bit;
  --chunks_[index].arrived;
  ++chunks_[index].missing;
  --ranks_[rank].open;
}

void ChunkTable::reconnected(uint32_t rank) {
  for (uint32_t i = 0; i < size(); ++i) unheard_[at(i, rank / 64)] |= uint64_t{1} << (rank % 64);
  ranks_[rank].unheard = size();
}

void ChunkTable::joined(uint32_t rank) {
  for (uint32_t i = 0; i < size(); ++i) unheard_[at(i, rank / 64)] &= ~(uint64_t{1} << (rank % 64));
  ranks_[rank].unheard = 0;
}

void ChunkTable::begin_round(uint32_t index, uint64_t round) {
  CoreChunk& chunk = chunks_[index];
  for (uint32_t w = 0; w < words_; ++w) {
    for_each_bit(std::exchange(arrived_[at(index, w)], 0), w,
                 [this](uint32_t rank) { --ranks_[rank].open; });
    null_[at(index, w)] = 0;
  }
  const bool some_may_begin = chunk.round < all_from_;
  chunk.round = round;
  chunk.closed = false;
  chunk.vacant = false;
  if (!participants_.empty()) participants_[index] = 0;
  chunk.arrived = 0;
  chunk.missing = chunk.expected;
  if (!some_may_begin) return;
  for (uint32_t r = 0; r < max_ranks(); ++r) set_in_round(r, index, ranks_[r].first_round <= round);
}

uint64_t ChunkTable::next_round(uint32_t index, uint64_t round) const {
  if (chunks_[index].expected > 0 || round + 1 < follows_to_[index]) return round + 1;
  uint64_t next = kNever;
  for (const CoreRank& rank : ranks_) {
    if (rank.first_round != kNever) next = std::min(next, std::max(rank.first_round, round + 1));
  }
  return next == kNever || next > hold_from ? round + 1 : next;
}

void ChunkTable::expect(uint32_t rank, uint64_t first_round,
                        std::span<const ChunkInterest> interest) {
  if (ranks_[rank].selective || !interest.empty()) set_interest(rank, interest);
  ranks_[rank].first_round = first_round;
  for (uint32_t i = 0; i < size(); ++i) set_in_round(rank, i, first_round <= chunks_[i].round);
  count_expected();
}

void ChunkTable::set_interest(uint32_t rank, std::span<const ChunkInterest> interest) {
  const uint64_t mask = uint64_t{1} << (rank % 64);
  for (uint32_t i = 0; i < size(); ++i) set_in_round(rank, i, false);
  selective_ -= ranks_[rank].selective ? 1 : 0;
  ranks_[rank].selective = !interest.empty();
  selective_ += ranks_[rank].selective ? 1 : 0;
  for (uint32_t i = 0; i < size(); ++i) {
    const ChunkInterest of = interest.empty() ? ChunkInterest() : interest[chunks_[i].id];
    const auto set = [&](uint64_t& word, bool yes) { word = yes ? word | mask : word & ~mask; };
    set(idle_[at(i, rank / 64)], !of.any());
    set(unread_[at(i, rank / 64)], !of.reads);
  }
}

uint32_t ChunkTable::idle_in_round(uint32_t index) const {
  uint32_t ranks = 0;
  for (uint32_t w = 0; w < words_; ++w) {
    ranks +=
        static_cast<uint32_t>(__builtin_popcountll(in_round_[at(index, w)] & idle_[at(index, w)]));
  }
  return ranks;
}

void ChunkTable::follow(uint32_t index, uint64_t round, bool after) {
  const CoreChunk& chunk = chunks_[index];
  if (chunk.expected > 0 || (chunk.arrived > 0 && !after)) return;
  // In round 0 no rank is counted, but round 1 may still be left alone.
  const bool some_are_idle = selective_ > 0 && (chunk.round == 0 || idle_in_round(index) > 0);
  if (!some_are_idle) {  // no idle rank is in the chunk's round
    if (chunk.arrived > 0) follows_to_[index] = 0;
    return;
  }
  uint64_t next = kNever;  // the next round in which a rank is expected
  for (uint32_t r = 0; r < max_ranks(); ++r) {
    const uint64_t first = ranks_[r].first_round;
    if (first > chunk.round && !is_idle(r, index)) next = std::min(next, first);
  }
  const bool somebody_comes = after && next != kNever;
  follows_to_[index] = std::max(follows_to_[index], somebody_comes ? next : std::min(round, next));
}

void ChunkTable::set_in_round(uint32_t rank, uint32_t index, bool yes) {
  if (bit(in_round_, rank, index) == yes) return;
  CoreChunk& chunk = chunks_[index];
  in_round_[at(index, rank / 64)] ^= uint64_t{1} << (rank % 64);
  if (is_idle(rank, index)) return;
  const auto change = static_cast<uint16_t>(yes ? 1 : -1);
  chunk.expected += change;
  if (!has(rank, index)) chunk.missing += change;
}

void ChunkTable::count_expected() {
  expected_count_ = 0;
  all_from_ = 0;
  settled_ = false;
  for (const CoreRank& rank : ranks_) {
    if (rank.first_round == kNever) continue;
    ++expected_count_;
    all_from_ = std::max(all_from_, rank.first_round);
  }
}

bool ChunkTable::settled() {
  if (!settled_) {
    const uint64_t from = std::max<uint64_t>(all_from_, 1);
    settled_ = std::all_of(chunks_.begin(), chunks_.end(),
                           [from](const CoreChunk& chunk) { return chunk.round >= from; });
  }
  return settled_;
}

}  // namespace phub

#include "phub/core/quorum_gate.h"

#include <algorithm>

#include "phub/core/index_set.h"

namespace phub {

QuorumGate::QuorumGate(CoreBells& bells, uint32_t with_chunks, uint32_t max_ranks, uint32_t quorum,
                       uint64_t first_round, const QuorumGates* beside)
    : cores_(with_chunks),
      quorum_(quorum),
      cores_with_(std::make_unique<std::atomic<uint32_t>[]>(max_ranks)),
      late_(bit_words(max_ranks)),
      bells_(bells),
      beside_(beside),
      open_(with_chunks),
      collecting_(first_round),
      claimed_(first_round - 1),
      there_(first_round - 1),
      decided_(first_round - 1) {}

bool QuorumGate::sent_here(uint32_t rank) {
  return cores_with_[rank].fetch_add(1, std::memory_order_seq_cst) + 1 == cores_;
}

void QuorumGate::took_here(uint32_t rank) {
  cores_with_[rank].fetch_sub(1, std::memory_order_seq_cst);
}

bool QuorumGate::completed_here(uint64_t round) {
  if (open_.fetch_sub(1, std::memory_order_acq_rel) > 1) return false;
  open_.store(cores_, std::memory_order_relaxed);
  collecting_.store(round + 1, std::memory_order_seq_cst);
  if (beside_ != nullptr) bells_.ring(CoreBells::kNoCore);
  return true;
}

uint32_t QuorumGate::senders_among(std::span<const uint64_t> ranks) const {
  uint32_t senders = 0;
  for (uint32_t word = 0; word < ranks.size(); ++word) {
    for_each_bit(ranks[word], word, [&](uint32_t rank) { senders += has_sent(rank) ? 1 : 0; });
  }
  return senders;
}

bool QuorumGate::is_held(uint64_t round) const {
  return beside_ != nullptr && beside_->lowest() < round;
}

bool QuorumGate::say_is_there(uint64_t round) {
  uint64_t before = there_.load(std::memory_order_relaxed);
  return before < round && there_.compare_exchange_strong(before, round);
}

bool QuorumGate::decide(uint64_t round, std::span<const uint64_t> expected, uint32_t least,
                        uint32_t but_core, std::vector<uint64_t>* late) {
  if (collecting() != round || is_held(round) || senders_among(expected) < least) return false;
  uint64_t before = claimed_.load(std::memory_order_seq_cst);
  if (before >= round || !claimed_.compare_exchange_strong(before, round)) return false;
  for (uint32_t word = 0; word < late_.size(); ++word) {
    late_[word] = word < expected.size() ? expected[word] : 0;
    for_each_bit(late_[word], word, [&](uint32_t rank) {
      if (has_sent(rank)) late_[word] &= ~(uint64_t{1} << (rank % 64));
    });
  }
  if (late != nullptr) *late = late_;  // the cores may come to the next round at once
  decided_.store(round, std::memory_order_seq_cst);
  bells_.ring(but_core);
  return true;
}

QuorumGates::QuorumGates(uint32_t cores, std::span<const uint32_t> with_chunks, uint32_t max_ranks,
                         uint32_t quorum, uint64_t first_round, bool together)
    : together_(together && with_chunks.size() > 1), bells_(cores) {
  for (const uint32_t some : with_chunks) {
    gates_.push_back(std::make_unique<QuorumGate>(bells_, some, max_ranks, quorum, first_round,
                                                  together_ ? this : nullptr));
  }
}

uint64_t QuorumGates::lowest() const {
  uint64_t lowest = ~uint64_t{0};
  for (const auto& gate : gates_) lowest = std::min(lowest, gate->collecting());
  return lowest;
}

}  // namespace phub

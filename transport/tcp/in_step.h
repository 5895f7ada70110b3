// Chooses the ranks that a core does not read from for a moment, so that none is far ahead of the
// others.
//
// The streams of all ranks share the way into a NIC, and TCP shares it unevenly. A chunk is summed
// when the last rank's gradient of it is here: if one rank is far behind, results come as late as
// its stream does, and the others' data has taken its place on the way for nothing. A rank that is
// not read from fills its socket's buffer, then its window closes, and its share goes to those
// behind.
//
// A rank's lead is the chunks that it has sent and that were not answered yet: the core answers
// every gradient of a chunk once it has those of all ranks. A rank is held only if it is ahead of
// one that is delivering: one that computes, is slow for another reason or is dead holds nobody up
// for longer than some times its own usual pause.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace phub {

// It belongs to one thread. Queue pairs are numbered queue by queue: those of a queue are compared.
class InStep {
 public:
  // A rank is read from while it is at most `lead_chunks` (at least 1) ahead of the last.
  InStep(uint32_t queues, uint32_t ranks, uint32_t lead_chunks)
      : ranks_(ranks),
        lead_chunks_(lead_chunks),
        pairs_(uint64_t{queues} * ranks),
        most_(queues, kNoLimit) {}

  // Begins a new connection.
  void begin(uint32_t qp) { pairs_[qp] = {}; }
  void delivered(uint32_t qp) {
    Pair& pair = pairs_[qp];
    // Averages pauses as others average round trips (RFC 6298); one in which it had nothing to send
    // is soon forgotten.
    const uint64_t pause = std::min(now_ - pair.delivered_ns, kLongestNs);
    if (!pair.was_held) pair.pause_ns = pair.pause_ns - pair.pause_ns / 8 + pause / 8;
    pair.was_held = false;
    pair.delivered_ns = now_;
  }
  void took_gradient(uint32_t qp) { ++pairs_[qp].unanswered; }
  void answered(uint32_t qp) { pairs_[qp].unanswered -= pairs_[qp].unanswered > 0; }

  // Looks at the `live` pairs anew. holds() is as of the latest look.
  template <typename Live>
  void look(uint64_t now_ns, const Live& live) {
    now_ = now_ns;
    valid_until_ = kNoLimit;
    std::ranges::fill(most_, kNoLimit);
    for (const uint32_t qp : live) {
      const Pair& pair = pairs_[qp];
      const uint64_t until = pair.delivered_ns + kPauses * pair.pause_ns;
      if (until <= now_) continue;
      uint64_t& most = most_[qp / ranks_];
      most = std::min(most, uint64_t{pair.unanswered} + lead_chunks_);
      valid_until_ = std::min(valid_until_, until);
    }
    for (const uint32_t qp : live) pairs_[qp].was_held |= holds(qp);
  }
  bool holds(uint32_t qp) const { return pairs_[qp].unanswered > most_[qp / ranks_]; }
  // The time for which it holds some, if nothing comes. REQUIRES: it holds some.
  uint64_t holds_for_ns() const { return valid_until_ - now_; }

 private:
  static constexpr uint64_t kNoLimit = ~uint64_t{0};
  static constexpr uint64_t kLongestNs = 50'000'000;
  static constexpr uint64_t kPauses = 8;  // in a row: then it is not delivering
  struct Pair {
    uint32_t unanswered = 0;
    bool was_held = false;      // since it last delivered
    uint64_t delivered_ns = 0;  // the time when it last did
    uint64_t pause_ns = 0;      // between two deliveries, smoothed
  };

  const uint32_t ranks_;
  const uint32_t lead_chunks_;
  std::vector<Pair> pairs_;
  std::vector<uint64_t> most_;  // by queue: unanswered chunks of a rank that is read from
  uint64_t now_ = 0;
  uint64_t valid_until_ = kNoLimit;
};

}  // namespace phub

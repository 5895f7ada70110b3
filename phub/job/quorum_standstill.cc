#include "phub/job/quorum_standstill.h"

#include <algorithm>

namespace phub {
namespace {

constexpr uint64_t kPartOfLimit = 4, kLeastMs = 1000, kFade = 8;

// Its round is being completed, or is when its grace is over.
bool goes_on(const QuorumGate& gate) {
  const uint64_t round = gate.collecting();
  return gate.has_decided(round) || gate.is_there(round);
}

}  // namespace

QuorumStandstill::QuorumStandstill(const QuorumGates& gates, const RankTable& ranks,
                                   const Barrier& barrier, uint64_t progress_limit_ms)
    : gates_(gates),
      ranks_(ranks),
      barrier_(barrier),
      most_ms_(std::max<uint64_t>(progress_limit_ms / kPartOfLimit, 1)) {}

std::optional<uint32_t> QuorumStandstill::look(uint64_t now_ms) {
  if (gates_.size() == 1) return std::nullopt;
  note(now_ms);
  const uint64_t limit = std::min(most_ms_, std::max(2 * usual_ms_, kLeastMs));
  if (now_ms - changed_ms_ < limit || !all_wait()) return std::nullopt;
  const std::optional<uint32_t> fragment = lowest();
  if (fragment) changed_ms_ = now_ms;  // how long that took is not what is usual
  return fragment;
}

void QuorumStandstill::note(uint64_t now_ms) {
  std::vector<std::pair<uint64_t, uint32_t>> now;
  for (uint32_t f = 0; f < gates_.size(); ++f) {
    now.emplace_back(gates_[f].collecting(), senders(gates_[f]));
  }
  if (now == latest_) return;
  const uint64_t ms = latest_.empty() ? 0 : now_ms - changed_ms_;
  usual_ms_ = std::max(ms, usual_ms_ - usual_ms_ / kFade);
  latest_ = std::move(now);
  changed_ms_ = now_ms;
}

// Of those that somebody has sent, and of these the one that the most have; if there is none, of
// those that a newcomer waits for, or, where fragments go together, of those that others wait for.
// nullopt: there is none either, or some fragment goes on by itself.
std::optional<uint32_t> QuorumStandstill::lowest() const {
  std::optional<uint32_t> lowest;
  for (uint32_t f = 0; f < gates_.size(); ++f) {
    if (goes_on(gates_[f])) return std::nullopt;
    const auto [round, senders] = latest_[f];
    const bool is_due =
        gates_.go_together() ? round == gates_.lowest() : senders > 0 || is_awaited(gates_[f]);
    if (!is_due) continue;
    if (!lowest) {
      lowest = f;
      continue;
    }
    const auto [lowest_round, most] = latest_[*lowest];
    const bool some_have = (senders > 0) == (most > 0);
    const bool is_lower = round < lowest_round || (round == lowest_round && senders > most);
    if (some_have ? is_lower : senders > 0) lowest = f;
  }
  return lowest;
}

bool QuorumStandstill::all_wait() const {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].expected && !waits(rank)) return false;
  }
  return true;
}

// In a barrier, for the result of what it has sent, or for that of the round before its first.
bool QuorumStandstill::waits(uint32_t rank) const {
  if (barrier_.has(rank)) return true;
  for (uint32_t f = 0; f < gates_.size(); ++f) {
    if (gates_[f].has_sent(rank) || waits_to_begin(rank, gates_[f])) return true;
  }
  return false;
}

bool QuorumStandstill::waits_to_begin(uint32_t rank, const QuorumGate& gate) const {
  return ranks_[rank].expected && ranks_[rank].first_round > gate.collecting();
}

bool QuorumStandstill::is_awaited(const QuorumGate& gate) const {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (waits_to_begin(rank, gate)) return true;
  }
  return false;
}

uint32_t QuorumStandstill::senders(const QuorumGate& gate) const {
  uint32_t senders = 0;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankRecord& of = ranks_[rank];
    const bool is_in = of.expected && of.first_round <= gate.collecting();
    senders += is_in && gate.has_sent(rank) ? 1 : 0;
  }
  return senders;
}

}  // namespace phub

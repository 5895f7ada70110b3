#include "phub/job/quorum_rounds.h"

#include <fmt/format.h>

#include <algorithm>

#include "phub/background.h"
#include "phub/core/index_set.h"
#include "phub/job/quorum_grace.h"

namespace phub {
namespace {

constexpr uint64_t kRetryMs = 10;

}  // namespace

QuorumRounds::QuorumRounds(Job& job, Membership& membership, Remarks& remarks)
    : job_(job), membership_(membership), remarks_(remarks), late_(job.spec().max_ranks) {}

void QuorumRounds::is_there(uint64_t round, uint64_t now_ms) {
  if (job_.quorum_gate()->has_decided(round)) return;  // all ranks have come since
  due_round_ = round;
  due_ms_ = now_ms + grace_ms();
}

// A remark tells of one that the box chose when it is twice the one before, or half of it.
uint64_t QuorumRounds::grace_ms() {
  const JobSpec& spec = job_.spec();
  const QuorumTimes* const times = job_.quorum_gate()->times();
  if (times == nullptr) return spec.grace_ms;
  const uint64_t grace = quorum_grace_ms(times->late_ns(), times->round_ns(), spec.grace_ms);
  if (grace != told_grace_ms_ && (grace >= 2 * told_grace_ms_ || 2 * grace <= told_grace_ms_)) {
    told_grace_ms_ = grace;
    const std::string text = fmt::format(
        "rounds wait up to about {} ms for other ranks once {} of them are there (grace 'auto')",
        grace, spec.quorum);
    // With as many remarks as a job may have, it is missing.
    static_cast<void>(error_of([&] { remarks_.put({.subject = "grace", .text = text}); }));
  }
  return grace;
}

void QuorumRounds::lose(std::span<const Boundary::Lost> lost) {
  QuorumGate& gate = *job_.quorum_gate();
  const uint64_t round = gate.collecting();
  if (lost.empty() || gate.has_decided(round)) return;
  std::vector<uint64_t> left = expected_in(round);
  for (const Boundary::Lost& each : lost) left[each.rank / 64] &= ~(uint64_t{1} << each.rank % 64);
  if (gate.senders_among(left) < gate.quorum()) gate.say_is_not_there(round);
}

std::vector<uint64_t> QuorumRounds::expected_in(uint64_t round) const {
  const RankTable& ranks = membership_.ranks();
  std::vector<uint64_t> expected(bit_words(ranks.size()));
  for (uint32_t r = 0; r < ranks.size(); ++r) {
    if (!ranks[r].expected || ranks[r].first_round > round) continue;
    expected[r / 64] |= uint64_t{1} << (r % 64);
  }
  return expected;
}

// During a boundary the ranks of a round are not final.
void QuorumRounds::tick(uint64_t now_ms) {
  if (now_ms < due_ms_) return;
  due_ms_ = kNever;
  QuorumGate& gate = *job_.quorum_gate();
  const uint64_t round = due_round_;
  if (!gate.is_there(round) || gate.has_decided(round)) return;  // all came, or a sender was lost
  const std::vector<uint64_t> expected = expected_in(round);
  const bool may = membership_.assembled() && membership_.changes().is_idle();
  std::vector<uint64_t> late;
  if (!may || !gate.decide(round, expected, gate.quorum(), CoreBells::kNoCore, &late)) {
    due_ms_ = now_ms + kRetryMs;
    return;
  }
  for (uint32_t word = 0; word < late.size(); ++word) {
    for_each_bit(late[word], word, [&](uint32_t rank) { note_late(rank, round); });
  }
}

void QuorumRounds::note_late(uint32_t rank, uint64_t round) {
  Late& late = late_[rank];
  const uint32_t incarnation = membership_.ranks()[rank].incarnation;
  if (late.last + 1 != round || late.incarnation != incarnation) late.first = round;
  late.last = round;
  late.incarnation = incarnation;
  membership_.log().note_late(rank, incarnation, round);
  if (late_rounds(rank) <= kMostLateRounds) return;
  membership_.changes().lose(
      rank, fmt::format("it was late for {} rounds in a row, which went on without it (quorum {})",
                        kMostLateRounds, job_.spec().quorum));
}

uint64_t QuorumRounds::late_rounds(uint32_t rank) const {
  const Late& late = late_[rank];
  const bool is_over = late.last == 0 || late.last + 1 < job_.quorum_gate()->collecting() ||
                       late.incarnation != membership_.ranks()[rank].incarnation;
  return is_over ? 0 : late.last - late.first + 1;
}

}  // namespace phub

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
    : job_(job),
      gates_(*job.quorum_gates()),
      membership_(membership),
      remarks_(remarks),
      standstill_(gates_, membership.ranks(), membership.barrier(), job.spec().progress_limit_ms),
      due_(gates_.size()),
      late_(gates_.size(), std::vector<Late>(job.spec().max_ranks)) {}

// One report may stand for several fragments.
void QuorumRounds::is_there(uint64_t now_ms) {
  for (uint32_t f = 0; f < gates_.size(); ++f) {
    const uint64_t round = gates_[f].collecting();
    // It may be that all ranks have come since.
    if (!gates_[f].is_there(round) || gates_[f].has_decided(round)) continue;
    if (due_[f].round != round) due_[f] = {.ms = now_ms + grace_ms(), .round = round};
  }
}

uint64_t QuorumRounds::due_ms() const { return std::ranges::min(due_, {}, &Due::ms).ms; }

// By what was measured at all fragments. A remark tells of one that the box chose when it is twice
// the one before, or half of it.
uint64_t QuorumRounds::grace_ms() {
  const JobSpec& spec = job_.spec();
  if (spec.grace != Grace::kAuto) return spec.grace_ms;
  std::vector<uint64_t> late, rounds;
  for (uint32_t f = 0; f < gates_.size(); ++f) {
    const QuorumTimes& times = *gates_[f].times();
    std::ranges::copy(times.late_ns(), std::back_inserter(late));
    std::ranges::copy(times.round_ns(), std::back_inserter(rounds));
  }
  const uint64_t grace = quorum_grace_ms(std::move(late), std::move(rounds), spec.grace_ms);
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
  if (lost.empty()) return;
  for (uint32_t f = 0; f < gates_.size(); ++f) {
    const uint64_t round = gates_[f].collecting();
    if (gates_[f].has_decided(round)) continue;
    std::vector<uint64_t> left = expected_in(round);
    for (const Boundary::Lost& each : lost) {
      left[each.rank / 64] &= ~(uint64_t{1} << each.rank % 64);
    }
    if (gates_[f].senders_among(left) >= gates_[f].quorum()) continue;
    gates_[f].say_is_not_there(round);
    due_[f] = {};
  }
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

void QuorumRounds::tick(uint64_t now_ms) {
  for (uint32_t f = 0; f < gates_.size(); ++f) {
    if (now_ms >= due_[f].ms) end_grace(f, now_ms);
  }
}

void QuorumRounds::end_grace(uint32_t fragment, uint64_t now_ms) {
  Due& due = due_[fragment];
  due.ms = kNever;
  if (gates_[fragment].has_decided(due.round)) return;  // all have come
  if (!decide(fragment, due.round, gates_[fragment].quorum())) due.ms = now_ms + kRetryMs;
}

void QuorumRounds::end_standstill(uint64_t now_ms) {
  if (!may_decide()) return;
  if (const std::optional<uint32_t> fragment = standstill_.look(now_ms)) {
    decide(*fragment, gates_[*fragment].collecting(), 0);
  }
}

// During a boundary the ranks of a round are not final.
bool QuorumRounds::may_decide() const {
  return membership_.assembled() && membership_.changes().is_idle();
}

bool QuorumRounds::decide(uint32_t fragment, uint64_t round, uint32_t least) {
  const std::vector<uint64_t> expected = expected_in(round);
  std::vector<uint64_t> late;
  if (!may_decide() ||
      !gates_[fragment].decide(round, expected, least, CoreBells::kNoCore, &late)) {
    return false;
  }
  for (uint32_t word = 0; word < late.size(); ++word) {
    for_each_bit(late[word], word, [&](uint32_t rank) { note_late(fragment, rank, round); });
  }
  return true;
}

void QuorumRounds::note_late(uint32_t fragment, uint32_t rank, uint64_t round) {
  Late& late = late_[fragment][rank];
  const uint32_t incarnation = membership_.ranks()[rank].incarnation;
  if (late.last + 1 != round || late.incarnation != incarnation) late.first = round;
  late.last = round;
  late.incarnation = incarnation;
  membership_.log().note_late(rank, incarnation, fragment, round);
  if (late_rounds(fragment, rank) <= kMostLateRounds) return;
  membership_.changes().lose(
      rank, fmt::format("it was late for {} rounds in a row, which went on without it (quorum {})",
                        kMostLateRounds, job_.spec().quorum));
}

uint64_t QuorumRounds::late_rounds(uint32_t fragment, uint32_t rank) const {
  const Late& late = late_[fragment][rank];
  const bool is_over = late.last == 0 || late.last + 1 < gates_[fragment].collecting() ||
                       late.incarnation != membership_.ranks()[rank].incarnation;
  return is_over ? 0 : late.last - late.first + 1;
}

uint64_t QuorumRounds::late_rounds(uint32_t rank) const {
  uint64_t most = 0;
  for (uint32_t f = 0; f < gates_.size(); ++f) most = std::max(most, late_rounds(f, rank));
  return most;
}

}  // namespace phub

#include "phub/job/changes.h"

#include <algorithm>
#include <utility>

#include "phub/job/restored_log.h"

namespace phub {

using Stage = RankRecord::Stage;

Changes::Changes(Members& members, uint32_t cores, uint32_t chunks)
    : members_(members),
      ranks_(members.ranks),
      actions_(members.actions),
      cores_(cores),
      chunks_(chunks),
      joins_(members.ranks, members.actions),
      decisions_(members.spec) {}

// In lock-step all of the checkpoint is as of its round. Otherwise a chunk may have updates of
// later rounds, and says which (SavedClocks): these are not void. A rank that comes back still
// begins with the round after the checkpoint's, or after the last one of its predecessors; updates
// from there on that its chunks have already are acknowledged and change nothing.
void Changes::restore(const Manifest& saved, const SavedClocks& clocks) {
  restore_log(saved, clocks, chunks_, members_.log, decisions_);
  const std::vector<uint64_t> latest = latest_of_all(clocks, chunks_);
  decisions_.restore(saved, latest);
  ranks_.restore(saved, latest);
}

// --- requests ------------------------------------------------------------------------------------

void Changes::join(uint64_t token, uint32_t rank) {
  joins_.add(token, rank);
  advance();
}

void Changes::lose(uint32_t rank, const std::string& reason, bool left, uint64_t token) {
  RankRecord& r = ranks_[rank];
  if (r.losing || closed_) {
    if (token != 0) actions_.reply(token);
    return;
  }
  // Its round in progress is not to complete without it.
  if (members_.rules.mirrors && !left) {
    if (source_lost_.empty()) actions_.add({.type = MembershipAction::kSaveForRanks});
    source_lost_ = reason;
    return;
  }
  if (!left && members_.policy.stops()) {
    if (std::exchange(is_stopping_, true)) return;
    return actions_.add({.type = MembershipAction::kStop,
                         .message = LossPolicy::lost_text(rank, r.incarnation, reason)});
  }
  r.losing = true;
  r.reason = reason;
  losses_.push_back({rank, left, reason, token});
  advance();
}

void Changes::forget(std::span<const uint32_t> ranks, const std::string& reason) {
  for (const uint32_t rank : ranks) {
    RankRecord& r = ranks_[rank];
    r.expected = false;
    r.reason = reason;
    next_.forgotten.push_back(rank);
    has_next_ = true;
    if (std::exchange(r.stage, Stage::kLost) != Stage::kAbsent) continue;  // its loss is there
    members_.log.add({.kind = LogRecord::Kind::kLost,
                      .rank = rank,
                      .incarnation = r.incarnation,
                      .reason = reason,
                      .last_rounds = ranges_of(std::vector<uint64_t>(chunks_, 0))});
  }
  advance();
}

bool Changes::job_runs() const {
  return members_.policy.assembled() && members_.rounds.in_progress() > 0 && !closed_;
}

bool Changes::ask(bool Boundary::*what, bool runs) {
  if (closed_ || (!runs && !job_runs())) return false;
  next_.*what = true;
  has_next_ = true;
  advance();
  return true;
}

void Changes::admitted(uint32_t rank, bool ok, const std::string& why) {
  if (!ok) {
    joins_.failed(rank, why);
  } else if (joins_.admitted(rank)) {
    advance();
  }
}

void Changes::close(ErrorCode code, const std::string& message) {
  closed_ = true;
  joins_.close(code, message);
  for (const uint64_t token : decisions_.drop()) actions_.refuse(token, code, message);
  for (auto* losses : {&losses_, &current_losses_}) {
    for (const RankLoss& loss : *losses) {
      if (loss.leave_token != 0) actions_.reply(loss.leave_token);
    }
    losses->clear();
  }
}

// --- the boundary --------------------------------------------------------------------------------

void Changes::advance() {
  if (closed_) return;
  joins_.admit_waiting();
  if (!is_idle()) return;
  current_losses_ = std::exchange(losses_, {});
  boundary_ = std::exchange(next_, {});
  const bool was_asked = std::exchange(has_next_, false);
  const bool decides = decisions_.begin();
  const bool admits = joins_.begin();
  if (current_losses_.empty() && !was_asked && !decides && !admits) return;
  phase_ = Phase::kHolding;
  answers_ = 0;
  members_.rounds.begin_boundary();
  actions_.add({.type = MembershipAction::kHold});
}

void Changes::held(const CoreReport& report) {
  if (phase_ != Phase::kHolding) return;
  JobRounds& rounds = members_.rounds;
  boundary_.round = std::max({boundary_.round, report.round, uint64_t{1}});
  rounds.held(report);
  if (++answers_ < cores_) return;
  rounds.all_held();
  build_boundary();
  phase_ = Phase::kCommitting;
  answers_ = 0;
  auto placed = decisions_.place({.boundary = boundary_.round,
                                  .first_unbegun = first_unbegun_round(),
                                  .lowest = rounds.lowest()});
  for (const Decisions::Answer& answer : placed.refused) {
    actions_.refuse(answer.token, answer.refused->code(), answer.refused->what());
  }
  actions_.add({.type = MembershipAction::kCommit,
                .decided = std::move(placed),
                .lowest_round = rounds.lowest()});
}

void Changes::build_boundary() {
  last_rounds_.assign(current_losses_.size(), std::vector<uint64_t>(chunks_, 0));
  for (size_t i = 0; i < current_losses_.size(); ++i) {
    RankLoss& loss = current_losses_[i];
    // A rank that leaves before the job has begun counts as lost, as the others wait for it.
    const bool begun = members_.policy.assembled() && members_.rounds.had_begun_when_held();
    loss.lost = !loss.left || !begun;
    if (loss.left && !begun) loss.reason = "left before the job had begun";
    boundary_.lost.push_back(
        {.rank = loss.rank,
         .expected_again = members_.policy.expected_again(loss, boundary_.round),
         .last_rounds = last_rounds_[i]});
  }
  for (const Joins::Join& join : joins_.current()) {
    RankRecord& r = ranks_[join.rank];
    r.first_round = std::max(boundary_.round, r.last_round + 1);
    boundary_.admitted.push_back({.rank = join.rank,
                                  .incarnation = r.incarnation,
                                  .first_round = r.first_round,
                                  .slots = {}});  // the server fills them in
  }
}

// In lock-step a chunk that is in the boundary's round may have begun it. Else a rank has pushed
// round started() and may have its result, of the next one it may not. So it is with the last round
// of those that are gone.
uint64_t Changes::first_unbegun_round() const {
  if (members_.rules.lock_step()) return boundary_.round + 1;
  const uint64_t pushed = std::max(members_.rounds.started(), ranks_.last_round_of_all());
  return std::max(boundary_.round, pushed + 1) + 1;
}

bool Changes::committed(const CoreReport& report, uint64_t now) {
  if (!is_committing()) return false;
  members_.rounds.committed(report);
  if (++answers_ < cores_) return false;
  phase_ = Phase::kIdle;
  finish_losses();
  finish_joins(now);
  for (const Decisions::Answer& answer : decisions_.finish(members_.log)) {
    actions_.add(
        {.type = MembershipAction::kReply, .token = answer.token, .first_round = answer.round});
  }
  return true;
}

void Changes::finish_losses() {
  for (size_t i = 0; i < current_losses_.size(); ++i) {
    RankLoss& loss = current_losses_[i];
    RankRecord& r = ranks_[loss.rank];
    r.stage = loss.lost ? Stage::kLost : Stage::kLeft;
    r.losing = false;
    r.expected = boundary_.lost[i].expected_again != kNever;
    r.reason = loss.reason;
    // An incarnation that took part in nothing leaves the mark of those before it.
    r.last_round = std::max(r.last_round, std::ranges::max(last_rounds_[i]));
    members_.leases.end(loss.rank);
    members_.log.add({.kind = loss.lost ? LogRecord::Kind::kLost : LogRecord::Kind::kLeft,
                      .rank = loss.rank,
                      .incarnation = r.incarnation,
                      .reason = loss.reason,
                      .last_rounds = ranges_of(last_rounds_[i])});
    members_.barrier.lose(loss.rank, ranks_.why_not_current(loss.rank, r.incarnation));
    actions_.add({.type = MembershipAction::kRevoke, .rank = loss.rank});
    if (loss.leave_token != 0) actions_.reply(std::exchange(loss.leave_token, 0));
  }
}

void Changes::finish_joins(uint64_t now) {
  const JobRounds& rounds = members_.rounds;
  for (const Joins::Join& join : joins_.current()) {
    RankRecord& r = ranks_[join.rank];
    r.stage = Stage::kLive;
    r.expected = true;
    r.joining = false;
    r.reason.clear();
    members_.leases.begin(join.rank, now);
    members_.log.add({.kind = LogRecord::Kind::kAdmitted,
                      .round = r.first_round,
                      .rank = join.rank,
                      .incarnation = r.incarnation});
    actions_.add({.type = MembershipAction::kReply,
                  .rank = join.rank,
                  .incarnation = r.incarnation,
                  .token = join.token,
                  .first_round = r.first_round,
                  .send_initial = members_.rules.initial_broadcast() && join.rank == 0 &&
                                  rounds.lacked_initial()});
  }
  joins_.end();
}

}  // namespace phub

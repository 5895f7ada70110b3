// The boundaries of a job, from the requests that wait for one to its consequences
// (core/messages.h).
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/job/membership.h"

namespace phub {
// A successor is admitted only after its predecessor is gone from every core. It takes part in a
// boundary once its memory and queue pairs are there, so its admission holds up no rank.
void Membership::admit_waiting() {
  for (Join& join : joins_) {
    Rank& r = ranks_[join.rank];
    if (join.stage != Join::kWaiting || r.losing) continue;
    join.stage = Join::kAdmitting;
    join.before = std::exchange(r.state, State::kJoining);
    ++r.incarnation;
    actions_.push_back({.type = MembershipAction::kAdmit,
                        .rank = join.rank,
                        .incarnation = r.incarnation,
                        .token = join.token});
  }
}

// Starts a boundary when something waits for one.
void Membership::advance() {
  if (finished_) return;
  admit_waiting();
  if (phase_ != Phase::kIdle) return;
  current_losses_ = std::exchange(losses_, {});
  const bool decides = decisions_.begin();
  boundary_ = {};
  boundary_.forgotten = std::exchange(forgotten_, {});
  const auto admitted = std::stable_partition(
      joins_.begin(), joins_.end(), [](const Join& join) { return join.stage != Join::kAdmitted; });
  current_joins_.assign(admitted, joins_.end());
  joins_.erase(admitted, joins_.end());
  boundary_.snapshot = std::exchange(snapshot_wanted_, false);
  boundary_.moves_state = std::exchange(state_wanted_, false);
  if (current_losses_.empty() && !decides && current_joins_.empty() &&
      boundary_.forgotten.empty() && !boundary_.snapshot && !boundary_.moves_state) {
    return;
  }
  phase_ = Phase::kHolding;
  answers_ = 0;
  started_ = 0;
  held_min_round_ = held_lowest_ = kNever;
  committed_min_round_ = kNever;
  actions_.push_back({.type = MembershipAction::kHold});
}

void Membership::admitted(uint32_t rank, bool ok, const std::string& message) {
  const auto join = std::find_if(joins_.begin(), joins_.end(), [rank](const Join& j) {
    return j.rank == rank && j.stage == Join::kAdmitting;
  });
  if (join == joins_.end()) return;
  if (ok) {
    join->stage = Join::kAdmitted;
    return advance();
  }
  reply_error(join->token, ErrorCode::kFull, message);
  ranks_[rank].state = join->before;
  joins_.erase(join);
  check_abandoned();
}

void Membership::held(const CoreReport& report, Ms now) {
  now_ = now;
  if (phase_ != Phase::kHolding) return;
  boundary_.round = std::max({boundary_.round, report.round, uint64_t{1}});
  started_ = std::max(started_, report.started);
  held_min_round_ = std::min(held_min_round_, report.min_round);
  held_lowest_ = std::min(held_lowest_, report.lowest);
  if (++answers_ < cores_) return;
  held_lowest_ = std::min(held_lowest_, keep_from_);
  build_boundary();
  lowest_round_ = held_lowest_;
  if (held_min_round_ != kNever) min_round_ = std::max(min_round_, held_min_round_);
  phase_ = Phase::kCommitting;
  answers_ = 0;
  MembershipAction commit{.type = MembershipAction::kCommit, .lowest_round = held_lowest_};
  auto placed = decisions_.place({.boundary = boundary_.round,
                                  .first_unbegun = first_unbegun_round(),
                                  .lowest = held_lowest_});
  for (const Decisions::Answer& answer : placed.refused) {
    reply_error(answer.token, answer.refused->code(), answer.refused->what());
  }
  commit.hyper = std::move(placed.hyper);
  commit.orders = std::move(placed.orders);
  actions_.push_back(std::move(commit));
}

void Membership::build_boundary() {
  last_rounds_.assign(current_losses_.size(), std::vector<uint64_t>(chunks_, 0));
  for (size_t i = 0; i < current_losses_.size(); ++i) {
    Loss& loss = current_losses_[i];
    // A rank that leaves before the job has begun counts as lost, as the others wait for it.
    const bool begun = assembled_ && held_min_round_ > 0;
    loss.lost = !loss.left || !begun;
    if (loss.left && !begun) loss.reason = "left before the job had begun";
    boundary_.lost.push_back({.rank = loss.rank,
                              .expected_again = expected_again(loss),
                              .last_rounds = last_rounds_[i]});
  }
  for (const Join& join : current_joins_) {
    Rank& r = ranks_[join.rank];
    r.first_round = std::max(boundary_.round, r.last_round + 1);
    boundary_.admitted.push_back({.rank = join.rank,
                                  .incarnation = r.incarnation,
                                  .first_round = r.first_round,
                                  .slots = {}});  // the server fills them in
  }
}

// In lock-step a chunk that is in the boundary's round may have begun it. Else a rank has pushed
// round started_ and may have its result, of the next one it may not. So it is with the last round
// of those that are gone.
uint64_t Membership::first_unbegun_round() const {
  if (rules_.lock_step()) return boundary_.round + 1;
  uint64_t pushed = started_;
  for (const Rank& rank : ranks_) pushed = std::max(pushed, rank.last_round);
  return std::max(boundary_.round, pushed + 1) + 1;
}

// The first round that the cores do not complete without a successor.
uint64_t Membership::expected_again(const Loss& loss) const {
  if (!assembled_ && ranks_[loss.rank].first) return boundary_.round;
  return !loss.lost || rules_.on_loss == OnLoss::kShrink ? kNever : started_ + 1;
}

void Membership::committed(const CoreReport& report, Ms now) {
  now_ = now;
  if (phase_ != Phase::kCommitting) return;
  committed_min_round_ = std::min(committed_min_round_, report.min_round);
  if (++answers_ < cores_) return;
  phase_ = Phase::kIdle;
  finish_losses();
  finish_joins(now);
  for (const Decisions::Answer& answer : decisions_.finish(log_)) {
    actions_.push_back(
        {.type = MembershipAction::kReply, .token = answer.token, .first_round = answer.round});
  }
  if (failing_) return fail_job(failing_->code(), failing_->what());
  check_assembled();
  after_losses(now);
  check_abandoned();
  check_barrier();
  advance();
}

void Membership::finish_losses() {
  for (size_t i = 0; i < current_losses_.size(); ++i) {
    Loss& loss = current_losses_[i];
    Rank& r = ranks_[loss.rank];
    r.state = loss.lost ? State::kLost : State::kLeft;
    r.losing = false;
    r.expected = boundary_.lost[i].expected_again != kNever;
    r.waited_since = 0;
    r.reason = loss.reason;
    // An incarnation that took part in nothing leaves the mark of those before it.
    r.last_round =
        std::max(r.last_round, *std::max_element(last_rounds_[i].begin(), last_rounds_[i].end()));
    log_.add({.kind = loss.lost ? LogRecord::Kind::kLost : LogRecord::Kind::kLeft,
              .rank = loss.rank,
              .incarnation = r.incarnation,
              .reason = loss.reason,
              .last_rounds = ranges_of(last_rounds_[i])});
    if (auto waiting = barrier_.find(loss.rank); waiting != barrier_.end()) {
      reply_error(waiting->second, ErrorCode::kFenced, why_not_current(loss.rank, r.incarnation));
      barrier_.erase(waiting);
    }
    actions_.push_back({.type = MembershipAction::kRevoke, .rank = loss.rank});
    if (loss.leave_token != 0) reply(std::exchange(loss.leave_token, 0));
  }
}

void Membership::finish_joins(Ms now) {
  for (const Join& join : current_joins_) {
    Rank& r = ranks_[join.rank];
    r.state = State::kLive;
    r.expected = true;
    r.reason.clear();
    r.waited_since = 0;
    r.lease_until = now + spec_.lease_ms;
    check_limits_after_ = std::min(check_limits_after_, r.lease_until);
    log_.add({.kind = LogRecord::Kind::kAdmitted,
              .round = r.first_round,
              .rank = join.rank,
              .incarnation = r.incarnation});
    actions_.push_back({.type = MembershipAction::kReply,
                        .rank = join.rank,
                        .incarnation = r.incarnation,
                        .token = join.token,
                        .first_round = r.first_round,
                        .send_initial = rules_.initial_broadcast() && join.rank == 0 &&
                                        committed_min_round_ == 0});
  }
  current_joins_.clear();
}

void Membership::check_assembled() {
  if (!missing().empty()) return;
  assembled_ = true;
  if (fail_after_ == kNever) pause_until_ = 0;
}

void Membership::end_saved() {
  if (std::exchange(saving_end_, false)) check_abandoned();
}

// Applies the job's policy to the ranks that the boundary has just taken out. A rank that is lost
// before all first ranks have come may still be replaced, within the time that all of them have: no
// policy applies to it.
void Membership::after_losses(Ms now) {
  for (const Loss& loss : current_losses_) {
    const Rank& r = ranks_[loss.rank];
    if (!loss.lost || (!assembled_ && r.first)) continue;
    const std::string who = fmt::format("rank {} (incarnation {}) was lost in round {}: {}",
                                        loss.rank, r.incarnation, boundary_.round, loss.reason);
    if (loss.rank == 0 && committed_min_round_ == 0 && rules_.on_loss != OnLoss::kWait) {
      return fail_job(ErrorCode::kRankLost,
                      who + "; it had not sent the initial parameters of every key yet");
    }
    if (rules_.on_loss == OnLoss::kFail && fail_after_ == kNever) {
      fail_after_ = started_;
      fail_message_ = who;
      pause_until_ = now + spec_.lease_ms;
    } else if (rules_.on_loss == OnLoss::kWait && assembled_) {
      pause_until_ = std::max(pause_until_, now + spec_.wait_limit_ms);
    }
  }
}

// No rank is there and none comes: the job ends, unless its policy is to wait. A later join under
// its name makes a job of its own, whose ranks assemble and whose initial parameters count.
void Membership::check_abandoned() {
  if (finished_ || phase_ != Phase::kIdle || live() > 0 || !joins_.empty()) return;
  if (assembled_ && !missing().empty()) return;  // the pause has its limit
  const auto last = std::find_if(current_losses_.rbegin(), current_losses_.rend(),
                                 [](const Loss& loss) { return !loss.left; });
  if (assembled_ && last != current_losses_.rend()) {
    return fail_job(
        ErrorCode::kRankLost,
        fmt::format("every rank was lost, the last one (rank {}): {}", last->rank, last->reason));
  }
  if (restored_ && !assembled_) {  // its checkpoint is still to be gone on from
    return fail_job(ErrorCode::kRankLost, "its first ranks were not there together again");
  }
  if (saving_end_) return;
  if (std::exchange(save_at_end_, false) && has_begun()) {
    saving_end_ = true;
    return actions_.push_back({.type = MembershipAction::kSave});
  }
  finish(ErrorCode::kNotFound, "the job has ended");
  actions_.push_back({.type = MembershipAction::kEnd});
}

}  // namespace phub

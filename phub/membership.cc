#include "phub/membership.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace phub {
namespace {

// Consecutive chunks with the same last round make one range.
std::vector<ChunkRange> ranges_of(const std::vector<uint64_t>& last_rounds) {
  std::vector<ChunkRange> ranges;
  for (uint32_t i = 0; i < last_rounds.size(); ++i) {
    if (!ranges.empty() && ranges.back().round == last_rounds[i]) {
      ranges.back().last = i;
    } else {
      ranges.push_back({i, i, last_rounds[i]});
    }
  }
  return ranges;
}

}  // namespace

Membership::Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks, Ms now)
    : spec_(spec), cores_(cores), chunks_(chunks), ranks_(spec.max_ranks), now_(now) {
  for (uint32_t r = 0; r < spec.world_size; ++r) {
    ranks_[r].expected = true;
    ranks_[r].first_round = 1;
    ranks_[r].expected_since = now;
  }
  min_round_ = spec.initial == "broadcast" ? 0 : 1;
}

void Membership::join(uint64_t token, int32_t wanted, bool replace, Ms now) {
  now_ = now;
  if (finished_) return reply_error(token, ErrorCode::kNotFound, "the job has ended");
  const int32_t chosen = wanted >= 0 ? wanted : choose_rank();
  if (chosen < 0) {
    return reply_error(token, ErrorCode::kFull,
                       fmt::format("job '{}' is full: all {} ranks are taken; raise max_ranks",
                                   spec_.name, spec_.max_ranks));
  }
  const auto rank = static_cast<uint32_t>(chosen);
  if (rank >= spec_.max_ranks) {
    return reply_error(token, ErrorCode::kFull,
                       fmt::format("rank {} is out of range: job '{}' has max_ranks {}", rank,
                                   spec_.name, spec_.max_ranks));
  }
  Rank& r = ranks_[rank];
  const bool taken = r.state == State::kLive || r.state == State::kJoining;
  if (taken && !r.losing) {
    if (!replace || r.state == State::kJoining) {
      return reply_error(
          token, ErrorCode::kTaken,
          fmt::format(
              "rank {} of job '{}' is taken by incarnation {}, which has its lease; stop it "
              "first, or join with replace",
              rank, spec_.name, r.incarnation));
    }
    lose(rank, "replaced by a new worker");
  } else if (std::any_of(joins_.begin(), joins_.end(),
                         [rank](const Join& j) { return j.rank == rank; })) {
    return reply_error(
        token, ErrorCode::kTaken,
        fmt::format("rank {} of job '{}' is being taken by another worker", rank, spec_.name));
  }
  joins_.push_back({token, rank});
  advance();
}

// Never joined first, then those who were lost, then those who left.
int32_t Membership::choose_rank() const {
  auto pending = [this](uint32_t rank) {
    return std::any_of(joins_.begin(), joins_.end(),
                       [rank](const Join& j) { return j.rank == rank; });
  };
  auto first = [&](State state, uint32_t begin, uint32_t end) -> int32_t {
    for (uint32_t r = begin; r < end; ++r) {
      if (ranks_[r].state == state && !pending(r)) return static_cast<int32_t>(r);
    }
    return -1;
  };
  for (const auto& [state, begin, end] : {std::tuple{State::kAbsent, 0u, spec_.world_size},
                                          {State::kLost, 0u, spec_.max_ranks},
                                          {State::kLeft, 0u, spec_.max_ranks},
                                          {State::kAbsent, 0u, spec_.max_ranks}}) {
    if (int32_t rank = first(state, begin, end); rank >= 0) return rank;
  }
  return -1;
}

void Membership::leave(uint64_t token, uint32_t rank) { lose(rank, "left", true, token); }

void Membership::barrier(uint64_t token, uint32_t rank) {
  if (auto old = barrier_.find(rank); old != barrier_.end()) {
    reply_error(old->second, ErrorCode::kInvalid,
                fmt::format("rank {} entered the barrier twice", rank));
  }
  barrier_[rank] = token;
  check_barrier();
}

void Membership::check_barrier() {
  if (barrier_.empty()) return;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const bool awaited = ranks_[r].state == State::kLive || (ranks_[r].expected && !assembled_);
    if (awaited && !barrier_.contains(r)) return;
  }
  for (const auto& [rank, token] : std::exchange(barrier_, {})) reply(token);
}

void Membership::set_hyper(uint64_t token, const std::map<std::string, double>& values) {
  hypers_.push_back({token, values});
  advance();
}

void Membership::heartbeat(uint32_t rank, Ms now) {
  now_ = now;
  ranks_[rank].lease_until = now + spec_.lease_ms;
}

bool Membership::is_current(uint32_t rank, uint32_t incarnation) const {
  return rank < ranks_.size() && ranks_[rank].incarnation == incarnation &&
         ranks_[rank].state == State::kLive;
}

bool Membership::is_secure(uint32_t rank, uint32_t incarnation) const {
  return is_current(rank, incarnation) && !ranks_[rank].losing;
}

std::string Membership::why_not_current(uint32_t rank, uint32_t incarnation) const {
  if (rank >= ranks_.size()) return fmt::format("there is no rank {}", rank);
  const Rank& r = ranks_[rank];
  if (r.incarnation == incarnation && !r.reason.empty()) {
    return fmt::format("rank {} (incarnation {}) is out: {}", rank, incarnation, r.reason);
  }
  return fmt::format("incarnation {} of rank {} was replaced", incarnation, rank);
}

void Membership::disconnected(uint32_t rank, uint32_t incarnation, const std::string& reason) {
  if (is_current(rank, incarnation)) lose(rank, reason);
}

void Membership::lose(uint32_t rank, const std::string& reason, bool left, uint64_t token) {
  Rank& r = ranks_[rank];
  if (r.losing || finished_) {
    if (token != 0) reply(token);
    return;
  }
  r.losing = true;
  losses_.push_back({rank, left, reason, token});
  advance();
}

// A rank that is expected but not there is not waited for any longer.
void Membership::forget(uint32_t rank, const std::string& reason) {
  ranks_[rank].expected = false;
  ranks_[rank].reason = reason;
  if (ranks_[rank].state == State::kAbsent) ranks_[rank].state = State::kLost;
  forgotten_.push_back(rank);
  log_.push_back({.kind = LogRecord::Kind::kLost,
                  .rank = rank,
                  .incarnation = ranks_[rank].incarnation,
                  .reason = reason,
                  .last_rounds = ranges_of(std::vector<uint64_t>(chunks_, 0))});
  advance();
}

// Starts a boundary when something waits for one. A successor is admitted only after its
// predecessor is gone from every core.
void Membership::advance() {
  if (phase_ != Phase::kIdle || finished_) return;
  current_losses_ = std::exchange(losses_, {});
  current_hypers_ = std::exchange(hypers_, {});
  boundary_ = {};
  boundary_.forgotten = std::exchange(forgotten_, {});
  std::vector<Join> later;
  current_joins_.clear();
  for (Join& join : joins_) {
    (ranks_[join.rank].losing ? later : current_joins_).push_back(join);
  }
  joins_ = std::move(later);
  if (current_losses_.empty() && current_hypers_.empty() && current_joins_.empty() &&
      boundary_.forgotten.empty()) {
    return;
  }
  phase_ = Phase::kHolding;
  answers_ = 0;
  started_ = 0;
  held_min_round_ = kNever;
  for (Join& join : current_joins_) {
    Rank& r = ranks_[join.rank];
    join.before = std::exchange(r.state, State::kJoining);
    ++r.incarnation;
    actions_.push_back(
        {.type = MembershipAction::kAdmit, .rank = join.rank, .incarnation = r.incarnation});
  }
  actions_.push_back({.type = MembershipAction::kHold});
}

void Membership::admitted(uint32_t rank, bool ok, const std::string& message) {
  auto join = std::find_if(current_joins_.begin(), current_joins_.end(),
                           [rank](const Join& j) { return j.rank == rank; });
  if (join == current_joins_.end() || ok) return;
  reply_error(join->token, ErrorCode::kFull, message);
  ranks_[rank].state = join->before;
  current_joins_.erase(join);
}

void Membership::held(const CoreReport& report, Ms now) {
  now_ = now;
  if (phase_ != Phase::kHolding) return;
  boundary_.round = std::max({boundary_.round, report.round, uint64_t{1}});
  started_ = std::max(started_, report.started);
  held_min_round_ = std::min(held_min_round_, report.min_round);
  if (++answers_ < cores_) return;
  build_boundary();
  phase_ = Phase::kCommitting;
  answers_ = 0;
  MembershipAction commit{.type = MembershipAction::kCommit};
  for (const Hyper& hyper : current_hypers_) commit.hyper.push_back(hyper.values);
  actions_.push_back(std::move(commit));
}

void Membership::build_boundary() {
  last_rounds_.assign(current_losses_.size(), std::vector<uint64_t>(chunks_, 0));
  for (size_t i = 0; i < current_losses_.size(); ++i) {
    const Loss& loss = current_losses_[i];
    const bool pause = !loss.left && spec_.on_loss != "shrink";
    boundary_.lost.push_back({.rank = loss.rank,
                              .expected_again = pause ? started_ + 1 : kNever,
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

void Membership::committed(Ms now) {
  now_ = now;
  if (phase_ != Phase::kCommitting || ++answers_ < cores_) return;
  phase_ = Phase::kIdle;
  finish_losses(now);
  finish_joins(now);
  for (const Hyper& hyper : current_hypers_) {
    log_.push_back(
        {.kind = LogRecord::Kind::kHyper, .round = boundary_.round, .values = hyper.values});
    reply(hyper.token);
  }
  current_hypers_.clear();
  if (failing_) return fail_job(failing_->code(), failing_->what());
  after_losses(now);
  check_abandoned(now);
  check_barrier();
  advance();
}

void Membership::finish_losses(Ms now) {
  for (size_t i = 0; i < current_losses_.size(); ++i) {
    Loss& loss = current_losses_[i];
    Rank& r = ranks_[loss.rank];
    r.state = loss.left ? State::kLeft : State::kLost;
    r.losing = false;
    r.expected = boundary_.lost[i].expected_again != kNever;
    r.expected_since = now;
    r.waited_since = 0;
    r.reason = loss.reason;
    // An incarnation that took part in nothing leaves the mark of those before it.
    r.last_round =
        std::max(r.last_round, *std::max_element(last_rounds_[i].begin(), last_rounds_[i].end()));
    log_.push_back({.kind = loss.left ? LogRecord::Kind::kLeft : LogRecord::Kind::kLost,
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
    log_.push_back({.kind = LogRecord::Kind::kAdmitted,
                    .round = r.first_round,
                    .rank = join.rank,
                    .incarnation = r.incarnation});
    actions_.push_back({.type = MembershipAction::kReply,
                        .rank = join.rank,
                        .incarnation = r.incarnation,
                        .token = join.token,
                        .first_round = r.first_round,
                        .send_initial = join.rank == 0 && held_min_round_ == 0});
    abandoned_since_ = 0;
  }
  current_joins_.clear();
  assembled_ = assembled_ || std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& r) {
                 return r.expected && r.state == State::kAbsent;
               });
  const bool all_there = std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& r) {
    return r.expected && r.state == State::kLost;
  });
  if (all_there && fail_after_ == kNever) pause_until_ = 0;
}

// What the job's policy says about the ranks that the boundary has just taken out.
void Membership::after_losses(Ms now) {
  for (const Loss& loss : current_losses_) {
    const Rank& r = ranks_[loss.rank];
    if (loss.left) continue;
    const std::string who = fmt::format("rank {} (incarnation {}) was lost in round {}: {}",
                                        loss.rank, r.incarnation, boundary_.round, loss.reason);
    if (loss.rank == 0 && held_min_round_ == 0 && spec_.on_loss != "wait") {
      return fail_job(ErrorCode::kRankLost,
                      who + "; it had not sent the initial parameters of every key yet");
    }
    if (spec_.on_loss == "fail" && fail_after_ == kNever) {
      fail_after_ = started_;
      fail_message_ = who;
      pause_until_ = now + spec_.lease_ms;
    } else if (spec_.on_loss == "wait") {
      pause_until_ = std::max(pause_until_, now + spec_.wait_limit_ms);
    }
  }
}

// Nobody is there any more. If the last to go left, and nobody is expected back, the job has ended;
// otherwise those who were lost have some time to come back.
void Membership::check_abandoned(Ms now) {
  if (finished_ || live() > 0 || !joins_.empty()) return;
  const bool expected =
      std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.expected; });
  const bool lost = std::any_of(ranks_.begin(), ranks_.end(),
                                [](const Rank& r) { return r.state == State::kLost; });
  const bool just_left = std::any_of(current_losses_.begin(), current_losses_.end(),
                                     [](const Loss& loss) { return loss.left; });
  if (!expected && (just_left || !lost)) {
    finish(ErrorCode::kNotFound, "the job has ended");
    actions_.push_back({.type = MembershipAction::kEnd});
  } else if (abandoned_since_ == 0) {
    abandoned_since_ = now;
  }
}

void Membership::non_finite(uint32_t rank, const std::string& where) {
  fail_job(ErrorCode::kNonFinite,
           rank == CoreReport::kNoRank
               ? fmt::format("the sum of finite gradients overflowed in {}", where)
               : fmt::format("rank {} sent a NaN or an infinity in {}", rank, where));
}

void Membership::excluded(uint32_t rank, uint32_t incarnation, uint32_t chunk, uint64_t round) {
  log_.push_back({.kind = LogRecord::Kind::kExcluded,
                  .round = round,
                  .rank = rank,
                  .incarnation = incarnation,
                  .chunk = chunk});
}

void Membership::remove() { fail_job(ErrorCode::kNotFound, "the job was deleted"); }

void Membership::fail_job(ErrorCode code, const std::string& message) {
  if (finished_) return;
  if (phase_ == Phase::kCommitting) {
    // What the cores are carrying out counts, and belongs in the log: the end waits for it.
    if (!failing_) failing_.emplace(code, message);
    return;
  }
  failed_ = true;
  log_.push_back({.kind = LogRecord::Kind::kFailed, .reason = message});
  finish(code, message);
  actions_.push_back({.type = MembershipAction::kFail, .code = code, .message = message});
}

// Nothing is answered any more after this, so everybody who waits is answered now.
void Membership::finish(ErrorCode code, const std::string& message) {
  finished_ = true;
  for (auto* joins : {&joins_, &current_joins_}) {
    for (const Join& join : *joins) reply_error(join.token, code, message);
    joins->clear();
  }
  for (auto* hypers : {&hypers_, &current_hypers_}) {
    for (const Hyper& hyper : *hypers) reply_error(hyper.token, code, message);
    hypers->clear();
  }
  for (auto* losses : {&losses_, &current_losses_}) {
    for (const Loss& loss : *losses) {
      if (loss.leave_token != 0) reply(loss.leave_token);
    }
    losses->clear();
  }
  for (const auto& [rank, token] : std::exchange(barrier_, {})) reply_error(token, code, message);
}

void Membership::probed(uint64_t min_round, const std::vector<uint64_t>& arrivals,
                        const std::vector<uint64_t>& waited_for, Ms now) {
  now_ = now;
  min_round_ = std::max(min_round_, min_round);
  waited_for_ = waited_for;
  // Before the initial parameters are here nobody can send anything, so the cores see nobody
  // waiting.
  if (min_round == 0 && assembled_ && live() > 1) waited_for_[0] |= 1;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    const bool waited = (waited_for_[r / 64] >> (r % 64)) & 1;
    if (!waited || arrivals[r] != rank.arrivals) {
      rank.waited_since = waited ? now : 0;
    } else if (rank.waited_since == 0) {
      rank.waited_since = now;
    }
    rank.arrivals = arrivals[r];
  }
  check_progress(now);
}

void Membership::check_progress(Ms now) {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    if (rank.state != State::kLive || rank.losing || rank.waited_since == 0) continue;
    if (now - rank.waited_since > spec_.progress_limit_ms) {
      lose(r, fmt::format("sent nothing for {} ms while the others waited for it",
                          now - rank.waited_since));
    }
  }
}

void Membership::tick(Ms now) {
  now_ = now;
  if (finished_) return;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    if (rank.state == State::kLive && !rank.losing && now > rank.lease_until) {
      lose(r, fmt::format("its lease of {} ms expired", spec_.lease_ms));
    }
    if (rank.state == State::kAbsent && rank.expected &&
        now > rank.expected_since + spec_.join_limit_ms) {
      const std::string reason = fmt::format("did not join within {} ms", spec_.join_limit_ms);
      if (spec_.on_loss != "shrink") {
        return fail_job(ErrorCode::kRankLost, fmt::format("rank {} {}", r, reason));
      }
      forget(r, reason);
      assembled_ = assembled_ || std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& x) {
                     return x.expected && x.state == State::kAbsent;
                   });
    }
  }
  if (fail_after_ != kNever && (min_round_ > fail_after_ || now > pause_until_)) {
    return fail_job(ErrorCode::kRankLost, fail_message_);
  }
  if (pause_until_ != 0 && now > pause_until_ && phase_ == Phase::kIdle) {
    std::string who;
    for (uint32_t r : missing()) who += fmt::format("{}{}", who.empty() ? "" : ", ", r);
    return fail_job(
        ErrorCode::kRankLost,
        fmt::format("the job waited {} ms for rank {} to come back", spec_.wait_limit_ms, who));
  }
  if (abandoned_since_ != 0 && now > abandoned_since_ + spec_.wait_limit_ms) {
    fail_job(ErrorCode::kRankLost, "every rank was lost and none came back");
  }
}

uint32_t Membership::live() const {
  return static_cast<uint32_t>(std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& r) {
    return r.state == State::kLive || r.state == State::kJoining;
  }));
}

std::vector<uint32_t> Membership::missing() const {
  std::vector<uint32_t> out;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].expected && ranks_[r].state != State::kLive) out.push_back(r);
  }
  return out;
}

std::vector<uint32_t> Membership::waiting_for() const {
  std::vector<uint32_t> out;
  for (uint32_t r = 0; r < ranks_.size() && !waited_for_.empty(); ++r) {
    if ((waited_for_[r / 64] >> (r % 64)) & 1) out.push_back(r);
  }
  return out;
}

std::vector<RankStatus> Membership::ranks() const {
  static constexpr const char* kStates[] = {"absent", "joining", "live", "lost", "left"};
  std::vector<RankStatus> out;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    const Ms last_heartbeat = rank.lease_until - std::min<Ms>(rank.lease_until, spec_.lease_ms);
    const Ms since_heartbeat = now_ - std::min(now_, last_heartbeat);
    const Ms waited = rank.waited_since == 0 ? 0 : now_ - std::min(now_, rank.waited_since);
    out.push_back({.rank = r,
                   .incarnation = rank.incarnation,
                   .state = kStates[static_cast<int>(rank.state)],
                   .first_round = rank.first_round,
                   .reason = rank.reason,
                   .contributions = rank.arrivals});
    if (rank.state == State::kLive) {
      out.back().lease_age_s = static_cast<double>(since_heartbeat) / 1000;
    }
    out.back().waited_s = static_cast<double>(waited) / 1000;
  }
  return out;
}

std::string Membership::state() const {
  if (failed_) return "failed";
  if (!assembled_) return "assembling";
  return pause_until_ != 0 ? "paused" : "running";
}

void Membership::reply(uint64_t token) {
  actions_.push_back({.type = MembershipAction::kReply, .token = token});
}

void Membership::reply_error(uint64_t token, ErrorCode code, const std::string& message) {
  actions_.push_back({.type = MembershipAction::kReply,
                      .token = token,
                      .ok = false,
                      .code = code,
                      .message = message});
}

}  // namespace phub

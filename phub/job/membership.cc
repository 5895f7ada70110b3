#include "phub/job/membership.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "phub/core/index_set.h"

namespace phub {
namespace {

// A second box asks for the ranks of a rack, and the first one is there.
std::string taken_rack_text(const JobSpec& spec, uint32_t rank) {
  const auto of_rack = spec.rack_ranks.begin() + rank;
  const uint32_t first = std::accumulate(spec.rack_ranks.begin(), of_rack, 0u);
  return fmt::format(
      "another box already sums rank {} to {} of job '{}', which are group {} of its 'groups', and "
      "a "
      "group has one box. Either 'groups' is wrong: it names the number of ranks that join each "
      "box, as in '4,4', and is the same for all ranks. Or this worker joined the wrong box: "
      "workers of one group all join the same",
      first, first + *of_rack - 1, spec.name, rank);
}

}  // namespace

Membership::Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks,
                       const RankRange& served)
    : spec_(spec),
      rules_(rules_of(spec)),
      cores_(cores),
      chunks_(chunks),
      served_(served),
      ranks_(spec.max_ranks),
      log_(chunks),
      decisions_(spec) {
  min_round_ = rules_.initial_broadcast() ? 0 : 1;
  for (uint32_t r = served.first; r < std::min(served.end, spec.world_size); ++r) {
    ranks_[r].expected = true;
    ranks_[r].first = true;
    ranks_[r].first_round = 1;
  }
}

void Membership::begin_life(uint32_t incarnation) {
  constexpr uint32_t kOfOneLife = 1024;
  for (Rank& rank : ranks_) rank.incarnation = (incarnation - 1) * kOfOneLife;
}

bool Membership::take_snapshot() {
  if (!has_begun()) return false;
  snapshot_wanted_ = true;
  advance();
  return true;
}

bool Membership::move_state() {
  if (!has_begun()) return false;
  state_wanted_ = true;
  advance();
  return true;
}

void Membership::join(uint64_t token, int32_t wanted, bool replace, Ms now) {
  now_ = now;
  if (finished_) return reply_error(token, ErrorCode::kNotFound, "the job has ended");
  if (assemble_until_ == 0) assemble_until_ = now + spec_.join_limit_ms;
  const int32_t chosen = wanted >= 0 ? wanted : choose_rank();
  if (chosen < 0) {
    return reply_error(token, ErrorCode::kFull,
                       fmt::format("job '{}' is full: all {} ranks are taken; raise max_ranks",
                                   spec_.name, spec_.max_ranks));
  }
  const auto rank = static_cast<uint32_t>(chosen);
  if (rank >= spec_.max_ranks) {
    reply_error(token, ErrorCode::kFull,
                fmt::format("rank {} is out of range: job '{}' has max_ranks {}", rank, spec_.name,
                            spec_.max_ranks));
    return check_abandoned();
  }
  if (!served_.contains(rank)) {
    reply_error(
        token, ErrorCode::kInvalid,
        fmt::format("rank {} is of another group of job '{}': this box sums ranks {} to {}, "
                    "which joined it first",
                    rank, spec_.name, served_.first, served_.end - 1));
    return check_abandoned();
  }
  Rank& r = ranks_[rank];
  if (r.state == State::kLive && !r.losing) {
    if (!replace && !spec_.rack_ranks.empty()) {
      return reply_error(token, ErrorCode::kTaken, taken_rack_text(spec_, rank));
    }
    if (!replace) {
      return reply_error(
          token, ErrorCode::kTaken,
          fmt::format(
              "rank {} of job '{}' is taken by incarnation {}, which has its lease; stop it "
              "first, or join with replace",
              rank, spec_.name, r.incarnation));
    }
    lose(rank, "replaced by a new worker");
  } else if (is_joining(rank)) {
    return reply_error(
        token, ErrorCode::kTaken,
        fmt::format("rank {} of job '{}' is being taken by another worker", rank, spec_.name));
  }
  joins_.push_back({token, rank});
  advance();
}

bool Membership::is_joining(uint32_t rank) const {
  return ranks_[rank].state == State::kJoining ||
         std::any_of(joins_.begin(), joins_.end(),
                     [rank](const Join& j) { return j.rank == rank; });
}

// First come ranks that the job waits for; then those that never joined, were lost, have left, and
// those that the next boundary takes out.
int32_t Membership::choose_rank() const {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    if (rank.expected && rank.state != State::kLive && !is_joining(r)) {
      return static_cast<int32_t>(r);
    }
  }
  auto first = [&](State state, uint32_t begin, uint32_t end) -> int32_t {
    for (uint32_t r = std::max(begin, served_.first); r < std::min(end, served_.end); ++r) {
      if (ranks_[r].state == state && !is_joining(r)) return static_cast<int32_t>(r);
    }
    return -1;
  };
  for (const auto& [state, begin, end] : {std::tuple{State::kAbsent, 0u, spec_.world_size},
                                          {State::kLost, 0u, spec_.max_ranks},
                                          {State::kLeft, 0u, spec_.max_ranks},
                                          {State::kAbsent, 0u, spec_.max_ranks}}) {
    if (int32_t rank = first(state, begin, end); rank >= 0) return rank;
  }
  for (uint32_t r = served_.first; r < served_.end; ++r) {
    if (ranks_[r].losing && !is_joining(r)) return static_cast<int32_t>(r);
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

void Membership::leave_barrier(uint32_t rank) {
  const auto waiting = barrier_.find(rank);
  if (waiting == barrier_.end()) return;
  reply_error(waiting->second, ErrorCode::kUnavailable,
              fmt::format("the connection over which rank {} waited has ended", rank));
  barrier_.erase(waiting);
}

// A rank that waits when the job is about to fail gets the reason, also after the last round.
void Membership::check_barrier() {
  if (barrier_.empty() || fail_after_ != kNever) return;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const bool awaited = ranks_[r].state == State::kLive || (ranks_[r].expected && !assembled_);
    if (awaited && !barrier_.contains(r)) return;
  }
  for (const auto& [rank, token] : std::exchange(barrier_, {})) reply(token);
}

void Membership::set_hyper(uint64_t token, uint32_t rank, const HyperChange& change) {
  decisions_.ask(token, rank, change);
  advance();
}

void Membership::change_branches(uint64_t token, const BranchChange& change, uint32_t child) {
  decisions_.ask(token, change, child);
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
    std::string why =
        fmt::format("rank {} (incarnation {}) is out: {}", rank, incarnation, r.reason);
    if (r.state == State::kLost && r.last_round > 0) {
      why += fmt::format("; the last round it took part in is {}", r.last_round);
    }
    return why;
  }
  return fmt::format("incarnation {} of rank {} was replaced", incarnation, rank);
}

std::string Membership::why_lost(uint32_t rank, uint32_t incarnation) const {
  const Rank& r = ranks_[rank];
  const bool lost = r.state == State::kLost && r.incarnation == incarnation;
  return lost ? why_not_current(rank, incarnation) : "";
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
  r.reason = reason;
  losses_.push_back({rank, left, reason, token});
  advance();
}

// A rank that is expected but not there is not waited for any longer.
void Membership::forget(uint32_t rank, const std::string& reason) {
  Rank& r = ranks_[rank];
  r.expected = false;
  r.reason = reason;
  forgotten_.push_back(rank);
  if (std::exchange(r.state, State::kLost) == State::kAbsent) {  // otherwise its loss is there
    log_.add({.kind = LogRecord::Kind::kLost,
              .rank = rank,
              .incarnation = r.incarnation,
              .reason = reason,
              .last_rounds = ranges_of(std::vector<uint64_t>(chunks_, 0))});
  }
}

std::string Membership::non_finite_text(uint32_t rank, const std::string& where) {
  return rank == CoreReport::kNoRank
             ? fmt::format("the sum of finite gradients overflowed in {}", where)
             : fmt::format("rank {} sent a NaN or an infinity in {}", rank, where);
}

void Membership::non_finite(uint32_t rank, const std::string& where) {
  fail_job(ErrorCode::kNonFinite, non_finite_text(rank, where));
}

void Membership::excluded(uint32_t rank, uint32_t incarnation, uint32_t chunk, uint64_t round) {
  log_.exclude(rank, incarnation, chunk, round);
}

void Membership::failed(const std::string& reason, ErrorCode code) {
  fail_job(code, fmt::format("job '{}' ended: {}", spec_.name, reason));
}

void Membership::remove() { fail_job(ErrorCode::kNotFound, "the job was deleted"); }

void Membership::fail_job(ErrorCode code, const std::string& message) {
  if (finished_) return;
  if (phase_ == Phase::kCommitting) {
    // The boundary that the cores are carrying out counts, and belongs in the log: the end waits
    // for it.
    if (!failing_) failing_.emplace(code, message);
    return;
  }
  failed_ = true;
  log_.add({.kind = LogRecord::Kind::kFailed, .reason = message});
  finish(code, message);
  actions_.push_back({.type = MembershipAction::kFail, .code = code, .message = message});
}

// No call is answered after this, so all that wait are answered now.
void Membership::finish(ErrorCode code, const std::string& message) {
  finished_ = true;
  for (auto* joins : {&joins_, &current_joins_}) {
    for (const Join& join : *joins) reply_error(join.token, code, message);
    joins->clear();
  }
  for (const uint64_t token : decisions_.drop()) reply_error(token, code, message);
  for (auto* losses : {&losses_, &current_losses_}) {
    for (const Loss& loss : *losses) {
      if (loss.leave_token != 0) reply(loss.leave_token);
    }
    losses->clear();
  }
  for (const auto& [rank, token] : std::exchange(barrier_, {})) reply_error(token, code, message);
}

uint32_t Membership::first_ranks() const {
  return static_cast<uint32_t>(std::ranges::count_if(ranks_, &Rank::first));
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
  for (uint32_t w = 0; w < waited_for_.size(); ++w) {
    for_each_bit(waited_for_[w], w, [&out](uint32_t rank) { out.push_back(rank); });
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
                   .reason = rank.reason});
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

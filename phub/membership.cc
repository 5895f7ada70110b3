#include "phub/membership.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

namespace phub {
namespace {

constexpr uint64_t kFarthestChange = uint64_t{1} << 20;  // rounds ahead

// "rank 0, 2": the first of them, and how many there are besides.
std::string named(const std::vector<uint32_t>& ranks) {
  constexpr size_t kMostNamed = 20;
  const std::span<const uint32_t> first(ranks.data(), std::min(ranks.size(), kMostNamed));
  std::string text = fmt::format("rank {}", fmt::join(first, ", "));
  if (ranks.size() > kMostNamed) text += fmt::format(" … and {} more", ranks.size() - kMostNamed);
  return text;
}

}  // namespace

Membership::Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks)
    : spec_(spec), cores_(cores), chunks_(chunks), ranks_(spec.max_ranks), log_(chunks) {
  for (uint32_t r = 0; r < spec.world_size; ++r) {
    ranks_[r].expected = true;
    ranks_[r].first_round = 1;
  }
  min_round_ = spec.initial == "broadcast" ? 0 : 1;
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
  Rank& r = ranks_[rank];
  if (r.state == State::kLive && !r.losing) {
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

// Never joined first, then those who were lost, then those who left.
int32_t Membership::choose_rank() const {
  auto first = [&](State state, uint32_t begin, uint32_t end) -> int32_t {
    for (uint32_t r = begin; r < end; ++r) {
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

void Membership::check_barrier() {
  if (barrier_.empty()) return;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const bool awaited = ranks_[r].state == State::kLive || (ranks_[r].expected && !assembled_);
    if (awaited && !barrier_.contains(r)) return;
  }
  for (const auto& [rank, token] : std::exchange(barrier_, {})) reply(token);
}

void Membership::set_hyper(uint64_t token, const HyperChange& change) {
  hypers_.push_back({token, change});
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

// A successor is admitted only after its predecessor is gone from every core. It takes part in a
// boundary once all that it needs is there: nobody is held up by its admission.
void Membership::admit_waiting() {
  for (Join& join : joins_) {
    Rank& r = ranks_[join.rank];
    if (join.stage != Join::kWaiting || r.losing) continue;
    join.stage = Join::kAdmitting;
    join.before = std::exchange(r.state, State::kJoining);
    ++r.incarnation;
    actions_.push_back(
        {.type = MembershipAction::kAdmit, .rank = join.rank, .incarnation = r.incarnation});
  }
}

// Starts a boundary when something waits for one.
void Membership::advance() {
  if (finished_) return;
  admit_waiting();
  if (phase_ != Phase::kIdle) return;
  current_losses_ = std::exchange(losses_, {});
  current_hypers_ = std::exchange(hypers_, {});
  boundary_ = {};
  boundary_.forgotten = std::exchange(forgotten_, {});
  const auto admitted = std::stable_partition(
      joins_.begin(), joins_.end(), [](const Join& join) { return join.stage != Join::kAdmitted; });
  current_joins_.assign(admitted, joins_.end());
  joins_.erase(admitted, joins_.end());
  if (current_losses_.empty() && current_hypers_.empty() && current_joins_.empty() &&
      boundary_.forgotten.empty()) {
    return;
  }
  phase_ = Phase::kHolding;
  answers_ = 0;
  started_ = 0;
  held_min_round_ = kNever;
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
  if (++answers_ < cores_) return;
  build_boundary();
  place_changes();
  phase_ = Phase::kCommitting;
  answers_ = 0;
  MembershipAction commit{.type = MembershipAction::kCommit, .lowest_round = held_min_round_};
  for (const Hyper& hyper : current_hypers_) commit.hyper.push_back(hyper.change);
  actions_.push_back(std::move(commit));
}

void Membership::build_boundary() {
  last_rounds_.assign(current_losses_.size(), std::vector<uint64_t>(chunks_, 0));
  for (size_t i = 0; i < current_losses_.size(); ++i) {
    Loss& loss = current_losses_[i];
    // Whoever leaves before the job has begun leaves the others without what they wait for.
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

// The round that each change gets: what is complete stays as it was, and so does what was decided
// before.
void Membership::place_changes() {
  std::erase_if(current_hypers_, [this](const Hyper& hyper) {
    if (hyper.change.round <= boundary_.round + kFarthestChange) return false;
    reply_error(hyper.token, ErrorCode::kInvalid,
                fmt::format("round {} is too far away: job '{}' is in round {}, and changes can be "
                            "made up to {} rounds ahead",
                            hyper.change.round, spec_.name, boundary_.round, kFarthestChange));
    return true;
  });
  for (Hyper& hyper : current_hypers_) {
    hyper.change.round = std::max({hyper.change.round, boundary_.round, last_change_});
    last_change_ = hyper.change.round;
  }
}

// The first round that the cores do not complete without a successor.
uint64_t Membership::expected_again(const Loss& loss) const {
  if (!assembled_ && loss.rank < spec_.world_size) return boundary_.round;
  return !loss.lost || spec_.on_loss == "shrink" ? kNever : started_ + 1;
}

void Membership::committed(const CoreReport& report, Ms now) {
  now_ = now;
  if (phase_ != Phase::kCommitting) return;
  committed_min_round_ = std::min(committed_min_round_, report.min_round);
  if (++answers_ < cores_) return;
  phase_ = Phase::kIdle;
  finish_losses();
  finish_joins(now);
  for (const Hyper& hyper : current_hypers_) {
    log_.add({.kind = LogRecord::Kind::kHyper,
              .round = hyper.change.round,
              .values = hyper.change.values});
    actions_.push_back({.type = MembershipAction::kReply,
                        .token = hyper.token,
                        .first_round = hyper.change.round});
  }
  current_hypers_.clear();
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
    log_.add({.kind = LogRecord::Kind::kAdmitted,
              .round = r.first_round,
              .rank = join.rank,
              .incarnation = r.incarnation});
    actions_.push_back({.type = MembershipAction::kReply,
                        .rank = join.rank,
                        .incarnation = r.incarnation,
                        .token = join.token,
                        .first_round = r.first_round,
                        .send_initial = join.rank == 0 && committed_min_round_ == 0});
  }
  current_joins_.clear();
}

void Membership::check_assembled() {
  if (!missing().empty()) return;
  assembled_ = true;
  if (fail_after_ == kNever) pause_until_ = 0;
}

// What the job's policy says about the ranks that the boundary has just taken out. Those who are
// lost before all have come may still be replaced, within the time that all of them have: no policy
// applies to them.
void Membership::after_losses(Ms now) {
  for (const Loss& loss : current_losses_) {
    const Rank& r = ranks_[loss.rank];
    if (!loss.lost || (!assembled_ && loss.rank < spec_.world_size)) continue;
    const std::string who = fmt::format("rank {} (incarnation {}) was lost in round {}: {}",
                                        loss.rank, r.incarnation, boundary_.round, loss.reason);
    if (loss.rank == 0 && committed_min_round_ == 0 && spec_.on_loss != "wait") {
      return fail_job(ErrorCode::kRankLost,
                      who + "; it had not sent the initial parameters of every key yet");
    }
    if (spec_.on_loss == "fail" && fail_after_ == kNever) {
      fail_after_ = started_;
      fail_message_ = who;
      pause_until_ = now + spec_.lease_ms;
    } else if (spec_.on_loss == "wait" && assembled_) {
      pause_until_ = std::max(pause_until_, now + spec_.wait_limit_ms);
    }
  }
}

// Nobody is there and nobody comes: the job ends, unless its policy is to wait. What joins later
// under its name is a job of its own, whose ranks assemble and whose initial parameters count.
void Membership::check_abandoned() {
  if (finished_ || phase_ != Phase::kIdle || live() > 0 || !joins_.empty()) return;
  if (assembled_ && !missing().empty()) return;  // the pause has its limit
  const bool lost = std::any_of(current_losses_.begin(), current_losses_.end(),
                                [](const Loss& loss) { return !loss.left; });
  if (assembled_ && lost) return fail_job(ErrorCode::kRankLost, "every rank was lost");
  finish(ErrorCode::kNotFound, "the job has ended");
  actions_.push_back({.type = MembershipAction::kEnd});
}

void Membership::non_finite(uint32_t rank, const std::string& where) {
  fail_job(ErrorCode::kNonFinite,
           rank == CoreReport::kNoRank
               ? fmt::format("the sum of finite gradients overflowed in {}", where)
               : fmt::format("rank {} sent a NaN or an infinity in {}", rank, where));
}

void Membership::excluded(uint32_t rank, uint32_t incarnation, uint32_t chunk, uint64_t round) {
  log_.exclude(rank, incarnation, chunk, round);
}

void Membership::failed(const std::string& reason) {
  fail_job(ErrorCode::kInternal, fmt::format("job '{}' ended: {}", spec_.name, reason));
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
  log_.add({.kind = LogRecord::Kind::kFailed, .reason = message});
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
  }
  check_join_limit(now);
  if (finished_) return;
  if (fail_after_ != kNever && (min_round_ > fail_after_ || now > pause_until_)) {
    return fail_job(ErrorCode::kRankLost, fail_message_);
  }
  if (pause_until_ != 0 && now > pause_until_ && phase_ == Phase::kIdle) {
    fail_job(ErrorCode::kRankLost, fmt::format("the job waited {} ms for {} to come back",
                                               spec_.wait_limit_ms, named(missing())));
  }
}

// All first ranks have had their time to come. Those who are on their way get it.
void Membership::check_join_limit(Ms now) {
  if (assembled_ || assemble_until_ == 0 || now <= assemble_until_) return;
  if (phase_ != Phase::kIdle || !losses_.empty() || !joins_.empty()) return;
  const std::vector<uint32_t> absent = missing();
  if (absent.empty()) return;
  const std::string reason = fmt::format("did not join within {} ms", spec_.join_limit_ms);
  const uint32_t enough = spec_.min_ranks > 0 ? spec_.min_ranks : spec_.world_size;
  if (live() < enough) {
    return fail_job(ErrorCode::kRankLost, fmt::format("{} {}", named(absent), reason));
  }
  if (absent.front() == 0 && committed_min_round_ == 0) {
    return fail_job(ErrorCode::kRankLost,
                    fmt::format("rank 0 {}; nobody else has the initial parameters", reason));
  }
  for (const uint32_t rank : absent) forget(rank, reason);
  advance();
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

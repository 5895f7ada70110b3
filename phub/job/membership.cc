#include "phub/job/membership.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

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

using Stage = RankRecord::Stage;

Membership::Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks,
                       const RankRange& served, uint32_t life)
    : members_(spec, chunks, served, life), changes_(members_, cores, chunks) {}

void Membership::restore(const Manifest& saved, const SavedClocks& clocks) {
  restored_ = true;
  members_.rounds.restore(saved.round);
  changes_.restore(saved, clocks);
}

Manifest Membership::saved(uint64_t round) {
  Manifest saved;
  saved.round = round;
  ranks().save(saved);
  changes_.decisions().save(saved, round);
  for (LogPage page{.more = true}; page.more;) {
    page = log().page(page.first + page.records.size());
    if (saved.log.empty()) saved.log_first = page.first;
    saved.log.insert(saved.log.end(), page.records.begin(), page.records.end());
  }
  return saved;
}

// --- requests ------------------------------------------------------------------------------------

void Membership::join(uint64_t token, int32_t wanted, bool replace, Ms now) {
  const JobSpec& spec = members_.spec;
  const auto refuse = [&](ErrorCode code, const std::string& why) {
    actions().refuse(token, code, why);
  };
  leases().set_now(now);
  if (finished_) return refuse(ErrorCode::kNotFound, "the job has ended");
  members_.policy.joined(now);
  const int32_t chosen = wanted >= 0 ? wanted : ranks().choose();
  if (chosen < 0) {
    return refuse(ErrorCode::kFull,
                  fmt::format("job '{}' is full: all {} ranks are taken; raise max_ranks",
                              spec.name, spec.max_ranks));
  }
  const auto rank = static_cast<uint32_t>(chosen);
  if (rank >= spec.max_ranks) {
    refuse(ErrorCode::kFull, fmt::format("rank {} is out of range: job '{}' has max_ranks {}", rank,
                                         spec.name, spec.max_ranks));
    return check_abandoned();
  }
  const RankRange& served = ranks().served();
  if (!served.contains(rank)) {
    refuse(ErrorCode::kInvalid,
           fmt::format("rank {} is of another group of job '{}': this box sums ranks {} to {}, "
                       "which joined it first",
                       rank, spec.name, served.first, served.end - 1));
    return check_abandoned();
  }
  const RankRecord& r = ranks()[rank];
  if (r.stage == Stage::kLive && !r.losing) {
    if (!replace && !spec.rack_ranks.empty()) {
      return refuse(ErrorCode::kTaken, taken_rack_text(spec, rank));
    }
    if (!replace) {
      return refuse(
          ErrorCode::kTaken,
          fmt::format(
              "rank {} of job '{}' is taken by incarnation {}, which has its lease; stop it "
              "first, or join with replace",
              rank, spec.name, r.incarnation));
    }
    changes_.lose(rank, "replaced by a new worker");
  } else if (r.joining) {
    return refuse(
        ErrorCode::kTaken,
        fmt::format("rank {} of job '{}' is being taken by another worker", rank, spec.name));
  }
  changes_.join(token, rank);
}

void Membership::enter_barrier(uint64_t token, uint32_t rank) {
  barrier().enter(token, rank);
  check_barrier();
}

// A rank that waits when the job is about to fail gets the reason, also after the last round.
void Membership::check_barrier() {
  if (barrier().empty() || members_.policy.is_failing()) return;
  for (uint32_t r = 0; r < ranks().size(); ++r) {
    const bool awaited = ranks()[r].stage == Stage::kLive || (ranks()[r].expected && !assembled());
    if (awaited && !barrier().has(r)) return;
  }
  barrier().open();
}

// --- events of ranks and cores -------------------------------------------------------------------

void Membership::admitted(uint32_t rank, bool ok, const std::string& message) {
  changes_.admitted(rank, ok, message);
  if (!ok) check_abandoned();
}

void Membership::held(const CoreReport& report, Ms now) {
  leases().set_now(now);
  changes_.held(report);
}

void Membership::committed(const CoreReport& report, Ms now) {
  leases().set_now(now);
  if (!changes_.committed(report, now)) return;
  if (failing_) return fail(failing_->code(), failing_->what());
  LossPolicy& policy = members_.policy;
  if (ranks().missing().empty()) policy.all_are_there();
  if (const auto error = policy.lost(changes_.losses(), changes_.boundary().round, now)) {
    fail(error->code(), error->what());
  }
  check_abandoned();
  check_barrier();
  changes_.advance();
}

void Membership::probed(uint64_t min_round, const std::vector<uint64_t>& sent,
                        const std::vector<uint64_t>& waited_for, Ms now) {
  leases().set_now(now);
  rounds().probed(min_round);
  std::vector<uint64_t> awaited = waited_for;
  // Before the initial parameters are here no rank can send gradients, so the cores see no rank
  // that waits.
  if (min_round == 0 && assembled() && ranks().live() > 1) awaited[0] |= 1;
  leases().probed(sent, std::move(awaited), now);
  check_leases(now);
}

void Membership::tick(Ms now) {
  leases().set_now(now);
  if (finished_) return;
  if (leases().may_be_over(now)) check_leases(now);
  check_join_limit(now);
  if (finished_) return;
  if (const auto error = members_.policy.overdue(now, changes_.is_idle())) {
    fail(error->code(), error->what());
  }
}

void Membership::check_leases(Ms now) {
  for (const Leases::Over& over : leases().check(now)) changes_.lose(over.rank, over.reason);
}

// The time for all first ranks to come is over. Ranks on their way still get it.
void Membership::check_join_limit(Ms now) {
  const LossPolicy& policy = members_.policy;
  if (!policy.join_limit_is_over(now) || !changes_.nothing_waits()) return;
  const std::vector<uint32_t> absent = ranks().missing();
  if (absent.empty()) return;
  if (const auto error = policy.without(absent)) return fail(error->code(), error->what());
  changes_.forget(absent, policy.why_absent());
}

// --- the end -------------------------------------------------------------------------------------

// No rank is there and none comes: the job ends, unless its policy is to wait. A later join under
// its name makes a job of its own, whose ranks assemble and whose initial parameters count.
void Membership::check_abandoned() {
  if (finished_ || ranks().live() > 0 || !changes_.nothing_waits()) return;
  if (assembled() && !ranks().missing().empty()) return;  // the pause has its limit
  const std::span<const RankLoss> losses = changes_.losses();
  const auto last =
      std::find_if(losses.rbegin(), losses.rend(), [](const RankLoss& loss) { return !loss.left; });
  if (assembled() && last != losses.rend()) {
    return fail(ErrorCode::kRankLost, fmt::format("every rank was lost, the last one (rank {}): {}",
                                                  last->rank, last->reason));
  }
  if (restored_ && !assembled()) {  // its checkpoint is still to be gone on from
    return fail(ErrorCode::kRankLost, "its first ranks were not there together again");
  }
  if (saving_end_) return;
  if (std::exchange(save_at_end_, false) && changes_.job_runs()) {
    saving_end_ = true;
    return actions().add({.type = MembershipAction::kSave});
  }
  finish(ErrorCode::kNotFound, "the job has ended");
  actions().add({.type = MembershipAction::kEnd});
}

void Membership::end_saved() {
  if (!changes_.source_lost().empty()) {
    return fail(ErrorCode::kRankLost, fmt::format("the box that this one stands by for is lost: {}",
                                                  changes_.source_lost()));
  }
  if (std::exchange(saving_end_, false)) check_abandoned();
}

void Membership::failed(const std::string& reason, ErrorCode code) {
  fail(code, fmt::format("job '{}' ended: {}", members_.spec.name, reason));
}

void Membership::fail(ErrorCode code, const std::string& message) {
  if (finished_) return;
  if (changes_.is_committing()) {
    // The boundary that the cores are carrying out counts, and belongs in the log: the end waits
    // for it.
    if (!failing_) failing_.emplace(code, message);
    return;
  }
  failed_ = true;
  log().add({.kind = LogRecord::Kind::kFailed, .reason = message});
  finish(code, message);
  actions().add({.type = MembershipAction::kFail, .code = code, .message = message});
}

// No call is answered after this, so all that wait are answered now.
void Membership::finish(ErrorCode code, const std::string& message) {
  finished_ = true;
  changes_.close(code, message);
  barrier().close(code, message);
}

// --- for people ----------------------------------------------------------------------------------

std::vector<RankStatus> Membership::statuses() const {
  std::vector<RankStatus> statuses = ranks().statuses();
  leases().add_to(statuses);
  return statuses;
}

std::string Membership::state() const {
  if (failed_) return "failed";
  if (!assembled()) return "assembling";
  return members_.policy.is_paused() ? "paused" : "running";
}

std::string non_finite_text(uint32_t rank, const std::string& where) {
  return rank == CoreReport::kNoRank
             ? fmt::format("the sum of finite gradients overflowed in {}", where)
             : fmt::format("rank {} sent a NaN or an infinity in {}", rank, where);
}

}  // namespace phub

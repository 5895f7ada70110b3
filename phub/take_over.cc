#include "phub/take_over.h"

#include <algorithm>

#include "phub/job/standby.h"
#include "transport/error.h"

namespace phub {

void check_owner(const JoinRequest& request, const Manifest& saved) {
  const Caller& caller = request.caller;
  if (saved.owner.empty() || caller.id.empty() || caller.id == saved.owner || caller.is_admin) {
    return;
  }
  fail(ErrorCode::kUnauthorized,
       "job '{}' is to go on from the checkpoint of a job that another token created: join with "
       "that token first, or use another name",
       saved.spec.name);
}

void TakeOver::check_makes_jobs(const JobSpec& spec) const {
  if (!is_standby() || spec.mirrors || has_gone_on_) return;
  fail(ErrorCode::kUnavailable,
       "this box stands by for {}: join job '{}' there; if that box is lost, jobs that had begun "
       "go on here",
       source_, spec.name);
}

void TakeOver::check(const JoinRequest& request, const JobSpec& spec, Manifest& saved) {
  if (spec.mirrors) {
    fail(ErrorCode::kUnavailable,
         "this standby has round {} of job '{}', of an earlier life: its ranks join here, or the "
         "job is deleted here to begin anew",
         saved.round, spec.name);
  }
  check_owner(request, saved);
  JobSpec of_ranks = spec;
  for (size_t k = 0; k < std::min(spec.keys.size(), saved.spec.keys.size()); ++k) {
    of_ranks.keys[k].tile_rows = saved.spec.keys[k].tile_rows;
  }
  const std::string different = difference(spec_at_standby(of_ranks), saved.spec);
  if (!different.empty()) {
    fail(ErrorCode::kMismatch,
         "job '{}' is to go on after round {}, as its standby has it, and differs from it: {}; "
         "join as before, or delete the job",
         spec.name, saved.round, different);
  }
  if (is_standby()) check_majority(request, saved);
  saved.spec = std::move(of_ranks);
  saved.source_epoch = 0;
}

void TakeOver::check_majority(const JoinRequest& request, const Manifest& saved) {
  const std::string& name = saved.spec.name;
  if (saved.source_epoch == 0) {
    fail(ErrorCode::kUnavailable,
         "this standby has round {} of job '{}', from before it ended itself, and there may be "
         "later ones: to go on from it, start this server without --standby-of",
         saved.round, name);
  }
  if (request.epoch > saved.source_epoch) return;  // of a life after this one: so many did once
  RackNews members;
  for (uint32_t rank = 0; rank < saved.ranks.size(); ++rank) {
    if (!saved.ranks[rank].expected) continue;
    members.live.push_back(rank);
    members.incarnations.push_back(saved.ranks[rank].incarnation);
  }
  auto& [epoch, joined] = joined_[name];
  if (std::exchange(epoch, saved.source_epoch) != saved.source_epoch) joined.clear();
  for (size_t i = 0; i < members.live.size(); ++i) {
    const bool asks = request.epoch == saved.source_epoch && request.rank >= 0 &&
                      members.live[i] == static_cast<uint32_t>(request.rank) &&
                      members.incarnations[i] == request.incarnation;
    if (asks) joined.emplace(members.live[i], members.incarnations[i]);
  }
  const auto counts = [&joined = joined](uint32_t rank, uint32_t incarnation) {
    return joined.contains({rank, incarnation});
  };
  if (is_majority(members, counts)) return;
  fail(ErrorCode::kUnavailable,
       "the box of job '{}' is lost, and this standby goes on when more than half of its {} ranks "
       "have joined it, each as the rank that it was; or delete the job",
       name, members.live.size());
}

void TakeOver::goes_on(const std::string& job) {
  has_gone_on_ = true;
  joined_.erase(job);
}

}  // namespace phub

#include "phub/job/standby.h"

#include <algorithm>

#include "phub/job/memory.h"

namespace phub {

bool wants_standby(const JobSpec& spec) {
  return spec.saved == Saved::kYes && spec.work == Work::kAll && box_has_state(spec);
}

JobSpec spec_at_standby(const JobSpec& spec) {
  constexpr uint32_t kMostMs = 7u * 24 * 3600 * 1000;  // as a spec may have it
  JobSpec there = spec;
  there.mirrors = true;
  there.rack_ranks = {most_ranks(spec)};
  there.world_size = there.max_ranks = 1;
  there.min_ranks = 0;
  there.groups.clear();
  there.rank_hosts.clear();
  there.gradient_dtype = there.parameter_dtype = "f32";
  there.rounding = RoundingMode::kNearest;
  for (KeySpec& key : there.keys) {
    key.format.clear();
    key.exchanged_by.clear();
  }
  // The source has weighed, scaled and divided what it sends, and has judged it: a null is no step.
  there.reduction = Reduction::kSum;
  there.weights = Weights::kNo;
  there.unused = Unused::kSkip;
  there.on_nonfinite = OnNonFinite::kPass;
  drop_grad_scale(there);
  there.on_loss = OnLoss::kFail;
  wait_for_all_ranks(there);
  there.saved = Saved::kYes;
  // The source finds out first which of its ranks is missing.
  const uint64_t pause = spec.on_loss == OnLoss::kWait ? spec.wait_limit_ms : 0;
  there.progress_limit_ms = static_cast<uint32_t>(
      std::min<uint64_t>(uint64_t{2} * spec.progress_limit_ms + pause, kMostMs));
  return there;
}

bool is_majority(const RackNews& members,
                 const std::function<bool(uint32_t rank, uint32_t incarnation)>& counts) {
  size_t counted = 0;
  for (size_t i = 0; i < members.live.size(); ++i) {
    if (counts(members.live[i], members.incarnations[i])) ++counted;
  }
  return 2 * counted > members.live.size();
}

// What came before is in the source's log, which is gone with it.
void save_members(const RackNews& members, Manifest& saved) {
  saved.ranks.assign(saved.spec.rack_ranks.front(), {});
  saved.live_ranks = members.live;
  for (size_t i = 0; i < members.live.size(); ++i) {
    saved.ranks[members.live[i]] = {
        .incarnation = members.incarnations[i], .last_round = 0, .expected = true};
  }
  saved.log.clear();
  saved.log_first = 0;
}

}  // namespace phub

#include "phub/job/rack.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string_view>

#include "transport/error.h"

namespace phub {
namespace {

RankTree tree_of(const JobSpec& spec) { return {spec.groups, spec.max_ranks}; }

uint32_t clamped(uint64_t ms) {
  constexpr uint64_t kMost = uint64_t{7} * 24 * 3600 * 1000;  // as a spec may have it
  return static_cast<uint32_t>(std::min(ms, kMost));
}

}  // namespace

int32_t rank_above(const JobSpec& spec, int32_t rank) {
  if (rank < 0) return -1;
  const std::vector<RankRange> groups = tree_of(spec).last_groups();
  const auto group = std::ranges::find_if(
      groups, [rank](const RankRange& g) { return g.contains(static_cast<uint32_t>(rank)); });
  if (group == groups.end()) {
    fail(ErrorCode::kFull, "rank {} is out of range: job '{}' has max_ranks {}", rank, spec.name,
         spec.max_ranks);
  }
  return static_cast<int32_t>(group - groups.begin());
}

RankRange ranks_below(const JobSpec& spec, uint32_t rank_above) {
  const std::vector<RankRange> groups = tree_of(spec).last_groups();
  if (rank_above >= groups.size()) {
    fail(ErrorCode::kInternal, "the parent's answer is about rank {} of {}", rank_above,
         groups.size());
  }
  return groups[rank_above];
}

RankRange ranks_of_training(const JobSpec& spec, uint32_t rank) {
  if (spec.rack_ranks.empty()) return {rank, rank + 1};
  const auto of_rack = spec.rack_ranks.begin() + rank;
  const uint32_t first = std::accumulate(spec.rack_ranks.begin(), of_rack, 0u);
  return {first, first + *of_rack};
}

// The parent gives a rack more time than the rack gives its ranks: it is to find out first which of
// them is missing.
JobSpec spec_above(const JobSpec& spec) {
  const RankTree tree = tree_of(spec);
  JobSpec above = spec;
  above.rack_ranks.clear();
  above.rank_hosts.clear();
  above.world_size = 0;
  for (const RankRange& group : tree.last_groups()) {
    uint32_t leaves = group.size();
    if (!spec.rack_ranks.empty()) {
      leaves = 0;
      for (uint32_t r = group.first; r < group.end; ++r) leaves += spec.rack_ranks[r];
    }
    above.rack_ranks.push_back(leaves);
    if (group.first < spec.world_size) ++above.world_size;
  }
  above.max_ranks = static_cast<uint32_t>(above.rack_ranks.size());
  above.groups = tree.above_last_groups();
  above.gradient_dtype = "f32";
  for (KeySpec& key : above.keys) {
    key.format.clear();
    key.exchanged_by.clear();  // every rack takes part in all sums
  }
  const uint64_t pause = spec.on_loss == "wait" ? spec.wait_limit_ms : 0;
  above.progress_limit_ms = clamped(uint64_t{2} * spec.progress_limit_ms + pause);
  return above;
}

JobSpec spec_of_sums(JobSpec spec) {
  spec.optimizer = "none";
  spec.reduction = "sum";
  spec.unused = "zero";
  spec.state_dtype = "f32";
  spec.groups.clear();
  return spec;
}

JobRules rules_of_sums(const JobSpec& spec) {
  JobRules rules = rules_of(spec);
  rules.optimizer = kernels::Optimizer::kNone;
  rules.reduction = Reduction::kSum;
  rules.unused = Unused::kZero;
  rules.state8 = false;
  return rules;
}

}  // namespace phub

// The boxes below the root of a plan, which ranks of a job with groups join.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "tests/oracle/groups.h"
#include "tests/sim/rack_plan.h"
#include "transport/control/rank_tree.h"

namespace phub::sim {
namespace {

// Boxes by their place: the place of the box above, and which of its racks they are. Jobs share
// them.
using Places = std::map<std::pair<uint32_t, uint32_t>, uint32_t>;

}  // namespace

void put_over_racks(JobPlan& job, uint32_t levels, uint32_t cores, RackPlan& plan) {
  Places places;
  std::map<uint32_t, uint32_t> racks_of;  // by box
  for (uint32_t i = 0; i < plan.racks.size(); ++i) {
    const uint32_t above = plan.racks[i].above;
    places[{above, racks_of[above]++}] = i + 1;
  }
  const uint32_t ranks = job.spec.max_ranks;
  const RankTree tree(job.spec.groups, ranks);
  job.box_of.assign(ranks, 0);
  job.levels = std::min(levels, tree.levels() - 1);
  for (uint32_t level = tree.levels() - job.levels; level < tree.levels(); ++level) {
    std::map<uint32_t, uint32_t> next;  // by box above
    for (uint32_t first = 0; first < ranks;) {
      const uint32_t above = job.box_of[first];
      uint32_t& box = places[{above, next[above]++}];
      if (box == 0) {
        plan.racks.push_back({above, cores});
        box = static_cast<uint32_t>(plan.racks.size());
      }
      const uint32_t end = tree.end(level, first);
      std::fill(job.box_of.begin() + first, job.box_of.begin() + end, box);
      first = end;
    }
  }
}

bool is_below(const RackPlan& plan, uint32_t box, uint32_t above) {
  while (box > 0 && box != above) box = plan.racks[box - 1].above;
  return box == above;
}

uint32_t level_of(const RackPlan& plan, const JobPlan& job, uint32_t above) {
  uint32_t level = 0;
  const auto leaf =
      std::ranges::find_if(job.box_of, [&](uint32_t box) { return is_below(plan, box, above); });
  for (uint32_t box = leaf == job.box_of.end() ? above : *leaf; box != above;
       box = plan.racks[box - 1].above) {
    ++level;
  }
  return level;
}

namespace {

// The boxes choose the numbers of ranks, and those above them those of racks: all have as many.
void let_boxes_choose(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  const uint64_t racks = random.between(2, 4), ranks = random.between(1, 4);
  spec.groups.clear();
  for (uint64_t i = 0; i < racks; ++i) {
    spec.groups += fmt::format("{}{}", spec.groups.empty() ? "" : ",", ranks);
  }
  spec.world_size = spec.max_ranks = static_cast<uint32_t>(racks * ranks);
  job.fixed_ranks = false;
  job.late_ranks = 0;
  const auto is_nobodys = [&spec](const auto& what) { return what.rank >= spec.world_size; };
  std::erase_if(job.faults, is_nobodys);
  std::erase_if(job.bad, is_nobodys);
  std::erase_if(job.state_calls, is_nobodys);
}

}  // namespace

void add_racks(SimRandom& random, RackPlan& plan) {
  // Racks send over a network.
  if (plan.net.shared_memory) return;
  if (!random.chance(0.6)) return;
  const auto levels = static_cast<uint32_t>(random.chance(0.6) ? 1 : 2);
  for (JobPlan& job : plan.jobs) {
    JobSpec& spec = job.spec;
    if (!job.lock_step() || !random.chance(0.85)) continue;
    if (RankTree(spec.groups, spec.max_ranks).levels() < 2 || random.chance(0.3)) {
      spec.groups =
          reference::some_groups(spec.max_ranks, [&random](uint64_t n) { return random.below(n); });
    }
    if (RankTree(spec.groups, spec.max_ranks).levels() < 2) continue;
    job.fixed_ranks = true;
    if (plan.box_faults.empty() && random.chance(0.25)) let_boxes_choose(random, job);
    put_over_racks(job, levels, static_cast<uint32_t>(random.between(1, 3)), plan);
    // Without an optimizer the root saves nothing but what ranks do.
    if (!plan.box_faults.empty() && spec.optimizer == "none" && job.saver_chance < 1) {
      spec.optimizer = "momentum";
    }
    for (JobPlan::Ranks& later : job.later_ranks) later.max_ranks = spec.max_ranks;
  }
  // Who is lost with a box is followed by others, who know their numbers.
  const bool all_fixed = std::ranges::all_of(
      plan.jobs, [](const JobPlan& job) { return job.fixed_ranks || job.box_of.empty(); });
  if (plan.racks.empty() || plan.clean || !all_fixed || !random.chance(0.7)) return;
  add_rack_faults(random, plan);
}

void add_rack_faults(SimRandom& random, RackPlan& plan) {
  using Kind = RackFault;
  constexpr RackFault::Kind kKinds[] = {
      Kind::kDies,   Kind::kDies,        Kind::kDiesSilently, Kind::kHangs, Kind::kBreaks,
      Kind::kBreaks, Kind::kStandsStill, Kind::kMute,         Kind::kDeaf,  Kind::kRootHangs};
  for (uint64_t i = random.between(1, 4); i > 0; --i) {
    plan.rack_faults.push_back({.kind = kKinds[random.below(std::size(kKinds))],
                                .after_pushes = random.below(200),
                                .box = random.below(8),
                                .ms = random.between(1, random.chance(0.5) ? 30 : 300)});
  }
  std::ranges::sort(plan.rack_faults, {}, &RackFault::after_pushes);
}

}  // namespace phub::sim

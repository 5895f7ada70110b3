// Compares the places where a parameter server's parts may run on a cluster: the plan over the
// hosts that serve (plan.h), and the limits of every host (limits.h).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "phub/plan/cluster.h"
#include "phub/plan/limits.h"
#include "phub/plan/plan.h"

namespace phub {

// Bytes of a serving host and direction, for W workers, M bytes and S boxes:
// dedicated-central W·M, dedicated-sharded W·M/S, colocated-central (W-1)·M, colocated-sharded
// 2(W-1)/W·M.
inline constexpr std::array<std::string_view, 4> kPlacements = {
    "dedicated-central", "dedicated-sharded", "colocated-central", "colocated-sharded"};

struct PlacementOptions {
  std::string placement = "all";  // or one of kPlacements
  uint32_t ranks = 0;             // workers; 0: one on each host of a worker kind
  uint32_t boxes = 0;             // for dedicated-sharded; 0: all
};

struct HostLoad {
  uint32_t kind = 0;  // index into Cluster::kinds
  Host host;
  Traffic bytes;       // for all NICs of the host
  double seconds = 0;  // the time of a round
  std::string resource, where;
};

struct Placement {
  std::string name;
  Plan plan;                     // over the boxes
  uint32_t boxes = 0;            // those that serve
  uint32_t dedicated = 0;        // those that are hosts without a worker
  std::vector<HostLoad> hosts;   // boxes in the order of the plan, then the others
  size_t busiest = 0;            // index of the slowest host, among equals that with the most bytes
  double seconds = 0;            // the time of a round
  std::optional<double> images;  // images/s of all workers, if it is known how fast they are
};

struct Placements {
  uint32_t ranks = 0;
  std::vector<Placement> all;
  std::vector<std::string> left_out;  // placements that the cluster does not allow, and why
  size_t recommended = 0;             // index into `all`
  std::string reason;                 // a sentence
};

// images_per_s, batch and ddio of `inputs` hold for all hosts; a kind's images_per_s is its own.
// spec.max_ranks is replaced by the number of workers. Throws Error(kInvalid), which names the
// option.
Placements compare_placements(const Cluster& cluster, const JobSpec& spec,
                              const PlanOptions& plan_options, const LimitInputs& inputs,
                              const PlacementOptions& options);

std::string describe(const Placements& placements, const Cluster& cluster);
std::string to_json(const Placements& placements, const Cluster& cluster);

}  // namespace phub

// The scene of a simulation: hosts, the servers on them, and the ranks that send to each. Plain
// data, made from a cluster (phub/plan/cluster.h) with the real plan (phub/plan/plan.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/rack_model/costs.h"
#include "phub/plan/cluster.h"
#include "phub/plan/placement.h"
#include "phub/plan/plan.h"

namespace phub::rack_model {

struct SceneHost {
  uint32_t kind = 0;             // index into Scene::kinds
  std::optional<uint32_t> rack;  // nullopt: beside the racks
};

// A parameter server of one or more boxes. Its ranks are workers, or servers below it.
struct SceneServer {
  Plan plan;
  ElementTraffic element;
  std::vector<uint32_t> boxes;     // hosts, in the plan's order
  std::vector<uint32_t> workers;   // hosts
  std::vector<uint32_t> children;  // servers, which have workers and plans that are alike
  // Server with such a plan and such workers: this one's own are left out, and its sums are ready
  // when that one's are.
  std::optional<uint32_t> twin_of;
};

struct Scene {
  std::string name;
  std::vector<HostKind> kinds;
  std::vector<SceneHost> hosts;
  std::vector<SceneServer> servers;  // the first is the top
  bool nics = true;                  // false: ranks and server share a host's memory
  bool ddio = false;
  std::optional<double> uplink_gbit_s;  // that of each rack, each way
  uint32_t bundle = 1;                  // chunks of a queue that travel as one
  Costs costs;
  uint32_t workers = 0;  // those that are left out, too
  double limit_s = 0;    // a round takes at least so long (phub/plan/limits.h)
};

struct SceneOptions {
  PlacementOptions placement;
  uint32_t racks = 0;  // with them: one box, or with `parent` one in each rack and one above
  bool parent = false;
  std::optional<double> uplink_gbit_s;
  bool every_rack = false;     // else, of racks that are alike, the workers of one are simulated
  bool shared_memory = false;  // all ranks and the server on one host of the first kind
  bool ddio = false;
  uint32_t bundle = 1;
};

// One scene for each placement (placement.h) that the cluster allows; those that it does not, and
// why, are added to `left_out`. Throws Error(kInvalid), which names the option.
std::vector<Scene> make_scenes(const Cluster& cluster, const JobSpec& spec,
                               const PlanOptions& plan_options, const SceneOptions& options,
                               const Costs& costs, std::vector<std::string>& left_out);

}  // namespace phub::rack_model

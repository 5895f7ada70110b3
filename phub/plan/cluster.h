// A cluster, as a TOML file describes it: hosts by kind, with the rates of their parts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "numa/topology.h"
#include "phub/plan/limits.h"

namespace phub {

// Hosts that are alike.
struct HostKind {
  std::string name;
  bool box = false;  // only serves; false: a worker runs on it, and it may serve, too
  uint32_t count = 1;
  numa::Topology topology;  // with its NICs, at least one
  LimitInputs rates;        // link_gbit_s is there
};

// At least one kind is of workers.
struct Cluster {
  std::vector<HostKind> kinds;
};

// Throws Error(kInvalid), which names the place ("cluster.toml:3:9") and the problem.
Cluster parse_cluster(std::string_view text, std::string_view path);
Cluster load_cluster(const std::string& path);

}  // namespace phub

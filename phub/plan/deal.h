// The part of make_plan() that gives every chunk a queue: at home as far as the boxes stay balanced
// (homes.h), else where the load is least.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "phub/plan/plan.h"

namespace phub {

// A node that can serve: it has cores, and NICs unless no node has any.
struct Site {
  uint32_t node = 0;
  uint32_t box = 0;
  uint64_t host = 0;            // numa::Node
  std::vector<uint32_t> cores;  // into Topology::cores
  std::vector<uint32_t> nics;   // into Topology::nics
};

using LoadOfCpus = std::map<std::pair<uint32_t, uint32_t>, uint64_t>;  // by box and CPU
LoadOfCpus load_of_cpus(const PlanOptions& options);

// Sets the queue of every chunk, the loads of cores and NICs, and Plan::homes. `queue_share`: by
// queue, the part that it has of its core and NIC.
void deal(const std::vector<Site>& sites, std::span<const double> queue_share,
          std::span<const KeySpec> keys, const PlanOptions& options, Plan& plan);

}  // namespace phub

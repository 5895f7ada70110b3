// Chooses the core to which a thread of a store is pinned.
#pragma once

#include <algorithm>
#include <cstdint>

#include "numa/topology.h"

namespace phub::iterstore {

// Threads of all ranks on this host are spread evenly over its cores, neighbours on one node. The
// host's `ranks` are the job's that are next to each other.
inline const numa::Core& core_of(const numa::Topology& topology, uint32_t thread, uint32_t threads,
                                 uint32_t rank, uint32_t ranks) {
  const uint32_t here = std::max(ranks, 1u);
  const uint64_t index = uint64_t{rank % here} * threads + thread;
  const uint64_t all = uint64_t{here} * threads;
  return topology.cores[index * topology.cores.size() / all];
}

}  // namespace phub::iterstore

// Chooses the core to which a thread of a store is pinned.
#pragma once

#include <algorithm>
#include <cstdint>

#include "numa/topology.h"

namespace phub::iterstore {

// Threads of all ranks on this host are spread evenly over its cores, neighbours on one node.
// `ranks` is the number of the job's ranks on this host, which have consecutive numbers.
const numa::Core& core_of(const numa::Topology& topology, uint32_t thread, uint32_t threads,
                          uint32_t rank, uint32_t ranks);

}  // namespace phub::iterstore

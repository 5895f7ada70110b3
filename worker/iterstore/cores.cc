#include "worker/iterstore/cores.h"

#include <algorithm>

namespace phub::iterstore {

const numa::Core& core_of(const numa::Topology& topology, uint32_t thread, uint32_t threads,
                          uint32_t rank, uint32_t ranks) {
  const uint32_t here = std::max(ranks, 1u);
  const uint64_t index = uint64_t{rank % here} * threads + thread;
  const uint64_t all = uint64_t{here} * threads;
  return topology.cores[index * topology.cores.size() / all];
}

}  // namespace phub::iterstore

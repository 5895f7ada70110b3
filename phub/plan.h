// The plan: which core, queue and NIC handles each chunk. A pure function of topology, key table
// and options; the same input gives the same plan everywhere.
//
// Chunk → core → queue → NIC are all on one NUMA node (PHub, section 3). Chunks are dealt out by
// bytes, largest first, to the node, then the core with the least (longest processing time first).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "numa/topology.h"
#include "transport/job_spec.h"
#include "transport/messages.h"

namespace phub {

struct PlanOptions {
  uint32_t cores = 0;       // cores to use; 0: all. Spread over nodes in proportion to their NICs
  uint32_t ranks = 1;       // max_ranks: for queue pairs and memory
  uint32_t chunk_elements = 8192;
};

struct ChunkPlan {
  uint32_t key = 0;
  uint32_t elements = 0;
  uint64_t key_element = 0;  // where the chunk begins within its key
  uint64_t offset = 0;       // where it begins in the job's layout, in elements
  uint32_t queue = 0;        // index into Plan::queues
  uint32_t index = 0;        // within its queue: what the immediate carries
};
struct QueuePlan {  // one (core, NIC) pair; each worker has one queue pair per queue
  uint32_t core = 0;
  uint32_t nic = 0;
  std::vector<uint32_t> chunks;
};
struct CorePlan {
  uint32_t node = 0;      // index into the topology's nodes
  uint32_t os_node = 0;
  uint32_t os_cpu = 0;
  uint64_t elements = 0;
  std::vector<uint32_t> queues;
};
struct NicPlan {
  uint32_t node = 0;
  std::string name;
  uint64_t elements = 0;
};

struct Plan {
  std::vector<ChunkPlan> chunks;     // key by key, ascending
  std::vector<QueuePlan> queues;
  std::vector<CorePlan> cores;
  std::vector<NicPlan> nics;
  std::vector<uint64_t> key_offset;  // in elements; each key begins at a multiple of kKeyAlignment
  uint64_t total_elements = 0;       // with the padding between keys
};

inline constexpr uint64_t kKeyAlignment = 32;  // elements: 128 bytes of f32

// Throws Error(kInvalid) when the options cannot be met (no keys, more cores than there are, a queue
// with more than kMaxChunksPerQueue chunks).
// Topologies without NICs (shared memory) get one pseudo-NIC "memN" per node, so that there is
// exactly one queue per core.
Plan make_plan(const numa::Topology& topology, std::span<const KeySpec> keys,
               const PlanOptions& options);

JobLayout layout_of(const Plan& plan);

// Largest part over mean, in bytes, over cores and over NICs (1.0 is perfect).
double core_imbalance(const Plan& plan);
double nic_imbalance(const Plan& plan);

// For people: a table of nodes, NICs, cores and queues; memory that `spec` needs on each node.
std::string describe(const Plan& plan, const JobSpec& spec);

}  // namespace phub

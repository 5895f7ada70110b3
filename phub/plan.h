// The plan: which core, queue and NIC handles each chunk. A pure function of topology, key table
// and options; the same input gives the same plan everywhere.
//
// Chunk → core → queue → NIC are all on one NUMA node (PHub, section 3). Chunks are dealt out by
// bytes, largest first, to the node, then the core with the least (longest processing time first),
// what they carry for other jobs included.
//
// Nodes without a core or (where others have some) without a NIC stay unused. Each node's share of
// the bytes is the smaller of its shares of the cores and of the NICs in use: with both spread
// alike, both are balanced; otherwise the worst of them is as good as it can be.
//
// On the box, chunks lie one after another as their queue handles them, queue after queue and node
// after node, each node's on pages of its own. Over shared memory the box sums from the workers'
// memory, which is laid out by keys; then the pages of each chunk are placed one by one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "numa/topology.h"
#include "transport/job_spec.h"
#include "transport/layout.h"
#include "transport/messages.h"

namespace phub {

// What a queue carries already for other jobs.
struct PlanLoad {
  uint32_t os_cpu = 0;
  std::string nic;
  uint64_t bytes = 0;  // of gradients in a round, of all ranks
};

struct PlanOptions {
  uint32_t cores = 0;  // cores to use; 0: all. Spread over nodes in proportion to their NICs
  uint32_t ranks = 1;  // max_ranks: for queue pairs and memory
  uint32_t chunk_elements = 8192;
  bool shared_memory = true;    // the box's memory is laid out as the workers', by keys
  uint64_t gradient_bytes = 4;  // per element, to compare with `load`
  std::vector<PlanLoad> load = {};
};

struct QueuePlan {  // one (core, NIC) pair; each worker has one queue pair per queue
  uint32_t core = 0;
  uint32_t nic = 0;
};
struct CorePlan {
  uint32_t node = 0;  // index into the topology's nodes
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

// Where every chunk lies, and who handles it.
struct Plan : Layout {
  std::vector<QueuePlan> queues;
  std::vector<CorePlan> cores;
  std::vector<NicPlan> nics;
};

// Throws Error(kInvalid) when the options cannot be met (no keys, more cores than there are, a
// queue with more than kMaxChunksPerQueue chunks). Topologies without NICs (shared memory) get one
// pseudo-NIC "memN" per node, so that there is exactly one queue per core.
Plan make_plan(const numa::Topology& topology, std::span<const KeySpec> keys,
               const PlanOptions& options);

// Which part of the box's arrays belongs to which node, ascending; empty if all cores are on one.
std::vector<NodeRun> node_runs(const Plan& plan);

// Largest part over mean, in bytes, over cores and over NICs (1.0 is perfect).
double core_imbalance(const Plan& plan);
double nic_imbalance(const Plan& plan);

// What a job holds per element, in bytes. Throws Error(kInvalid) on words of `spec` that are
// unknown.
struct ElementBytes {
  uint64_t gradient = 4, parameter = 4;  // as they travel
  uint64_t master = 0;                   // f32 parameters, where those that travel have 16 bits
  uint64_t state = 0;                    // of the optimizer
  bool optimized = false;                // false: the sum itself is written back
};
ElementBytes element_bytes(const JobSpec& spec);

// What a job needs on one node, in bytes, every holder added up.
struct NodeMemory {
  uint32_t os_node = 0;
  uint64_t slots = 0;        // gradients of max_ranks ranks; over shared memory, the workers' own
  uint64_t parameters = 0;   // what is written back
  uint64_t master = 0;       // f32 parameters, where what is written back has 16 bits
  uint64_t state = 0;        // of the optimizer
  uint64_t bookkeeping = 0;  // the plan, the state of every chunk, rings, scratch
  uint64_t total() const { return slots + parameters + master + state + bookkeeping; }
};

// One entry per node in use, ascending. Throws Error(kInvalid) on words of `spec` that are unknown.
std::vector<NodeMemory> memory_needed(const Plan& plan, const JobSpec& spec);

// For people: tables of the NICs, the cores and their queues, and the memory that `spec` needs.
std::string describe(const Plan& plan, const JobSpec& spec);

}  // namespace phub

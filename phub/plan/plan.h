// The plan gives each chunk a core, a queue and a NIC. A pure function of topology, key table and
// options; the same input gives the same plan everywhere.
//
// The core, queue and NIC of a chunk are on one NUMA node (PHub, section 3). Chunks are assigned by
// bytes, largest first, each to the least loaded node and there to the least loaded core (longest
// processing time first). The load of other jobs counts.
//
// A node without a core stays unused, and so does one without a NIC if another node has one. A
// node's share of the bytes is the smaller of its shares of the cores and of the NICs in use. If
// cores and NICs are spread alike, both are balanced; otherwise the largest load is as small as it
// can be.
//
// If it is known which ranks exchange each part of a key (KeySpec::exchanged_by), bytes are those
// of the mean rank: a chunk of half of the ranks counts half.
//
// Several boxes are planned for at once: their nodes follow each other in the topology. Queues of a
// box follow each other, too. If it is known at which machines boxes and ranks are, chunks go home
// first (homes.h).
//
// In a box's memory chunks are ordered by node, queue, and place in the queue; each node's begin
// on a page. Over shared memory the box sums from the workers' memory, which is laid out by keys;
// there the pages of each chunk are placed one by one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "numa/topology.h"
#include "phub/plan/homes.h"
#include "transport/control/job_spec.h"
#include "transport/control/messages.h"
#include "transport/layout.h"

namespace phub {

// The load that a queue already carries for other jobs.
struct PlanLoad {
  uint32_t box = 0;
  uint32_t os_cpu = 0;
  std::string nic;
  uint64_t bytes = 0;  // gradients of all ranks in a round
};

struct PlanOptions {
  uint32_t cores = 0;  // cores to use; 0: all. Spread over nodes in proportion to their NICs
  // Uses at most so many of these or of all: those of `preferred_cpus` (of the first box) first,
  // then the least loaded.
  uint32_t most_cores = ~uint32_t{0};
  std::vector<uint32_t> preferred_cpus = {};
  uint32_t ranks = 1;  // the job's max_ranks; decides about queue pairs and memory
  uint32_t chunk_elements = 8192;
  bool shared_memory = true;  // the box's memory is laid out as the workers', by keys
  // By chunk: the chunks of one unit go to one core. Empty: each goes where it likes.
  std::vector<uint32_t> units = {};
  uint32_t trailer_elements = 0;       // behind each chunk (Layout)
  uint32_t weight_bytes = 0;           // of each slot (Layout)
  std::string gradient_dtype = "f32";  // the format of keys without one of their own
  std::vector<PlanLoad> load = {};
  std::vector<uint64_t> rank_hosts = {};  // JobSpec's; without units
  // Of each rank at a box whose transport takes windows, in bytes; 0: slots of everything.
  uint64_t slot_window = 0;
  bool shares_slots = false;  // Windows::kShared: the chunks of a queue share slots of the window
};

struct QueuePlan {  // one (core, NIC) pair; each worker has one queue pair per queue
  uint32_t core = 0;
  uint32_t nic = 0;
};
struct CorePlan {
  uint32_t node = 0;  // index into the topology's nodes
  uint32_t box = 0;
  uint32_t os_node = 0;
  uint32_t os_cpu = 0;
  uint64_t elements = 0;
  uint64_t gradient_bytes = 0;  // those of the mean rank
  std::vector<uint32_t> queues;
};
struct NicPlan {
  uint32_t node = 0;
  std::string name;
  uint64_t elements = 0;
  uint64_t gradient_bytes = 0;  // those of the mean rank
};

// The place of every chunk, and the core that handles it.
struct Plan : Layout {
  std::vector<uint32_t> tile_rows;  // by key, as KeySpec has them; 0: its chunks are no rows
  std::vector<QueuePlan> queues;
  std::vector<CorePlan> cores;
  std::vector<NicPlan> nics;
  // PlanOptions, for Windows::kPlaces; counts only where slots of everything are larger.
  uint64_t slot_window = 0;
  HomeBytes homes;
};

// Throws Error(kInvalid) if the options cannot be met: no keys, more cores than there are, a queue
// with more than kMaxChunksPerQueue chunks. A topology without NICs (shared memory) gets a
// pseudo-NIC "memN" per node, so that each core has exactly one queue.
Plan make_plan(const numa::Topology& topology, std::span<const KeySpec> keys,
               const PlanOptions& options);

// The bytes of each chunk that the mean rank sends in a round.
std::vector<uint64_t> exchanged_bytes(const Layout& layout, std::span<const KeySpec> keys,
                                      uint32_t ranks);

// One box's part of the plan, as a plan of its own: that box's cores, NICs and queues, renumbered
// from 0; all chunks, of which those of other boxes are in no queue (kElsewhere). REQUIRES: the box
// has queues.
inline constexpr uint32_t kElsewhere = ~uint32_t{0};
Plan part_of(const Plan& plan, uint32_t box);
std::vector<Plan> parts_of(const Plan& plan);             // those of all boxes
uint32_t boxes_of(const Plan& plan);                      // the number of boxes that have a part
uint32_t first_queue_of(const Plan& plan, uint32_t box);  // in the numbers of the whole plan
uint32_t first_core_of(const Plan& plan, uint32_t box);

// The parts of the box's arrays and their nodes, ascending; empty if all cores are on one node.
std::vector<NodeRun> node_runs(const Plan& plan);
// The parts of a rank's slots, in bytes.
std::vector<NodeRun> slot_runs(const Plan& plan);

// The places that each rank has in a core's window (transport/slot_window.h), and the bytes of one;
// no places: it has slots of everything.
struct WindowPlaces {
  uint32_t places = 0;
  uint64_t place_bytes = 0;
};
WindowPlaces window_places(const Plan& plan, const CorePlan& core);

// The largest load in bytes over the mean, of cores and of NICs; 1.0 is perfect.
double core_imbalance(const Plan& plan);
double nic_imbalance(const Plan& plan);

// Bytes that a job holds per element.
struct ElementBytes {
  uint64_t parameter = 4;   // results in memory
  uint64_t difference = 0;  // their differences, if these are sent
  uint64_t master = 0;      // f32 parameters, if results are not these
  uint64_t state = 0;       // the optimizer's, without the scales of 8 bits
  size_t states = 0;        // its arrays
  bool optimized = false;   // false: the sum itself is written back
};
// Throws Error(kInvalid) if a word of `spec` is unknown.
ElementBytes element_bytes(const JobSpec& spec);
// The number of chunks of a core.
uint64_t chunks_on(const Plan& plan, const CorePlan& core);
// The number of ranks for which the job has slots.
uint64_t ranks_of(const JobSpec& spec);

// As text: tables of the NICs, and of the cores with their queues.
std::string describe(const Plan& plan, const JobSpec& spec);

}  // namespace phub

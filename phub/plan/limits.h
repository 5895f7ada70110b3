// The limits of the hardware: for every resource of a box, the bytes that cross it in one round,
// the time that they take, and how many workers it can feed. A pure function of its inputs; no
// constant is fitted.
//
// All resources work at the same time, on different chunks (PHub, section 2), so a round takes at
// least as long as the slowest of them. The results are upper limits of rounds/s: protocol,
// stragglers and bursts are not modelled.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "phub/plan/plan.h"
#include "transport/control/job_spec.h"

namespace phub {

// The default rate of one core, measured with kernels_bench (Memory/nesterov/ranks:8/threads:1) on
// an AMD EPYC of 2.6 GHz. It has little effect while there are enough cores.
inline constexpr double kMeasuredCoreGbS = 24;
inline constexpr const char* kMeasuredCore =
    "GB/s of a core (default: measured, AMD EPYC of 2.6 GHz)";

// 1 Gbit is 10^9 bits and 1 GB is 10^9 bytes. An unknown rate is left out and limits nothing.
struct LimitInputs {
  std::optional<double> link_gbit_s;         // one NIC, each way
  std::optional<double> pcie_gb_s;           // one NIC, each way
  std::optional<double> pcie_node_gb_s;      // all NICs of a node, both ways together
  std::optional<double> memory_gb_s;         // one node, reads and writes together
  std::optional<double> core_gb_s;           // one core: memory it reads and writes
  std::optional<double> worker_link_gbit_s;  // one worker, each way
  std::optional<double> images_per_s;        // a worker that never waits
  std::optional<double> batch;               // images of a worker per round
  bool nics = true;   // false: workers share the box's memory; links and PCIe carry nothing
  bool ddio = false;  // NICs reach gradients and results in the box's caches, not in its memory
};

// Bytes of one round. The resource receives `in`: a NIC from workers, memory from writers, a core
// from memory.
struct Traffic {
  double in = 0, out = 0;
};

struct Limit {
  std::string resource;  // "links", "PCIe", "PCIe of a node", "memory", "cores", "worker links"
  std::string where;     // the part with the most bytes: "nic3", "node 1", "CPU 5", "a worker"
  Traffic per_worker;    // for each worker
  Traffic fixed;         // for any number of workers; below 0: a worker is on the host
  double bytes_per_s = 0;
  bool duplex = false;  // bytes_per_s holds for each direction; false: for the sum of both

  Traffic bytes(double workers) const;
  double seconds(double workers) const;
  // The largest number of workers for which a round takes at most `seconds`; nullopt: any number.
  std::optional<uint64_t> workers_within(double seconds) const;
};

struct Limits {
  uint64_t workers = 0;
  std::vector<Limit> all;            // the resources whose rate is known
  std::vector<std::string> missing;  // options that were not given, and their meaning
  // The rest is set if `all` is not empty.
  size_t binding = 0;  // index of the slowest in `all`
  double seconds = 0;  // the time of a round
  // These are set with images_per_s and batch:
  std::optional<double> wanted_seconds;     // time of a round in which no worker waits
  std::optional<uint64_t> workers_fed;      // nullopt: no known resource limits the number
  std::optional<size_t> feeding_binds;      // index in `all` of the resource that limits it
  std::optional<double> images_per_worker;  // at most, images/s of each of `workers`
};

// Bytes of a round per element of the model: those of a gradient and of a result, and those that a
// core reads and writes besides, for any number of workers: parameters and state.
struct ElementTraffic {
  double gradient = 4, parameter = 4;
  double read = 0, written = 0;
};
// Throws Error(kInvalid) if a word of `spec` is unknown.
ElementTraffic element_traffic(const JobSpec& spec);

// Throws Error(kInvalid), which names the option, if an input is not a positive number or a word of
// `spec` is unknown. In a plan for several boxes each resource counts with the worst part of any
// box.
Limits find_limits(const Plan& plan, const JobSpec& spec, const LimitInputs& inputs);

// A host of those that exchange a job: it serves a part, or a worker runs on it, or both. The
// worker reaches the part on its own host without NICs, and spreads everything else evenly over
// them.
struct Host {
  std::optional<uint32_t> box;  // its number in the plan; nullopt: it serves nothing
  bool worker = false;
  uint32_t nics = 1;   // those that the worker uses
  uint32_t nodes = 1;  // those that have these NICs
};
// The limits of that host: a resource has the bytes of the box and those of the worker. It does not
// use inputs.worker_link_gbit_s. REQUIRES: inputs.nics.
Limits find_limits(const Plan& plan, const Host& host, const JobSpec& spec,
                   const LimitInputs& inputs);
// The bytes that cross all of the host's NICs in a round.
Traffic nic_traffic(const Plan& plan, const Host& host, const JobSpec& spec);

// As text: inputs, the table, the answer, and the assumptions.
std::string describe(const Limits& limits, const LimitInputs& inputs);
// Returns a JSON object.
std::string to_json(const Limits& limits, const LimitInputs& inputs);

}  // namespace phub

// What the hardware allows: for every resource of a box the bytes that cross it in one round, the
// time that they take, and the workers that it can feed. A pure function; nothing in it is fitted.
//
// A round is no shorter than the slowest resource takes for it: all of them work at once, on
// different chunks (PHub, section 2). So these are upper limits of rounds/s; protocol, stragglers
// and bursts come on top.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "phub/plan.h"
#include "transport/job_spec.h"

namespace phub {

// What one core does where nobody says: kernels_bench, Memory/nesterov/ranks:8/threads:1, on an AMD
// EPYC of 2.6 GHz. Measure your own; it has little effect as long as there are enough cores.
inline constexpr double kMeasuredCoreGbS = 24;
inline constexpr const char* kMeasuredCore =
    "GB/s of a core (default: measured, AMD EPYC of 2.6 GHz)";

// 1 Gbit is 10^9 bits and 1 GB is 10^9 bytes. What is not known is left out, and limits nothing.
struct LimitInputs {
  std::optional<double> link_gbit_s;         // of a NIC, each way
  std::optional<double> pcie_gb_s;           // of a NIC, each way
  std::optional<double> pcie_node_gb_s;      // of all NICs of a node, both ways together
  std::optional<double> memory_gb_s;         // of a node, reads and writes together
  std::optional<double> core_gb_s;           // of a core: memory it reads and writes
  std::optional<double> worker_link_gbit_s;  // of a worker, each way
  std::optional<double> images_per_s;        // of a worker that never waits
  std::optional<double> batch;               // images of a worker per round
  bool nics = true;   // false: workers share the box's memory; links and PCIe carry nothing
  bool ddio = false;  // NICs reach gradients and results in the box's caches, not in its memory
};

// Bytes of one round. `in` is what the resource receives: a NIC from workers, memory from writers,
// a core from memory.
struct Traffic {
  double in = 0, out = 0;
};

struct Limit {
  std::string resource;  // "links", "PCIe", "PCIe of a node", "memory", "cores", "worker links"
  std::string where;     // the part with the most bytes: "nic3", "node 1", "CPU 5", "a worker"
  Traffic per_worker;    // grows with the number of workers
  Traffic fixed;         // does not
  double bytes_per_s = 0;
  bool duplex = false;  // bytes_per_s is each way; otherwise of both together

  Traffic bytes(double workers) const;
  double seconds(double workers) const;
  // Most workers that get a round every `seconds`; nothing: any number. 0: not even one.
  std::optional<uint64_t> workers_within(double seconds) const;
};

struct Limits {
  uint64_t workers = 0;
  std::vector<Limit> all;            // those that the inputs suffice for
  std::vector<std::string> missing;  // options that would say more, and what
  size_t binding = 0;                // index into `all`: the slowest. All below: if there is one
  double seconds = 0;                // of a round
  // With images_per_s and batch:
  std::optional<double> wanted_seconds;     // of a round in which no worker waits
  std::optional<uint64_t> workers_fed;      // nothing: nothing that is known limits them
  std::optional<size_t> feeding_binds;      // which limit says so
  std::optional<double> images_per_worker;  // images/s of each of `workers`, at most
};

// Throws Error(kInvalid) that names the option when an input is not a positive number, and on words
// of `spec` that are unknown.
Limits find_limits(const Plan& plan, const JobSpec& spec, const LimitInputs& inputs);

// For people: inputs, the table, the answer, and what was assumed.
std::string describe(const Limits& limits, const LimitInputs& inputs);
// For programs: a JSON object.
std::string to_json(const Limits& limits, const LimitInputs& inputs);

}  // namespace phub

// The machine as the plan sees it: NUMA nodes with their cores and NICs. Plain data, made by hwloc
// from this machine, from a saved XML file or from a synthetic description.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phub::numa {

// A core or NIC without memory of its own is on the nearest node that has memory.
struct Core {
  uint32_t node = 0;    // index into Topology::nodes
  uint32_t os_cpu = 0;  // first processing unit, as the operating system counts
};

struct NicInfo {
  uint32_t node = 0;
  std::string name;  // "mlx5_0", "eth0", "nic3"
};

struct Node {
  uint32_t os_node = 0;
  uint64_t memory_bytes = 0;
  uint32_t box = 0;   // the machine, if several serve together
  uint64_t host = 0;  // its number (host.h); 0: unknown
};

// Hardware that is not where one would look for it, or is left out.
struct Note {
  std::string what;
  std::string todo;      // "" if there is nothing to do
  bool of_nics = false;  // about NICs alone
};

struct Topology {
  std::vector<Node> nodes;  // at least one
  std::vector<Core> cores;  // physical cores this process may run on, grouped by node; at least one
  std::vector<NicInfo> nics;  // may be empty
  std::string source;         // "this machine", "xml FILE", "synthetic …"
  std::vector<Note> notes;    // may be empty
};

// All throw std::runtime_error that names the source and the problem.
Topology this_machine();
Topology from_xml(const std::string& path);
// hwloc's syntax: "pack:2 core:8 pu:1". One NUMA node per package where it speaks of no nodes.
Topology from_synthetic(const std::string& description);

// "this", the name of an XML file (it has a '/' or ends with .xml), or a synthetic description.
Topology find_topology(const std::string& text);

// Replaces the NICs by `count` of them spread evenly over the nodes (for sizing a box).
void set_nics(Topology& topology, uint32_t count);

// Adds a box like `one` behind those in `all`, with this number, on the machine `host` (0:
// unknown).
void append(const Topology& one, uint32_t box, uint64_t host, Topology& all);

std::string describe(const Topology& topology);  // a few lines for people

}  // namespace phub::numa

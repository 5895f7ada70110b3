// Finds the NUMA nodes that are nearest to a part of a machine, in hwloc's terms. Only topology.cc
// uses it, while it converts a topology.
#pragma once

#include <hwloc.h>

#include <cstdint>
#include <map>
#include <vector>

namespace phub::numa {

// Some cores and NICs have no memory of their own: the slots of their processor are empty, this
// process may not use the memory there, or a description leaves it out. Nodes are indices, as hwloc
// counts them. The topology outlives this.
class Nearest {
 public:
  explicit Nearest(hwloc_topology_t topology);

  // The nodes with memory nearest to a core, or to where a NIC is attached; the object is no I/O
  // device. There is at least one, and of several each is as near as the others. `own`: they are
  // the object's own memory; false: they are somewhere else.
  struct Nodes {
    std::vector<uint32_t> nodes;
    bool own = false;
  };
  Nodes of(hwloc_obj_t object);

  // Whether a node has memory that this process may use. If none seems to, all count as if.
  bool has_memory(uint32_t node) const { return has_memory_[node]; }

 private:
  std::vector<uint32_t> in(hwloc_const_nodeset_t nodeset) const;
  const std::vector<uint32_t>& within(hwloc_obj_t object);
  std::vector<uint32_t> by_distance(hwloc_const_nodeset_t nodeset) const;

  std::vector<hwloc_obj_t> nodes_;
  std::vector<bool> has_memory_;
  std::map<uint32_t, uint32_t> by_os_node_;
  std::vector<uint64_t> distances_;  // from each node to each; empty: they are not known
  std::map<hwloc_obj_t, std::vector<uint32_t>> within_;  // the results of within()
};

}  // namespace phub::numa

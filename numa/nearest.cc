#include "numa/nearest.h"

#include <algorithm>
#include <limits>

namespace phub::numa {
namespace {

constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

// Latencies between NUMA nodes, from each to each; empty if the topology has none.
std::vector<uint64_t> distances_of(hwloc_topology_t topology, size_t nodes) {
  unsigned matrices = 1;
  hwloc_distances_s* matrix = nullptr;
  if (hwloc_distances_get_by_type(topology, HWLOC_OBJ_NUMANODE, &matrices, &matrix,
                                  HWLOC_DISTANCES_KIND_MEANS_LATENCY, 0) != 0 ||
      matrices == 0) {
    return {};
  }
  std::vector<uint64_t> distances(nodes * nodes, kUnknown);
  for (unsigned from = 0; from < matrix->nbobjs; from++) {
    for (unsigned to = 0; to < matrix->nbobjs; to++) {
      if (matrix->objs[from] == nullptr || matrix->objs[to] == nullptr) continue;
      const size_t row = matrix->objs[from]->logical_index;
      const size_t column = matrix->objs[to]->logical_index;
      distances[row * nodes + column] = matrix->values[size_t{from} * matrix->nbobjs + to];
    }
  }
  hwloc_distances_release(topology, matrix);
  return distances;
}

bool has_cpus(hwloc_obj_t node) { return hwloc_bitmap_iszero(node->cpuset) == 0; }

// Whether a node's CPUs are all of the other's, and more.
bool is_wider(hwloc_obj_t node, hwloc_obj_t other) {
  return hwloc_bitmap_isincluded(other->cpuset, node->cpuset) != 0 &&
         hwloc_bitmap_isequal(other->cpuset, node->cpuset) == 0;
}

}  // namespace

Nearest::Nearest(hwloc_topology_t topology) {
  const hwloc_const_nodeset_t allowed = hwloc_topology_get_allowed_nodeset(topology);
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    by_os_node_[node->os_index] = static_cast<uint32_t>(nodes_.size());
    nodes_.push_back(node);
    has_memory_.push_back(node->attr->numanode.local_memory > 0 &&
                          hwloc_bitmap_isset(allowed, node->os_index) != 0);
  }
  // Some descriptions do not say how much memory there is.
  if (std::ranges::count(has_memory_, true) == 0) has_memory_.assign(nodes_.size(), true);
  distances_ = distances_of(topology, nodes_.size());
}

std::vector<uint32_t> Nearest::in(hwloc_const_nodeset_t nodeset) const {
  std::vector<uint32_t> found;
  if (by_os_node_.empty()) return found;
  const auto last = static_cast<int>(by_os_node_.rbegin()->first);  // a set may have no end
  for (int bit = hwloc_bitmap_first(nodeset); bit >= 0 && bit <= last;
       bit = hwloc_bitmap_next(nodeset, bit)) {
    const auto at = by_os_node_.find(static_cast<uint32_t>(bit));
    if (at != by_os_node_.end()) found.push_back(at->second);
  }
  return found;
}

// The nodes with memory that an object is in, or that are in it. Memory of other kinds may be
// attached further up, so a node whose CPUs include all of another's is not as near. Nodes without
// CPUs are memory of devices.
const std::vector<uint32_t>& Nearest::within(hwloc_obj_t object) {
  const auto [at, is_new] = within_.try_emplace(object);
  std::vector<uint32_t>& found = at->second;
  if (!is_new) return found;
  found = in(object->nodeset);
  std::erase_if(found, [&](uint32_t n) { return !has_memory_[n] || !has_cpus(nodes_[n]); });
  std::ranges::sort(found);
  const std::vector<uint32_t> all = found;
  std::erase_if(found, [&](uint32_t n) {
    return std::ranges::any_of(all, [&](uint32_t m) { return is_wider(nodes_[n], nodes_[m]); });
  });
  return found;
}

// The nodes with memory next to those without, which are in `nodeset`; empty: it is not known.
std::vector<uint32_t> Nearest::by_distance(hwloc_const_nodeset_t nodeset) const {
  std::vector<uint32_t> found;
  if (distances_.empty()) return found;
  uint64_t least = kUnknown;
  for (const uint32_t from : in(nodeset)) {
    if (has_memory_[from]) continue;
    for (uint32_t to = 0; to < nodes_.size(); to++) {
      const uint64_t distance = distances_[from * nodes_.size() + to];
      if (!has_memory_[to] || !has_cpus(nodes_[to]) || distance == kUnknown) continue;
      if (distance < least) found.clear(), least = distance;
      if (distance == least && std::ranges::count(found, to) == 0) found.push_back(to);
    }
  }
  return found;
}

Nearest::Nodes Nearest::of(hwloc_obj_t object) {
  if (const auto& own = within(object); !own.empty()) return {own, true};
  if (std::vector<uint32_t> near = by_distance(object->nodeset); !near.empty()) return {near};
  for (hwloc_obj_t around = object->parent; around != nullptr; around = around->parent) {
    if (const auto& near = within(around); !near.empty()) return {near};
  }
  Nodes any;  // no node with memory has CPUs
  for (uint32_t n = 0; n < nodes_.size(); n++) {
    if (has_memory_[n]) any.nodes.push_back(n);
  }
  return any;
}

}  // namespace phub::numa

// PageRank with a store (../iterstore/store.h): the ranks are a table, the links are divided among
// all threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/examples/package_graph.h"
#include "worker/iterstore/store.h"

namespace phub::examples {

struct RankedLink {
  uint32_t from = 0, to = 0;
  double share = 0;      // the fraction of its source's rank that it passes on
  double passed_on = 0;  // the source's rank, as far as it was passed on
};

class PageRank {
 public:
  explicit PageRank(const PackageGraph& graph, double damping = 0.85);

  // The table of a store: the part of each vertex's rank above 1 − damping. It begins with zeros.
  static iterstore::TableSpec table(const PackageGraph& graph);
  // The links of one of `parts` parts of about equal size, those of a source next to each other.
  std::vector<RankedLink> links(uint32_t part, uint32_t parts) const;
  // Passes on over each link the change of its source's rank, and clocks. In a virtual iteration it
  // leaves the links as they are.
  void iterate(iterstore::StoreThread& store, std::span<RankedLink> links) const;
  // Turns the table into ranks, whose sum is 1. Vertices without links give theirs to all.
  std::vector<double> ranks(std::span<const std::byte> table) const;

 private:
  const PackageGraph& graph_;
  double damping_;
};

}  // namespace phub::examples

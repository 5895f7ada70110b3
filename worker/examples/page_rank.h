// PageRank with a store (../iterstore/store.h): the ranks are a table, the links are divided among
// all threads. A link passes on the part of its source's rank that its weight is of all weights
// there. A thread reads the ranks of all its sources at once, adds up what goes to each of
// its targets, and updates all of these at once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/examples/readers/graph.h"
#include "worker/iterstore/store.h"

namespace phub::examples {

// A thread's links, and what it computes with.
struct RankedLinks {
  struct Link {
    uint32_t from = 0, to = 0;  // indices of `sources` and `targets`
    double share = 0;           // the fraction of its source's rank that it passes on
  };
  std::vector<Link> links;
  std::vector<uint64_t> sources, targets;  // rows of the table, ascending
  std::vector<double> ranks;               // of the sources
  std::vector<double> passed_on;           // of these, as far as it was passed on
  std::vector<double> received;            // by the targets, in this iteration
};

class PageRank {
 public:
  explicit PageRank(const Graph& graph, double damping = 0.85);

  // The table of a store: the part of each vertex's rank above 1 − damping. It begins with zeros.
  static iterstore::TableSpec table(const Graph& graph);
  // The links of one of `parts` parts of about equal size, those of a source next to each other.
  RankedLinks links(uint32_t part, uint32_t parts) const;
  // Passes on over each link the change of its source's rank, and clocks. A virtual iteration
  // passes on nothing.
  void iterate(iterstore::StoreThread& store, RankedLinks& links) const;
  // How far apart from those of infinitely many iterations the ranks are, as a sum over all nodes,
  // at most; and how many iterations are enough for that.
  double apart_after(uint32_t iterations) const;
  uint32_t iterations_for(double apart) const;
  // Turns the table into ranks, whose sum is 1. Vertices without links give theirs to all.
  std::vector<double> ranks(std::span<const std::byte> table) const;

 private:
  const Graph& graph_;
  double damping_;
};

}  // namespace phub::examples

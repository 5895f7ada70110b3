// Boxes below a root, in the shape of a job's groups.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/box.h"
#include "transport/control/rank_tree.h"

namespace phub::testing {

// A root and a rack for each group of the last level of a tree, with levels between them.
class Racks {
 public:
  // `levels`: of racks, up to those of the tree.
  explicit Racks(const std::string& groups, uint32_t ranks, uint32_t levels = RankTree::kMaxLevels,
                 Box::Uplink uplink = {.transport = "", .nic_bytes_per_s = 0})
      : uplink_(std::move(uplink)) {
    add(groups, ranks, levels);
  }

  Box& root() { return root_; }
  Box& of(uint32_t rank) {
    for (Leaf& leaf : leaves_) {
      if (leaf.ranks.contains(rank)) return *leaf.box;
    }
    throw std::out_of_range("no such rank");
  }
  Flow flow_at_root(const std::string& job) {
    for (const JobStatus& one : root_.status().jobs) {
      if (one.name == job) return one.flow;
    }
    return {};
  }
  // The log of the training's ranks: every rack has that of its own.
  std::vector<LogRecord> log(const std::string& job) {
    std::vector<LogRecord> all;
    for (Leaf& leaf : leaves_) {
      for (LogRecord& record : leaf.box->log(job)) all.push_back(std::move(record));
    }
    return all;
  }

 private:
  struct Leaf {
    RankRange ranks;
    std::unique_ptr<Box> box;
  };

  std::unique_ptr<Box> below(const std::string& parent) const {
    return std::make_unique<Box>("pack:1 core:2 pu:1", uint64_t{1} << 33, Box::Wrap{},
                                 CheckpointOptions{}, parent, nullptr, uplink_);
  }
  // Boxes of the upper levels first: each of the last one has a parent among them.
  void add(const std::string& groups, uint32_t ranks, uint32_t levels) {
    const RankTree tree(groups, ranks);
    std::vector<std::string> parent_of(ranks, root_.address());  // by the training's rank
    const uint32_t first_level = tree.levels() - std::min(levels, tree.levels() - 1);
    for (uint32_t level = first_level; level < tree.levels(); ++level) {
      for (uint32_t first = 0; first < ranks; first = tree.end(level, first)) {
        std::unique_ptr<Box> box = below(parent_of[first]);
        for (uint32_t r = first; r < tree.end(level, first); ++r) parent_of[r] = box->address();
        if (level + 1 == tree.levels()) {
          leaves_.push_back({{first, tree.end(level, first)}, std::move(box)});
        } else {
          between_.push_back(std::move(box));
        }
      }
    }
  }

  const Box::Uplink uplink_;
  Box root_{2};
  std::vector<std::unique_ptr<Box>> between_;
  std::vector<Leaf> leaves_;
};

}  // namespace phub::testing

// Boxes below a parent, with workers: every rank sees the bytes of a process that adds in the order
// of the job's groups alone, as of one box.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"
#include "transport/control/rank_tree.h"

namespace phub {
namespace {

using testing::Box;
using testing::grouped_spec;
using testing::GroupedTraining;
using testing::Results;

// A root and a rack for each group of the last level of a tree, with levels between them.
class Racks {
 public:
  explicit Racks(const std::string& groups, uint32_t ranks) { add(root_.address(), groups, ranks); }

  Box& root() { return root_; }
  Box& of(uint32_t rank) {
    for (Leaf& leaf : leaves_) {
      if (leaf.ranks.contains(rank)) return *leaf.box;
    }
    throw std::out_of_range("no such rank");
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

  static std::unique_ptr<Box> below(const std::string& parent) {
    return std::make_unique<Box>("pack:1 core:2 pu:1", uint64_t{1} << 33, Box::Wrap{},
                                 CheckpointOptions{}, parent);
  }
  // Boxes of the upper levels first: each of the last one has a parent among them.
  void add(const std::string& root, const std::string& groups, uint32_t ranks) {
    const RankTree tree(groups, ranks);
    std::vector<std::string> parent_of(ranks, root);  // by the training's rank
    for (uint32_t level = 1; level < tree.levels(); ++level) {
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

  Box root_{2};
  std::vector<std::unique_ptr<Box>> between_;
  std::vector<Leaf> leaves_;
};

void check(Racks& racks, const GroupedTraining& run) {
  SCOPED_TRACE(
      fmt::format("{}, groups {}, PHUB_SEED={}", run.spec.name, run.spec.groups, run.seed));
  const auto seen = train(run, [&](uint32_t rank) { return racks.of(rank).options(run.spec); });
  const std::vector<Results> want = alone(run, run.spec, racks.log(run.spec.name));
  for (uint32_t rank = 0; rank < run.spec.world_size; ++rank) {
    EXPECT_TRUE(seen[rank] == want) << "rank " << rank;
  }
}

TEST(Racks, TwoRacksGiveTheBytesOfOneBox) {
  Racks racks("2,2", 4);
  check(racks, {.spec = grouped_spec("thin", 4, "2,2")});
}

}  // namespace
}  // namespace phub

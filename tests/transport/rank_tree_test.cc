#include "transport/control/rank_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/worker/expect_error.h"
#include "transport/error.h"

namespace phub {
namespace rank_tree_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<uint32_t> ends(const RankTree& tree, uint32_t level, uint32_t ranks) {
  std::vector<uint32_t> all;
  for (uint32_t rank = 0; rank < ranks; ++rank) all.push_back(tree.end(level, rank));
  return all;
}

TEST(RankTree, WithoutGroupsHasOneLevel) {
  EXPECT_EQ(RankTree().levels(), 1u);
  EXPECT_EQ(RankTree("", 7).levels(), 1u);
}

// What is left when each group of the last level is one rank.
TEST(RankTree, AboveItsLastGroups) {
  const auto above = [](const char* groups, uint32_t ranks) {
    return RankTree(groups, ranks).above_last_groups();
  };
  EXPECT_EQ(above("4,4", 8), "");
  EXPECT_EQ(above("(2,1),(1,2)", 6), "2,2");
  EXPECT_EQ(above("2,(1,2)", 5), "1,2");
  EXPECT_EQ(above("((1,1),(2)),((1,1,1))", 7), "(2,1),(3)");
  EXPECT_EQ(above("((1,1),2),3", 7), "(2,1),(1)");
  EXPECT_THAT(RankTree("2,(1,2)", 5).last_groups(),
              ElementsAre(RankRange{0, 2}, RankRange{2, 3}, RankRange{3, 5}));
}

TEST(RankTree, GroupsOfRanks) {
  const RankTree tree("3,1,2", 6);
  ASSERT_EQ(tree.levels(), 2u);
  EXPECT_THAT(ends(tree, 0, 6), ElementsAre(6, 6, 6, 6, 6, 6));
  EXPECT_THAT(ends(tree, 1, 6), ElementsAre(3, 3, 3, 4, 6, 6));
}

TEST(RankTree, GroupsOfGroups) {
  const RankTree tree("(2,1),(1,2)", 6);
  ASSERT_EQ(tree.levels(), 3u);
  EXPECT_THAT(ends(tree, 0, 6), ElementsAre(6, 6, 6, 6, 6, 6));
  EXPECT_THAT(ends(tree, 1, 6), ElementsAre(3, 3, 3, 6, 6, 6));
  EXPECT_THAT(ends(tree, 2, 6), ElementsAre(2, 2, 3, 4, 6, 6));
}

// A group that is less deep than others is one group on all levels behind it.
TEST(RankTree, GroupsOfDifferentDepths) {
  const RankTree tree("2,((1,1),3),1", 8);
  ASSERT_EQ(tree.levels(), 4u);
  EXPECT_THAT(ends(tree, 1, 8), ElementsAre(2, 2, 7, 7, 7, 7, 7, 8));
  EXPECT_THAT(ends(tree, 2, 8), ElementsAre(2, 2, 4, 4, 7, 7, 7, 8));
  EXPECT_THAT(ends(tree, 3, 8), ElementsAre(2, 2, 3, 4, 7, 7, 7, 8));
}

TEST(RankTree, TheLargestAndTheLongest) {
  EXPECT_EQ(RankTree(std::to_string(kMaxRanks), kMaxRanks).levels(), 2u);
  std::string longest;
  for (uint32_t rank = 0; rank < kMaxRanks; ++rank) longest += rank == 0 ? "((1))" : ",((1))";
  EXPECT_LE(longest.size(), RankTree::kMaxTextBytes);
  const RankTree tree(longest, kMaxRanks);
  EXPECT_EQ(tree.levels(), RankTree::kMaxLevels);
  EXPECT_EQ(tree.end(3, kMaxRanks - 2), kMaxRanks - 1);
  EXPECT_EQ(tree.end(0, 0), kMaxRanks);
}

TEST(RankTree, WhatIsWrongIsShown) {
  constexpr const char* kNumber = "groups: expected a number of ranks, or '('";
  const struct {
    const char* groups;
    std::vector<std::string> says;
  } kCases[] = {
      {",", {kNumber, "at character 1 of ','"}},
      {"4,", {kNumber, "at character 3 of '4,'"}},
      {"4,,4", {kNumber, "at character 3"}},
      {"0,8", {kNumber, "at character 1"}},
      {"4,04", {kNumber, "at character 3"}},
      {"-4,12", {kNumber, "at character 1"}},
      {" 8", {kNumber, "at character 1"}},
      {"()", {kNumber, "at character 2"}},
      {"(4,4", {"expected ',' or ')' at character 5"}},
      {"(4,4))", {"expected ',' or the end at character 6"}},
      {"4(4)", {"expected ',' or the end at character 2"}},
      {"4 4", {"expected ',' or the end at character 2"}},
      {"4x,4", {"expected ',' or the end at character 2", "as in '4,4' or '(2,2),(2,2)'"}},
      {"(((8)))", {"more than 4 levels at character 4"}},
      {"4,3", {"groups: '4,3' has 7 ranks, and max_ranks is 8: it must be all of them"}},
      {"4,5", {"groups: '4,5' has more than 8 ranks, and max_ranks is 8"}},
      {"8,1", {"has more than 8 ranks"}},
      {"99999999999999999999", {"has more than 8 ranks"}},
  };
  for (const auto& [groups, says] : kCases) {
    SCOPED_TRACE(groups);
    const std::string text = testing::error_of(
        ErrorCode::kInvalid, [&levels = groups] { const RankTree tree(levels, 8); });
    for (const std::string& what : says) EXPECT_THAT(text, HasSubstr(what));
  }
}

}  // namespace rank_tree_test
}  // namespace phub

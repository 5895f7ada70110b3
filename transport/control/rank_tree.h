// The order in which the gradients of a round are added, as a job's `groups` says: within a group
// in the order of the ranks, then over the groups, and so on upwards. Groups have consecutive
// ranks, and are written as their sizes:
//
//   ""             no groups: ascending ranks
//   "4,4"          ranks 0 to 3, and 4 to 7
//   "3,1,4"        of different sizes
//   "(4,4),(4,4)"  two groups of two groups of four ranks
//
//   groups = item *("," item)    item = number of ranks | "(" groups ")"
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/wire.h"

namespace phub {

struct RankRange {  // [first, end)
  uint32_t first = 0, end = 0;

  uint32_t size() const { return end - first; }
  bool contains(uint32_t rank) const { return rank >= first && rank < end; }
  friend bool operator==(const RankRange&, const RankRange&) = default;
};

// Level 0 is all ranks; the groups of a level are parts of those of the level before. The ranks of
// a group of the last level are added one after another.
class RankTree {
 public:
  static constexpr uint32_t kMaxLevels = 4;  // so parentheses are at most two deep
  static constexpr size_t kMaxTextBytes = size_t{kMaxRanks} * 6;  // "((1)),"

  RankTree() = default;  // no groups: one level
  // Throws Error(kInvalid) that names the problem and its place: `groups` is not as above, has too
  // many levels, or does not add up to `ranks`.
  RankTree(std::string_view groups, uint32_t ranks);
  static constexpr uint64_t bytes(uint64_t levels, uint64_t ranks) {
    return levels == 1 ? 0 : levels * (sizeof(Ends) + ranks * sizeof(uint16_t));
  }

  uint32_t levels() const { return ends_.empty() ? 1 : static_cast<uint32_t>(ends_.size()); }
  // One past the last rank of the group that the rank is in. REQUIRES: there are groups.
  uint32_t end(uint32_t level, uint32_t rank) const { return ends_[level][rank]; }
  // The groups of the last level, in order: all ranks are in one of them. REQUIRES: there are
  // groups.
  std::vector<RankRange> last_groups() const;
  // As text, the tree that is left when each of these is one rank.
  std::string above_last_groups() const;

 private:
  using Ends = std::vector<uint16_t>;
  static_assert(kMaxRanks <= UINT16_MAX);
  std::vector<Ends> ends_;  // [level][rank]
};

}  // namespace phub

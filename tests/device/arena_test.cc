#include "worker/device/arena.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace phub {
namespace arena_test {

TEST(Arena, TakesTheFirstGapAndKeepsItsAlignment) {
  Arena arena(4 * 256);
  EXPECT_EQ(arena.allocate(1), 0u);
  EXPECT_EQ(arena.allocate(257), 256u);
  EXPECT_EQ(arena.allocate(256), 768u);
  EXPECT_EQ(arena.allocate(1), std::nullopt);
  EXPECT_EQ(arena.release(256), 257u);
  EXPECT_EQ(arena.release(256), std::nullopt);
  EXPECT_EQ(arena.allocate(513), std::nullopt);
  EXPECT_EQ(arena.allocate(512), 256u);
  EXPECT_EQ(arena.used(), 1024u);
}

TEST(Arena, HoldsWhatLiesInsideOneAllocation) {
  Arena arena(2048);
  arena.allocate(300);
  arena.allocate(300);
  EXPECT_TRUE(arena.holds(0, 300));
  EXPECT_TRUE(arena.holds(299, 1));
  EXPECT_FALSE(arena.holds(0, 301));
  EXPECT_FALSE(arena.holds(300, 1));
  EXPECT_FALSE(arena.holds(511, 2));
  EXPECT_TRUE(arena.holds(512 + 100, 200));
  EXPECT_FALSE(arena.holds(1024, 1));
  EXPECT_FALSE(arena.holds(1, SIZE_MAX));
  EXPECT_FALSE(arena.holds(SIZE_MAX, 2));
}

// Against a map of units of 256 bytes.
TEST(Arena, RandomAllocationsNeverOverlapAndGapsAreFound) {
  constexpr size_t kUnits = 64;
  std::mt19937 engine(7);
  Arena arena(kUnits * Arena::kAlignment + 100);
  std::vector<bool> taken(kUnits);
  std::map<size_t, size_t> allocated;
  const auto mark = [&](size_t offset, size_t bytes, bool as) {
    for (size_t unit = offset / 256; unit * 256 < offset + bytes; ++unit) {
      ASSERT_NE(taken.at(unit), as);
      taken[unit] = as;
    }
  };
  for (int step = 0; step < 20000; ++step) {
    size_t largest = 0;
    size_t used = 0;
    for (size_t unit = 0, run = 0; unit < kUnits; ++unit) {
      run = taken[unit] ? 0 : run + 1;
      used += taken[unit] ? 1 : 0;
      largest = std::max(largest, run);
    }
    ASSERT_EQ(arena.largest_free(), largest * 256);
    ASSERT_EQ(arena.used(), used * 256);
    if (engine() % 2 == 0) {
      const size_t bytes = 1 + engine() % (8 * 256);
      const auto offset = arena.allocate(bytes);
      ASSERT_EQ(offset.has_value(), Arena::charge(bytes) <= largest * 256);
      if (!offset) continue;
      mark(*offset, bytes, true);
      allocated[*offset] = bytes;
    } else if (!allocated.empty()) {
      const auto some = std::next(allocated.begin(), engine() % allocated.size());
      ASSERT_EQ(arena.release(some->first), some->second);
      mark(some->first, some->second, false);
      allocated.erase(some);
    }
  }
}

}  // namespace arena_test
}  // namespace phub

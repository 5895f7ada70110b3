// The table of chunks beside one that computes everything anew: random ranks come, go and
// contribute.
#include "phub/core/chunk_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "tests/seeds.h"

namespace phub {
namespace chunk_table_test {

constexpr uint32_t kChunks = 7;

struct Naive {
  std::vector<uint64_t> first_round;        // by rank
  std::vector<std::set<uint32_t>> arrived;  // by chunk

  bool expects(uint32_t rank, uint64_t round) const { return first_round[rank] <= round; }
  uint64_t next_round(uint64_t round) const {
    const uint64_t first = *std::min_element(first_round.begin(), first_round.end());
    return first == kNever ? round + 1 : std::max(first, round + 1);
  }
};

void expect_same(const ChunkTable& table, const Naive& naive) {
  for (uint32_t i = 0; i < kChunks; ++i) {
    uint32_t expected = 0, missing = 0;
    for (uint32_t r = 0; r < table.max_ranks(); ++r) {
      const bool expects = naive.expects(r, table[i].round);
      const bool lacks = expects && !naive.arrived[i].contains(r);
      expected += expects;
      missing += lacks;
      ASSERT_EQ((table.lacking(i, r / 64) >> (r % 64)) & 1, lacks) << "rank " << r;
    }
    ASSERT_EQ(table[i].expected, expected);
    ASSERT_EQ(table[i].missing, missing);
    ASSERT_EQ(table[i].arrived, naive.arrived[i].size());
  }
  uint64_t latest = 1;
  for (const uint64_t first : naive.first_round) {
    if (first != kNever) latest = std::max(latest, first);
  }
  const bool settled =
      std::all_of(table.chunks().begin(), table.chunks().end(),
                  [latest](const CoreChunk& chunk) { return chunk.round >= latest; });
  ASSERT_EQ(ChunkTable(table).settled(), settled);
}

TEST(ChunkTable, KnowsWhoIsExpectedAndWhoHasArrived) {
  const testing::Seeds seeds = testing::fresh_seeds(50);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&random](uint64_t end) { return random() % end; };
    const auto ranks = static_cast<uint32_t>(1 + below(140));
    std::vector<uint32_t> first;
    Naive naive{.first_round = std::vector<uint64_t>(ranks, kNever),
                .arrived = std::vector<std::set<uint32_t>>(kChunks)};
    for (uint32_t r = 0; r < ranks; r += 1 + static_cast<uint32_t>(below(3))) {
      first.push_back(r);
      naive.first_round[r] = 1;
    }
    ChunkTable table(std::vector<CoreChunk>(kChunks), 1, ranks, first);
    for (uint32_t i = 0; i < kChunks; ++i) table.begin_round(i, below(2));
    for (int step = 0; step < 200; ++step) {
      const auto index = static_cast<uint32_t>(below(kChunks));
      const auto rank = static_cast<uint32_t>(below(ranks));
      const uint64_t round = table[index].round;
      if (below(10) ==
          0) {  // a boundary: the rank goes, or comes in a round that no chunk has begun
        uint64_t next = 0;
        for (const CoreChunk& chunk : table.chunks()) next = std::max(next, chunk.round + 1);
        naive.first_round[rank] = naive.first_round[rank] == kNever ? next + below(2) : kNever;
        table.expect(rank, naive.first_round[rank]);
      } else if (below(8) == 0) {
        ASSERT_EQ(table.next_round(index, round), naive.next_round(round));
        table.begin_round(index, table.next_round(index, round));
        naive.arrived[index].clear();
      } else if (naive.expects(rank, round)) {
        if (naive.arrived[index].insert(rank).second) {
          table.mark(rank, index, below(2) == 0);
        } else {
          table.unmark(rank, index);
          naive.arrived[index].erase(rank);
        }
      }
      ASSERT_NO_FATAL_FAILURE(expect_same(table, naive));
    }
  }
}

}  // namespace chunk_table_test
}  // namespace phub

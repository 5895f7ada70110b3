// Which parts of ranks a snapshot needs, and what makes it void: an oracle that knows every stay
// says the same.
#include "phub/job/rank_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/seeds.h"

namespace phub {
namespace rank_parts_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kRound = 10;

class RankPartsTest : public ::testing::Test {
 protected:
  RankPartsTest() { parts_.begin(kRound); }
  void send(uint32_t rank, uint64_t bytes = 3) {
    parts_.coming({.whose = rank, .round = kRound, .all = 3}, bytes);
    parts_.written(rank, bytes);
  }
  RankParts parts_;
};

TEST_F(RankPartsTest, NothingIsCompleteBeforeAllIsKnown) {
  const std::vector<SaverStay> savers = {{.rank = 1, .first = 4}, {.rank = 2, .first = 11}};
  send(1);
  parts_.judge(savers, false);
  EXPECT_FALSE(parts_.complete());
  EXPECT_TRUE(parts_.needs_any());
  parts_.judge(savers, true);
  EXPECT_TRUE(parts_.complete()) << "rank 2 begins in a later round";
  parts_.end();
  EXPECT_TRUE(parts_.complete()) << "there is none to wait for";
}

TEST_F(RankPartsTest, WhatIsMissingIsAwaitedAndWhatIsLostMakesItVoid) {
  send(1);
  send(2, 2);
  parts_.judge({{.rank = 1}, {.rank = 2}, {.rank = 3}}, true);
  EXPECT_THAT(parts_.awaited(), ElementsAre(2, 3));
  EXPECT_EQ(parts_.why_void(), "");
  parts_.judge({{.rank = 1, .last = 12}, {.rank = 2}, {.rank = 3, .last = 9}}, true);
  EXPECT_THAT(parts_.awaited(), ElementsAre(2)) << "rank 3 did not take part";
  EXPECT_EQ(parts_.why_void(), "") << "rank 1 has sent its part";
  parts_.judge({{.rank = 1, .last = 12}, {.rank = 2, .last = kRound}}, false);
  EXPECT_THAT(parts_.why_void(), HasSubstr("rank 2 was lost before it had sent its part"));
}

TEST_F(RankPartsTest, APartOfWhoTookNoPartMakesItVoid) {
  send(1);
  parts_.judge({{.rank = 1, .last = 9}}, false);
  EXPECT_EQ(parts_.why_void(), "") << "another stay of it may not be known yet";
  parts_.judge({{.rank = 1, .last = 9}}, true);
  EXPECT_THAT(parts_.why_void(), HasSubstr("rank 1 has sent its part of a round"));
}

TEST_F(RankPartsTest, ARackThatSaidNothingMakesItVoidForItsRoundsOnly) {
  send(7);
  parts_.judge({{.rank = 7}, {.rank = 4, .first = 11, .last = 14, .unknown = true}}, true);
  EXPECT_EQ(parts_.why_void(), "");
  EXPECT_TRUE(parts_.complete());
  parts_.judge({{.rank = 7}, {.rank = 4, .first = 8, .last = 10, .unknown = true}}, false);
  EXPECT_THAT(parts_.why_void(), HasSubstr("the rack of rank 4 was lost"));
}

// Stays of a rank follow each other; some of it was sent, some of that is written.
TEST(RankParts, IsAsAnyHistorySays) {
  const auto seeds = testing::fresh_seeds(200);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937_64 random(seed);
    RankParts parts;
    parts.begin(kRound);
    std::vector<SaverStay> savers;
    bool is_void = false, is_complete = true;
    for (uint32_t rank = 0; rank < 1 + seed % 6; ++rank) {
      bool took_part = false, is_there = false;
      for (uint64_t first = 1 + random() % 8; first <= 14; first += 1 + random() % 3) {
        const bool stays = random() % 3 == 0;
        const uint64_t last = first + random() % 6;
        savers.push_back({.rank = rank, .first = first, .last = stays ? 0 : last});
        if (first <= kRound && (stays || last >= kRound)) {
          took_part = true;
          is_there = stays;
        }
        if (stays) break;
        first = last;
      }
      const uint64_t sent = took_part || random() % 20 == 0 ? random() % 4 : 0;
      const uint64_t written = sent > 0 ? sent - random() % 2 : 0;
      if (sent > 0) parts.coming({.whose = rank, .round = kRound, .all = 3}, sent);
      if (written > 0) parts.written(rank, written);
      is_void |= took_part ? !is_there && sent < 3 : sent > 0;
      is_complete &= took_part ? written == 3 : sent == 0;
    }
    std::ranges::shuffle(savers, random);
    parts.judge(savers, true);
    EXPECT_EQ(parts.why_void() != "", is_void) << "PHUB_SEED=" << seed << ": " << parts.why_void();
    if (is_void) continue;
    EXPECT_EQ(parts.complete(), is_complete) << "PHUB_SEED=" << seed;
  }
}

}  // namespace rank_parts_test
}  // namespace phub

#include "tests/oracle/participation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/error.h"

namespace phub {
namespace participation_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Kind = LogRecord::Kind;

LogRecord admitted(uint32_t rank, uint32_t incarnation, uint64_t round) {
  return {.kind = Kind::kAdmitted, .round = round, .rank = rank, .incarnation = incarnation};
}
LogRecord gone(Kind kind, uint32_t rank, uint32_t incarnation, std::vector<ChunkRange> last) {
  return {.kind = kind, .rank = rank, .incarnation = incarnation, .last_rounds = std::move(last)};
}
// Whose gradients count.
std::vector<uint32_t> ranks(const Participation& participation, uint64_t round, uint32_t chunk) {
  std::vector<uint32_t> ranks;
  for (const Member& member : participation.members(round, chunk)) {
    if (!participation.excluded(round, chunk, member.rank)) ranks.push_back(member.rank);
  }
  return ranks;
}
std::string error_of(const std::vector<LogRecord>& log) {
  try {
    Participation(log, 4);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(Participation, RanksTakePartFromTheirFirstRoundOn) {
  const std::vector<LogRecord> log = {admitted(2, 1, 1), admitted(0, 1, 1), admitted(1, 1, 5)};
  const Participation participation(log, 4);
  EXPECT_THAT(ranks(participation, 1, 0), ElementsAre(0, 2));
  EXPECT_THAT(ranks(participation, 4, 3), ElementsAre(0, 2));
  EXPECT_THAT(ranks(participation, 5, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(ranks(participation, 1'000'000, 3), ElementsAre(0, 1, 2));
}

TEST(Participation, ALostRankEndsInADifferentRoundOfEachChunk) {
  const std::vector<LogRecord> log = {admitted(0, 1, 1), admitted(1, 1, 1),
                                      gone(Kind::kLost, 1, 1, {{0, 1, 7}, {2, 2, 6}, {3, 3, 0}}),
                                      admitted(1, 2, 9)};
  const Participation participation(log, 4);
  EXPECT_THAT(ranks(participation, 7, 0), ElementsAre(0, 1));
  EXPECT_THAT(ranks(participation, 7, 1), ElementsAre(0, 1));
  EXPECT_THAT(ranks(participation, 7, 2), ElementsAre(0));
  EXPECT_THAT(ranks(participation, 6, 2), ElementsAre(0, 1));
  EXPECT_THAT(ranks(participation, 1, 3), ElementsAre(0));
  for (uint32_t chunk = 0; chunk < 4; ++chunk) {
    EXPECT_THAT(ranks(participation, 8, chunk), ElementsAre(0));
    EXPECT_THAT(ranks(participation, 9, chunk), ElementsAre(0, 1));
  }
}

TEST(Participation, ARankThatNeverCameTakesNoPart) {
  const std::vector<LogRecord> log = {admitted(0, 1, 1), gone(Kind::kLost, 1, 0, {{0, 3, 0}})};
  EXPECT_THAT(ranks(Participation(log, 4), 1, 0), ElementsAre(0));
}

TEST(Participation, LeavingIsLikeBeingLost) {
  const std::vector<LogRecord> log = {admitted(0, 1, 1), gone(Kind::kLeft, 0, 1, {{0, 3, 12}})};
  const Participation participation(log, 4);
  EXPECT_THAT(ranks(participation, 12, 3), ElementsAre(0));
  EXPECT_THAT(ranks(participation, 13, 3), IsEmpty());
}

TEST(Participation, ExclusionIsOfOneRankChunkAndRound) {
  const std::vector<LogRecord> log = {admitted(0, 1, 1),
                                      admitted(1, 1, 1),
                                      {.kind = Kind::kExcluded,
                                       .round = 3,
                                       .rank = 1,
                                       .incarnation = 1,
                                       .last_round = 4,
                                       .chunks = {{2, 3}}}};
  const Participation participation(log, 5);
  EXPECT_THAT(ranks(participation, 3, 2), ElementsAre(0));
  EXPECT_THAT(ranks(participation, 4, 3), ElementsAre(0));
  EXPECT_THAT(ranks(participation, 5, 2), ElementsAre(0, 1));
  EXPECT_THAT(ranks(participation, 3, 4), ElementsAre(0, 1));
  EXPECT_THAT(ranks(participation, 3, 1), ElementsAre(0, 1));
  EXPECT_THAT(ranks(participation, 2, 2), ElementsAre(0, 1));
}

// A chunk keeps what it had when its job went on from a checkpoint; that is not counted again.
TEST(Participation, RoundsThatAreDoneAgainAreThePredecessors) {
  std::vector<LogRecord> log = {admitted(0, 1, 1), gone(Kind::kLost, 0, 1, {{0, 2, 7}, {3, 3, 9}}),
                                admitted(0, 2, 8), gone(Kind::kLost, 0, 2, {{0, 3, 8}}),
                                admitted(0, 3, 9)};
  EXPECT_THAT(error_of(log), HasSubstr("incarnation 1 is in round 9 of chunk 3"));
  log[1].reason = "the job went on from its checkpoint";
  const Participation participation(log, 4);
  const auto incarnation = [&](uint64_t round, uint32_t chunk) {
    const std::vector<Member> members = participation.members(round, chunk);
    return members.size() == 1 ? members[0].incarnation : 0;
  };
  EXPECT_EQ(incarnation(7, 0), 1u);
  EXPECT_EQ(incarnation(8, 0), 2u);
  EXPECT_EQ(incarnation(9, 0), 3u);
  for (const uint64_t round : {7, 8, 9}) EXPECT_EQ(incarnation(round, 3), 1u) << round;
  EXPECT_EQ(incarnation(10, 3), 3u);
  EXPECT_TRUE(participation.stays()[1].repeats(8, 3));
  EXPECT_FALSE(participation.stays()[1].repeats(8, 0));
  EXPECT_EQ(participation.stays()[0].checkpoint, 7u);  // of which chunk 3 has more
  EXPECT_EQ(participation.stays()[1].checkpoint, ~uint64_t{0});
}

TEST(Participation, AContradictionIsNamed) {
  EXPECT_EQ(error_of({admitted(0, 1, 1)}), "no error");
  EXPECT_THAT(error_of({admitted(0, 1, 1), admitted(0, 2, 5)}),
              HasSubstr("record 1: rank 0 is admitted while its incarnation 1 is still there"));
  EXPECT_THAT(error_of({gone(Kind::kLost, 3, 1, {{0, 3, 1}})}),
              HasSubstr("record 0: rank 3, incarnation 1 goes but was not there"));
  EXPECT_THAT(error_of({admitted(0, 1, 1), gone(Kind::kLost, 0, 1, {{0, 1, 4}, {2, 3, 5}}),
                        admitted(0, 2, 5)}),
              HasSubstr("incarnation 1 is in round 5 of chunk 2"));
  for (const std::vector<ChunkRange>& ranges : {std::vector<ChunkRange>{},
                                                {{0, 2, 1}},
                                                {{0, 4, 1}},
                                                {{0, 1, 1}, {3, 3, 1}},
                                                {{0, 2, 1}, {2, 3, 1}},
                                                {{0, 1, 1}, {2, 1, 1}}}) {
    EXPECT_THAT(error_of({admitted(0, 1, 1), gone(Kind::kLost, 0, 1, ranges)}),
                HasSubstr("record 1: rank 0"));
  }
}

}  // namespace participation_test
}  // namespace phub

// A rack's membership at its parent, whose answers the test gives.
#include "phub/job/uplink.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/phub/fake_parent.h"

namespace phub {
namespace uplink_test {

using ::testing::ElementsAre;
using testing::FakeParent;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::SetClock;
using testing::take;

class UplinkTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kLease = 400, kLongestRound = 20 * kLease;

  UplinkTest() {
    JoinRequest request{.id = "one"};
    request.spec.name = "job";
    request.spec.lease_ms = kLease;
    time_.begin_round(kLongestRound);
    uplink_ = std::make_shared<Uplink>(parent_, time_, request);
    uplink_->join([this](const Result<Done>& result) {
      joined_ = result ? "joined" : std::string(name_of(result.code)) + ": " + result.message;
    });
  }
  void admit() {
    JoinReply reply{.rank = 1, .incarnation = 3, .first_round = 7};
    reply.offer.ticket = "ticket";
    take(parent_.joins)(reply);
    ASSERT_EQ(joined_, "joined");
    take(parent_.beats)(Pulse{});  // over the connection whose end is the rack's
    uplink_->on_end([this](const Error& why) {
      ended_ = std::string(name_of(why.code())) + ": " + why.what();
    });
  }
  void pass(uint64_t ms) {
    clock_.now += ms;
    time_.begin_round(kLongestRound);
    uplink_->tick();
  }
  void set_hyper(Reply<HyperReply> reply) {
    uplink_->ask(std::move(reply), [](Parent& parent, const Credential& who, auto answer) {
      parent.set_hyper(who, {}, answer);
    });
  }

  SetClock clock_;
  ServedTime time_{clock_};
  FakeParent parent_;
  std::shared_ptr<Uplink> uplink_;
  std::string joined_, ended_;
};

TEST_F(UplinkTest, ARankThatIsStillTakenIsAskedForAgainWithTheSameId) {
  take(parent_.joins)({ErrorCode::kTaken, "taken"});
  EXPECT_EQ(joined_, "");
  pass(10);
  EXPECT_TRUE(parent_.joins.empty());
  pass(50);
  admit();
  EXPECT_THAT(parent_.ids, ElementsAre("one", "one"));
  EXPECT_EQ(uplink_->admission().first_round, 7u);
}

TEST_F(UplinkTest, OneThatStaysTakenIsRefused) {
  for (uint32_t i = 0; i < 100 && joined_.empty(); ++i) {
    take(parent_.joins)({ErrorCode::kTaken, "taken"});
    pass(50);
  }
  EXPECT_EQ(joined_, "taken: the parent at root:7717: taken");
  EXPECT_LE(clock_.now, 1000 + 2 * kLease + 100);
}

TEST_F(UplinkTest, ARefusalIsPassedOn) {
  take(parent_.joins)({ErrorCode::kMismatch, "another job"});
  EXPECT_EQ(joined_, "mismatch: the parent at root:7717: another job");
  pass(10 * kLease);
  EXPECT_TRUE(parent_.joins.empty());
  EXPECT_THAT(parent_.forgotten, IsEmpty());
}

TEST_F(UplinkTest, ItKeepsItsLease) {
  admit();
  pass(kLease / 4 - 1);
  EXPECT_TRUE(parent_.beats.empty());
  pass(1);
  ASSERT_EQ(parent_.beats.size(), 1u);
  pass(kLease);
  EXPECT_EQ(parent_.beats.size(), 1u) << "one at a time";
  take(parent_.beats)(Pulse{.durable_round = 12});
  EXPECT_EQ(uplink_->pulse().durable_round, 12u);
  pass(kLease / 4);
  EXPECT_EQ(parent_.beats.size(), 1u);
}

TEST_F(UplinkTest, AParentThatIsSilentForTwoLeasesIsLost) {
  admit();
  for (uint32_t i = 0; i < 100 && ended_.empty(); ++i) {
    pass(20);
    if (!parent_.beats.empty()) take(parent_.beats)({ErrorCode::kUnavailable, "nobody there"});
  }
  EXPECT_THAT(ended_, HasSubstr("unavailable: the parent at root:7717: it has not answered for"));
  EXPECT_LE(clock_.now, 1000 + 2 * kLease + 40);
  EXPECT_THAT(parent_.forgotten, ElementsAre(3u));
}

TEST_F(UplinkTest, WhatTheParentsJobEndedWithIsPassedOn) {
  admit();
  pass(kLease / 4);
  take(parent_.beats)({ErrorCode::kRankLost, "rank 2 was lost"});
  EXPECT_EQ(ended_, "rank_lost: the parent at root:7717: rank 2 was lost");
  EXPECT_EQ(std::string(uplink_->ended()->what()), "the parent at root:7717: rank 2 was lost");
  pass(kLease);
  EXPECT_TRUE(parent_.beats.empty());
}

TEST_F(UplinkTest, ARackThatIsOutIsLost) {
  admit();
  pass(kLease / 4);
  take(parent_.beats)({ErrorCode::kFenced, "rank 1 is out"});
  EXPECT_THAT(ended_, HasSubstr("rank_lost: "));
}

TEST_F(UplinkTest, ACheckIsAnsweredByAHeartbeatThatFollowsIt) {
  admit();
  pass(kLease / 4);
  int checked = 0;
  uplink_->check([&] { ++checked; });
  take(parent_.beats)(Pulse{});  // it was on its way before
  EXPECT_EQ(checked, 0);
  take(parent_.beats)({ErrorCode::kTimeout, "later"});
  EXPECT_EQ(checked, 0);
  EXPECT_TRUE(parent_.beats.empty()) << "not again at once";
  pass(50);
  take(parent_.beats)(Pulse{});
  EXPECT_EQ(checked, 1);
  uplink_->check([&] { ++checked; });
  take(parent_.beats)({ErrorCode::kNonFinite, "a NaN"});
  EXPECT_EQ(checked, 1);
  EXPECT_THAT(ended_, HasSubstr("a NaN"));
}

TEST_F(UplinkTest, TheBarrierOfAllItsRanksIsOneOfTheParents) {
  admit();
  int passed = 0;
  for (int rank = 0; rank < 3; ++rank) {
    uplink_->barrier([&](const Result<Done>& result) { passed += result ? 1 : 100; });
  }
  EXPECT_EQ(parent_.barriers.size(), 1u);
  take(parent_.barriers)(Done{});
  EXPECT_EQ(passed, 3);
  uplink_->barrier([&](const Result<Done>& result) { passed += result ? 1 : 100; });
  pass(kLease / 4);
  take(parent_.beats)({ErrorCode::kNotFound, "gone"});
  EXPECT_EQ(passed, 103) << "whoever waits when it ends is told";
}

TEST_F(UplinkTest, NewsAreToldOnce) {
  admit();
  uplink_->tell({.live = {4, 5}});
  uplink_->tell({.live = {4}});
  ASSERT_EQ(parent_.told.size(), 1u) << "one at a time";
  EXPECT_EQ(parent_.told[0].name, "rack-1");
  EXPECT_THAT(parent_.told[0].live, ElementsAre(4, 5));
  take(parent_.tells)(Done{});
  uplink_->tell({.live = {4, 5}});
  EXPECT_EQ(parent_.told.size(), 1u);
  uplink_->tell({.live = {4}});
  EXPECT_EQ(parent_.told.size(), 2u);
  take(parent_.tells)({ErrorCode::kTimeout, "lost"});
  uplink_->tell({.live = {4}});
  EXPECT_EQ(parent_.told.size(), 3u) << "it may not have come";
}

TEST_F(UplinkTest, ItLeavesAndIsForgotten) {
  admit();
  uplink_->leave();
  EXPECT_THAT(parent_.forgotten, IsEmpty());
  take(parent_.leaves)(Done{});
  EXPECT_THAT(parent_.forgotten, ElementsAre(3u));
  uplink_.reset();
  EXPECT_EQ(parent_.forgotten.size(), 1u);
}

// What it says last of ranks that save goes before.
TEST_F(UplinkTest, ThatRanksSaveIsKnownWhenTheParentHasAnswered) {
  admit();
  EXPECT_FALSE(uplink_->has_told_of_savers());
  RackNews news{.saves = true, .known_round = 6, .savers = {{.rank = 4, .first = 2}}};
  uplink_->tell(news);
  take(parent_.tells)({ErrorCode::kUnavailable, "try again"});
  EXPECT_FALSE(uplink_->has_told_of_savers());
  uplink_->tell(news);
  take(parent_.tells)(Done{});
  EXPECT_TRUE(uplink_->has_told_of_savers());
  uplink_->tell(news);
  EXPECT_EQ(parent_.told.size(), 2u) << "nothing is new";
  news.savers[0].last = 7;
  uplink_->tell(news);
  EXPECT_EQ(parent_.told.size(), 3u);
  news.known_round = 9;
  uplink_->leave(news);
  ASSERT_EQ(parent_.told.size(), 4u);
  EXPECT_EQ(parent_.told.back().known_round, 9u);
  EXPECT_EQ(parent_.leaves.size(), 1u);
}

TEST_F(UplinkTest, PiecesOfPartsGoUpUnderTheirRanks) {
  admit();
  std::vector<std::string> answers;
  const Reply<Done> sent = [&](const Result<Done>& r) {
    answers.push_back(r ? "there" : r.message);
  };
  uplink_->ask(sent, [](Parent& parent, const Credential& who, auto answer) {
    parent.send_part(who, {.whose = 5, .round = 8, .offset = 3, .all = 7}, "piece", answer);
  });
  const Reply<PartBytes> read = [&](const Result<PartBytes>& r) {
    answers.push_back(r ? r.value->bytes : r.message);
  };
  uplink_->ask(read, [](Parent& parent, const Credential& who, auto answer) {
    parent.restored_part(who, 4, 2, answer);
  });
  ASSERT_EQ(parent_.sent.size(), 1u);
  EXPECT_EQ(parent_.sent[0].whose, 5u);
  EXPECT_EQ(parent_.sent[0].offset, 3u);
  take(parent_.writes)(Done{});
  take(parent_.reads)(PartBytes{"bytes"});
  EXPECT_THAT(answers, ElementsAre("there", "bytes"));
}

TEST_F(UplinkTest, WhyItCannotGoOnIsTold) {
  admit();
  uplink_->abandon("rank 5 was lost");
  uplink_.reset();
  ASSERT_EQ(parent_.told.size(), 1u);
  EXPECT_EQ(parent_.told[0].failure, "rank 5 was lost");
  EXPECT_THAT(parent_.forgotten, IsEmpty());
  take(parent_.tells)(Done{});
  EXPECT_THAT(parent_.forgotten, ElementsAre(3u));
}

// Its job is gone: nobody is there to be told.
TEST_F(UplinkTest, AnswersThatComeTooLateChangeNothing) {
  admit();
  pass(kLease / 4);
  bool answered = false;
  set_hyper([&](const Result<HyperReply>&) { answered = true; });
  uplink_.reset();
  EXPECT_THAT(parent_.forgotten, ElementsAre(3u));
  take(parent_.beats)({ErrorCode::kRankLost, "too late"});
  take(parent_.hypers)(HyperReply{});
  EXPECT_FALSE(answered);
  EXPECT_EQ(ended_, "");
}

// A virtual machine that is moved to another host: the parent knows whether it has lost the rack.
TEST_F(UplinkTest, ABoxThatStandsStillAsksFirst) {
  admit();
  time_.begin_round(kLease / 2);
  clock_.now += 1000 * kLease;
  time_.begin_round(kLease / 2);
  uplink_->tick();
  EXPECT_EQ(ended_, "");
  take(parent_.beats)(Pulse{});
  EXPECT_EQ(ended_, "");
}

// Whoever asked waits for an answer.
TEST_F(UplinkTest, WhatTheParentHasNotAnsweredIsRefusedAtTheEnd) {
  admit();
  std::vector<std::string> answers;
  set_hyper([&](const Result<HyperReply>& r) { answers.push_back(r.message); });
  const Reply<CheckpointReply> saved = [&](const Result<CheckpointReply>& r) {
    answers.push_back(r.message);
  };
  uplink_->ask(saved, [](Parent& parent, const Credential& who, auto answer) {
    parent.checkpoint(who, {}, answer);
  });
  pass(kLease / 4);
  take(parent_.beats)({ErrorCode::kRankLost, "over"});
  EXPECT_THAT(answers, ElementsAre(HasSubstr("over"), HasSubstr("over")));
  take(parent_.hypers)(HyperReply{});
  take(parent_.checkpoints)(CheckpointReply{});
  EXPECT_EQ(answers.size(), 2u);
}

TEST_F(UplinkTest, WhatTheParentHasNotAnsweredIsRefusedWhenAllHaveLeft) {
  admit();
  std::vector<ErrorCode> answers;
  set_hyper([&](const Result<HyperReply>& r) { answers.push_back(r.code); });
  uplink_->barrier([&](const Result<Done>& r) { answers.push_back(r.code); });
  uplink_->leave();
  EXPECT_THAT(answers, ElementsAre(ErrorCode::kNotFound, ErrorCode::kNotFound));
}

}  // namespace uplink_test
}  // namespace phub

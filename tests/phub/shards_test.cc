// The mail between a server and its shards: nothing is lost, and nothing counts twice.
#include "phub/job/shards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "phub/background.h"
#include "phub/job/remote_parts.h"
#include "transport/error.h"

namespace phub {
namespace shards_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr uint32_t kLeaseMs = 4000;

class ShardsTest : public ::testing::Test {
 protected:
  struct Answer {
    std::optional<ShardOrders> orders;
    std::vector<uint64_t> jobs() const {
      std::vector<uint64_t> jobs;
      for (const ShardOrder& order : orders->orders) jobs.push_back(order.job);
      return jobs;
    }
  };
  uint64_t join(const char* name = "box", uint64_t now = 0) {
    ShardHello hello;
    hello.name = name;
    const ShardWelcome welcome = shards_.join(hello, now);
    EXPECT_EQ(welcome.lease_ms, kLeaseMs);
    return welcome.shard;
  }
  static ShardReport report(uint64_t job) { return {.kind = ShardSays::kActive, .job = job}; }
  // The numbers of the jobs of the reports that are new.
  std::vector<uint64_t> mail(uint64_t shard, ShardMail mail, Answer* answer = nullptr,
                             uint64_t now = 0) {
    std::vector<uint64_t> jobs;
    const auto reply = [answer](Result<ShardOrders> result) {
      ASSERT_TRUE(result);
      if (answer == nullptr) return;
      ASSERT_FALSE(answer->orders) << "answered twice";
      answer->orders = *result.value;
    };
    for (const ShardReport& report : shards_.mail(shard, std::move(mail), reply, now)) {
      jobs.push_back(report.job);
    }
    return jobs;
  }

  Shards shards_{kLeaseMs};
};

TEST_F(ShardsTest, OrdersComeUntilTheyWereReceived) {
  const uint64_t box = join();
  for (uint64_t job = 1; job <= 3; ++job) shards_.send(box, {.kind = ShardDo::kHold, .job = job});
  Answer first, again, rest;
  mail(box, {.wait = true}, &first);
  EXPECT_THAT(first.jobs(), ElementsAre(1, 2, 3));
  mail(box, {.received = 0, .wait = true}, &again);  // the answer was lost
  EXPECT_THAT(again.jobs(), ElementsAre(1, 2, 3));
  mail(box, {.received = 2, .wait = true}, &rest);
  EXPECT_EQ(rest.orders->first, 2u);
  EXPECT_THAT(rest.jobs(), ElementsAre(3));
}

// What they say of who touches what: an answer has a limit, and one that is longer comes alone.
TEST_F(ShardsTest, LargeOrdersComeInSeveralAnswers) {
  const uint64_t box = join();
  for (uint64_t job = 1; job <= 5; ++job) {
    const std::vector<ElementRange> ranges((job == 3 ? 250'000 : 80'000), {.begin = 0, .end = 1});
    shards_.send(
        box, {.kind = ShardDo::kAdmit, .job = job, .interest = {{.key = "k", .writes = ranges}}});
  }
  Answer first, second, third;
  mail(box, {.wait = true}, &first);
  EXPECT_THAT(first.jobs(), ElementsAre(1, 2));
  mail(box, {.received = 2, .wait = true}, &second);
  EXPECT_THAT(second.jobs(), ElementsAre(3));
  mail(box, {.received = 3, .wait = true}, &third);
  EXPECT_THAT(third.jobs(), ElementsAre(4, 5));
}

TEST_F(ShardsTest, WhoWaitsIsAnsweredByTheNextOrderOrInTime) {
  const uint64_t box = join();
  Answer order, nothing;
  mail(box, {.wait = true}, &order);
  EXPECT_FALSE(order.orders);
  shards_.send(box, {.kind = ShardDo::kHold, .job = 7});
  ASSERT_TRUE(order.orders);
  EXPECT_THAT(order.jobs(), ElementsAre(7));
  mail(box, {.received = 1, .wait = true}, &nothing, 1000);
  EXPECT_THAT(shards_.tick(1000 + kLeaseMs / 3 - 1), IsEmpty());
  EXPECT_FALSE(nothing.orders);
  EXPECT_THAT(shards_.tick(1000 + kLeaseMs / 3), IsEmpty());
  ASSERT_TRUE(nothing.orders);
  EXPECT_THAT(nothing.jobs(), IsEmpty());
}

TEST_F(ShardsTest, AReportCountsOnce) {
  const uint64_t box = join();
  EXPECT_THAT(mail(box, {.reports = {report(1), report(2)}}), ElementsAre(1, 2));
  EXPECT_THAT(mail(box, {.reports = {report(1), report(2), report(3)}}), ElementsAre(3));
  EXPECT_THAT(mail(box, {.first = 3, .reports = {report(4)}}), ElementsAre(4));
  EXPECT_THAT(mail(box, {.first = 1, .reports = {report(2)}}), IsEmpty());
}

TEST_F(ShardsTest, MailThatLacksSomethingIsRefused) {
  const uint64_t box = join();
  const auto code = [&](uint64_t shard, const ShardMail& mail) -> std::optional<ErrorCode> {
    try {
      shards_.mail(
          shard, mail, [](const Result<ShardOrders>&) {}, 0);
    } catch (const Error& error) {
      return error.code();
    }
    return std::nullopt;
  };
  EXPECT_EQ(code(box, {.first = 1, .reports = {report(1)}}), ErrorCode::kInvalid);
  EXPECT_EQ(code(box, {.received = 1}), ErrorCode::kInvalid);
  EXPECT_EQ(code(box + 1, {}), ErrorCode::kNotFound);
  EXPECT_EQ(code(box, {}), std::nullopt);
}

TEST_F(ShardsTest, WhoSendsNoMailForALeaseIsLost) {
  const uint64_t quiet = join("quiet", 0), talks = join("talks", 0);
  mail(quiet, {}, nullptr, 0);
  mail(talks, {}, nullptr, kLeaseMs);
  const std::vector<ShardBox> lost = shards_.tick(kLeaseMs + 1);
  ASSERT_THAT(lost, SizeIs(1));
  EXPECT_EQ(lost.front().id, quiet);
  EXPECT_THAT(shards_.boxes(), SizeIs(1));
  shards_.send(quiet, {.kind = ShardDo::kHold});  // nobody is there
  EXPECT_THROW(mail(quiet, {}), Error);
}

TEST_F(ShardsTest, WhoHasSentNoMailServesNotYetAndIsForgottenAfterALease) {
  const uint64_t box = join();
  EXPECT_THAT(shards_.boxes(), IsEmpty());
  EXPECT_THAT(shards_.tick(kLeaseMs + 1), IsEmpty());
  EXPECT_THROW(mail(box, {}), Error);
  const uint64_t again = join("box", kLeaseMs + 1);
  mail(again, {}, nullptr, kLeaseMs + 1);
  EXPECT_THAT(shards_.boxes(), SizeIs(1));
}

// A job with a queue at each of three boxes, of which two serve under the server.
Plan plan_of_three() {
  Plan plan;
  plan.cores.resize(3);
  plan.queues.resize(3);
  plan.nics.resize(3);
  plan.queue_chunks.resize(3);
  plan.key_format = {{.name = "f32", .bits = 32, .unit_bytes = 4}};
  plan.chunks.resize(6);
  for (uint32_t c = 0; c < 6; ++c) plan.chunks[c].queue = c / 2;
  for (uint32_t box = 0; box < 3; ++box) {
    plan.cores[box].box = plan.queues[box].core = plan.queues[box].nic = box;
    plan.cores[box].queues = {box};
  }
  return plan;
}

std::vector<ShardBox> two_boxes(uint64_t one, const char* name, uint64_t other,
                                const char* name_of_other) {
  std::vector<ShardBox> boxes(2);
  boxes[0] = {.id = one, .about = {.name = name}};
  boxes[1] = {.id = other, .about = {.name = name_of_other}};
  return boxes;
}

// Nobody else hears of a job one of whose boxes was lost while it was made here.
TEST_F(ShardsTest, AJobIsNotMadeWithABoxThatIsLost) {
  const uint64_t stays = join("stays"), goes = join("goes");
  const Plan plan = plan_of_three();
  RemoteParts parts(shards_, 7, plan, two_boxes(stays, "stays", goes, "goes"));
  shards_.remove(goes);
  std::vector<std::optional<Error>> done;
  parts.make({}, [&](const std::optional<Error>& failed) { done.push_back(failed); });
  ASSERT_THAT(done, SizeIs(1));
  ASSERT_TRUE(done[0]);
  EXPECT_EQ(done[0]->code(), ErrorCode::kUnavailable) << "the worker tries again";
  EXPECT_STREQ(done[0]->what(), "goes: it serves no more");
  EXPECT_FALSE(parts.being_made());
  Answer answer;
  mail(stays, {.wait = true}, &answer);
  EXPECT_FALSE(answer.orders);
}

class RemotePartsTest : public ShardsTest {
 protected:
  using Failures = std::vector<std::optional<Error>>;
  static RemoteParts::Done into(Failures& done) {
    return [&done](const std::optional<Error>& failed) { done.push_back(failed); };
  }
  void take(uint64_t shard, const ShardReport& report) {
    Probe probe;
    probe.arrivals.resize(1);
    probe.waited_for.resize(1);
    probe.queues.resize(1);
    parts_.take(
        shard, report, [&probe](uint32_t) -> Probe& { return probe; }, boundary_);
  }
  // What is wrong with a report; "": nothing.
  std::string refusal(uint64_t shard, const ShardReport& report) {
    const std::optional<Error> refused = error_of([&] { take(shard, report); });
    return refused ? refused->what() : "";
  }
  static ShardReport offered(uint32_t incarnation, const char* address) {
    return {.kind = ShardSays::kOffered,
            .rank = 1,
            .incarnation = incarnation,
            .queues = {{.address = address}}};
  }

  const uint64_t one_ = join("one"), two_ = join("two");
  Boundary boundary_;
  const Plan plan_ = plan_of_three();
  RemoteParts parts_{shards_, 7, plan_, two_boxes(one_, "one", two_, "two")};
};

TEST_F(RemotePartsTest, ABoxThatAnswersTwiceDoesNotAnswerForAnother) {
  Failures done;
  parts_.make({}, into(done));
  take(one_, {.kind = ShardSays::kMade});
  take(one_, {.kind = ShardSays::kMade});
  EXPECT_THAT(done, IsEmpty());
  EXPECT_TRUE(parts_.being_made());
  take(two_, {.kind = ShardSays::kMade});
  ASSERT_THAT(done, SizeIs(1));
  EXPECT_FALSE(done[0]);
  take(two_, {.kind = ShardSays::kMade});
  EXPECT_THAT(done, SizeIs(1));
}

TEST_F(RemotePartsTest, ABoxThatIsLostAfterItHasAnsweredDoesNotAnswerForAnother) {
  Failures done;
  parts_.share_state({.number = 1, .keys = {0}}, into(done));
  take(one_, {.kind = ShardSays::kStateThere, .state = 1});
  parts_.lose(one_);
  EXPECT_THAT(done, IsEmpty());
  take(two_, {.kind = ShardSays::kStateThere, .state = 1});
  ASSERT_THAT(done, SizeIs(1));
  EXPECT_FALSE(done[0]);
}

TEST_F(RemotePartsTest, ABoxThatIsLostBeforeItHasAnsweredFailsIt) {
  Failures done;
  parts_.share_state({.number = 1, .keys = {0}}, into(done));
  parts_.lose(one_);
  EXPECT_THAT(done, IsEmpty()) << "the other one still copies from here";
  take(two_, {.kind = ShardSays::kStateThere, .state = 1});
  ASSERT_THAT(done, SizeIs(1));
  EXPECT_STREQ(done[0]->what(), "one: it serves no more");
}

// Its predecessor's new connections were asked for before, and nobody has fetched them.
TEST_F(RemotePartsTest, AnAnswerIsOfTheIncarnationThatWasAskedFor) {
  Offer before, now;
  before.ticket = "before";
  now.ticket = "now";
  Failures done_before, done_now;
  parts_.reconnect(1, 1, before, into(done_before));
  parts_.admit(1, 2, {}, now, into(done_now));
  for (const uint64_t shard : {one_, two_}) take(shard, offered(1, "old"));
  EXPECT_THAT(done_before, SizeIs(1));
  EXPECT_THAT(done_now, IsEmpty());
  for (const uint64_t shard : {one_, two_}) take(shard, offered(2, "new"));
  ASSERT_THAT(done_now, SizeIs(1));
  EXPECT_FALSE(done_now[0]);
  EXPECT_EQ(now.queues[1].address, "new");
  EXPECT_EQ(now.queues[2].address, "new");
}

// Each of them counts at the server: one too many would end a wait of which others are still part.
TEST_F(RemotePartsTest, WhatNobodyAskedForIsRefused) {
  const auto wrong = HasSubstr("nobody asked this core, or it has answered already");
  ShardProbe probe{.arrivals = {1}, .waited_for = {0}};
  probe.queues.resize(1);
  const auto ask = [&](ShardSays kind) {
    switch (kind) {
      case ShardSays::kHeld:
        return parts_.hold();
      case ShardSays::kProbed:
        return parts_.probe(0);
      case ShardSays::kDetached:
        return parts_.detach(1);
      case ShardSays::kAttached:
        return parts_.attach(1, 0);
      case ShardSays::kRemoved:
        return parts_.start();
      case ShardSays::kSnapped:
        boundary_.snapshot = true;
        return parts_.commit({.boundary = boundary_});
      case ShardSays::kGotState:
        return parts_.commit({.boundary = boundary_, .state = 1});
      default:
        return parts_.commit({.boundary = boundary_});
    }
  };
  using enum ShardSays;
  for (const uint32_t box : {1, 2}) {  // neither has anything to send
    parts_.moves().begin(box, BoxMoves::Direction::kReceive, {.round = 6}, {});
    parts_.moves().begin(box, BoxMoves::Direction::kReceive, {.state = 0}, {});
  }
  for (const ShardSays kind :
       {kHeld, kProbed, kCommitted, kDetached, kAttached, kRemoved, kSnapped, kGotState}) {
    SCOPED_TRACE(static_cast<int>(kind));
    const ShardReport says{.kind = kind, .rank = 1, .round = 7, .probe = {probe}};
    EXPECT_THAT(refusal(one_, says), wrong);
    for (int round = 0; round < 2; ++round) {
      ask(kind);
      EXPECT_EQ(refusal(one_, says), "");
      EXPECT_THAT(refusal(one_, says), wrong);
      EXPECT_EQ(refusal(two_, says), "") << "the other box's answer is its own";
    }
  }
  parts_.detach(2);
  EXPECT_THAT(refusal(one_, {.kind = kDetached, .rank = 1}), wrong) << "it is another rank's";
  EXPECT_EQ(refusal(one_, {.kind = kDetached, .rank = 2}), "");
}

TEST_F(RemotePartsTest, ABoxThatIsLostLeavesTheAnswersThatItOwes) {
  parts_.start();
  parts_.commit({.boundary = boundary_});
  take(one_, {.kind = ShardSays::kCommitted});
  const auto lost = parts_.lose(one_);
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->committing, 0u);
  EXPECT_FALSE(parts_.gone()) << "the other box's core has the job";
  const auto other = parts_.lose(two_);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->committing, 1u);
  EXPECT_TRUE(parts_.gone());
}

// Ranges that overlap would cost their product: all of a mail, many times over.
TEST_F(RemotePartsTest, LastRoundsComeOnceAndInOrder) {
  std::vector<uint64_t> of_4(6), of_5(6);
  boundary_.lost = {{.rank = 4, .last_rounds = of_4}, {.rank = 5, .last_rounds = of_5}};
  const auto says = [&](std::vector<ShardRounds> rounds) {
    parts_.commit({.boundary = boundary_});
    return refusal(one_, {.kind = ShardSays::kCommitted, .last_rounds = std::move(rounds)});
  };
  EXPECT_EQ(says({{5, {{0, 1, 7}, {2, 2, 8}, {3, 5, 9}}}, {4, {{2, 3, 6}}}}), "");
  EXPECT_THAT(of_5, ElementsAre(0, 0, 8, 9, 0, 0)) << "chunks 2 and 3 are that box's";
  EXPECT_THAT(of_4, ElementsAre(0, 0, 6, 6, 0, 0));
  EXPECT_THAT(says({{4, {{2, 3, 6}}}, {4, {{2, 3, 7}}}}), HasSubstr("come twice"));
  EXPECT_THAT(says({{6, {}}}), HasSubstr("a rank that is not lost"));
  for (const std::vector<ChunkRange>& ranges : {std::vector<ChunkRange>{{2, 3, 7}, {3, 3, 7}},
                                                {{2, 3, 7}, {0, 1, 7}},
                                                {{3, 2, 7}},
                                                {{2, 6, 7}},
                                                {{0, ~0u, 7}, {0, ~0u, 7}}}) {
    EXPECT_THAT(says({{4, ranges}}), HasSubstr("a range of chunks"));
  }
  EXPECT_THAT(of_4, ElementsAre(0, 0, 6, 6, 0, 0)) << "nothing of it counts";
  parts_.hold();
  EXPECT_THAT(refusal(one_, {.kind = ShardSays::kHeld, .last_rounds = {{4, {{2, 3, 6}}}}}),
              HasSubstr("without a boundary"));
}

// It mails, so its lease goes on.
TEST_F(RemotePartsTest, ABoxThatDoesNotMakeItsPartIsLate) {
  Failures done;
  parts_.make({}, into(done));
  EXPECT_FALSE(parts_.late(1000, 0));
  take(one_, {.kind = ShardSays::kMade});
  EXPECT_FALSE(parts_.late(1000 + RemoteParts::kMakeMs, 0));
  const auto late = parts_.late(1001 + RemoteParts::kMakeMs, 0);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->shard, two_);
  EXPECT_THAT(late->what,
              HasSubstr("has not answered for 30001 ms: it was asked to make its part"));
  parts_.lose(two_);
  EXPECT_THAT(done, SizeIs(1));
  EXPECT_FALSE(parts_.late(5000 + RemoteParts::kMakeMs, 0)) << "nobody waits for it";
}

TEST_F(RemotePartsTest, ABoxThatFetchesPiecesIsNotLate) {
  Failures done;
  parts_.make({}, into(done));
  parts_.late(1000, 0);
  take(one_, {.kind = ShardSays::kMade});
  parts_.moved(two_);
  EXPECT_FALSE(parts_.late(1001 + RemoteParts::kMakeMs, 0));
  EXPECT_TRUE(parts_.late(1002 + 2 * RemoteParts::kMakeMs, 0));
}

TEST_F(RemotePartsTest, ABoxWhoseCoreDoesNotAnswerIsLate) {
  parts_.start();
  EXPECT_FALSE(parts_.late(1000, 0));
  EXPECT_FALSE(parts_.late(1'000'000, 0)) << "a job may last long";
  for (const ShardDo what : {ShardDo::kHold, ShardDo::kRemove}) {
    what == ShardDo::kHold ? parts_.hold() : parts_.remove();
    const ShardSays kind = what == ShardDo::kHold ? ShardSays::kHeld : ShardSays::kRemoved;
    EXPECT_FALSE(parts_.late(2'000'000, 0));
    take(two_, {.kind = kind});
    EXPECT_FALSE(parts_.late(2'000'000 + RemoteParts::kAnswerMs, 0));
    const auto late = parts_.late(2'000'001 + RemoteParts::kAnswerMs, 0);
    ASSERT_TRUE(late);
    EXPECT_EQ(late->shard, one_);
    EXPECT_THAT(late->what,
                HasSubstr(what == ShardDo::kHold ? "for 'held' of its core 0" : "'removed'"));
    take(one_, {.kind = kind});
  }
}

// A chunk is copied when it comes to that round, for which workers may be late.
TEST_F(RemotePartsTest, ASnapshotIsDueWhenTheRoundBeforeItIsComplete) {
  boundary_ = {.round = 5, .snapshot = true, .snapshot_round = 8};
  parts_.commit({.boundary = boundary_});
  for (const uint64_t shard : {one_, two_}) take(shard, {.kind = ShardSays::kCommitted});
  EXPECT_FALSE(parts_.late(1000, 7));
  EXPECT_FALSE(parts_.late(900'000, 7));
  EXPECT_FALSE(parts_.late(900'000, 8));
  EXPECT_FALSE(parts_.late(900'000 + RemoteParts::kAnswerMs, 8));
  EXPECT_TRUE(parts_.late(900'001 + RemoteParts::kAnswerMs, 8));
  parts_.moved(one_);
  parts_.moved(two_);
  EXPECT_FALSE(parts_.late(900'002 + RemoteParts::kAnswerMs, 8)) << "its pieces come";
}

TEST_F(ShardsTest, APieceThatIsAskedForAgainIsNoProgress) {
  const uint64_t box = join();
  EXPECT_TRUE(shards_.goes_on(box, {.job = 1, .round = 4}));
  EXPECT_FALSE(shards_.goes_on(box, {.job = 1, .round = 4}));
  EXPECT_TRUE(shards_.goes_on(box, {.job = 1, .round = 4, .offset = 1}));
  EXPECT_FALSE(shards_.goes_on(box, {.job = 1, .round = 4}));
  EXPECT_TRUE(shards_.goes_on(box, {.job = 2, .round = 4}));
  EXPECT_FALSE(shards_.goes_on(box + 1, {.job = 2, .round = 5}));
}

}  // namespace shards_test
}  // namespace phub

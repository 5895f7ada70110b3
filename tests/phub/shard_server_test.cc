// A server and a box that serves under it, in one thread: the test is the mail between them, and
// changes orders.
#include "phub/shard/shard_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "numa/topology.h"
#include "phub/server.h"
#include "phub/shard/shard_post.h"
#include "tests/phub/fake_parent.h"
#include "transport/tcp/transport.h"

namespace phub {
namespace shard_server_test {

using ::testing::HasSubstr;

class ShardServerTest : public ::testing::Test {
 protected:
  using Change = std::function<void(ShardBoundary& boundary)>;

  ShardServerTest() {
    server_.shards().join(shard_.hello(), [this](Result<ShardWelcome> welcome) {
      ASSERT_TRUE(welcome);
      post_.begin(*welcome.value);
    });
    run();
    JoinRequest request = request_for("job");
    for (request.rank = 0; request.rank < 2; ++request.rank) {
      server_.join(request, [this](Result<JoinReply> reply) {
        ASSERT_TRUE(reply) << reply.message;
        who_ = {.job = "job",
                .rank = reply.value->rank,
                .incarnation = reply.value->incarnation,
                .ticket = reply.value->offer.ticket};
        ++admitted_;
      });
    }
    run();
    EXPECT_EQ(admitted_, 2);
    EXPECT_FALSE(shard_.empty());
  }

  static JoinRequest request_for(const char* job) {
    JoinRequest request;
    request.spec.name = job;
    request.spec.keys = {{.name = "w", .elements = 4096}};
    request.spec.chunk_elements = 64;
    request.spec.world_size = request.spec.max_ranks = 2;
    request.spec.optimizer = "sgd";
    request.spec.branches = 1;
    request.spec.join_limit_ms = 3000;
    request.transport = "tcp";
    return request;
  }
  void run(int times = 40) {
    for (int i = 0; i < times; ++i) {
      server_.poll();
      shard_.poll();
      for (uint32_t core = 0; core < server_.machine().cores(); ++core)
        server_.machine().core(core).step();
      for (uint32_t core = 0; core < shard_.cores(); ++core) shard_.core(core).step();
      carry_mail();
    }
  }
  // All boundaries that go to the box from now on are changed.
  void expect_failure(const Change& change, const std::string& what) {
    change_ = change;
    std::optional<Result<BranchReply>> forked;
    server_.change_branches(who_, {.action = BranchAction::kFork},
                            [&](Result<BranchReply> reply) { forked = std::move(reply); });
    run();
    EXPECT_TRUE(forked) << "the job waits";
    EXPECT_TRUE(shard_.empty());
    EXPECT_THAT(failure(), HasSubstr(what));
  }
  // The box says what none of its cores does.
  void say(const ShardReport& report) { post_.add({report}); }
  std::string failure() {
    EXPECT_FALSE(server_.has_job("job"));
    std::string reason;
    server_.log("job", 0, [&reason](Result<LogPage> page) {
      ASSERT_TRUE(page);
      for (const LogRecord& record : page.value->records) {
        if (record.kind == LogRecord::Kind::kFailed) reason = record.reason;
      }
    });
    return reason;
  }

  testing::SetClock clock_;
  std::string notes_;
  Server server_{with_notes(), transports(), clock_};
  bool is_stuck_ = false;  // the box mails, and does nothing

 private:
  static std::vector<std::unique_ptr<Transport>> transports() {
    std::vector<std::unique_ptr<Transport>> transports;
    transports.push_back(make_tcp_transport());
    return transports;
  }
  template <typename Options>
  static Options options() {
    Options options;
    options.topology = numa::from_synthetic("pack:1 core:2 pu:1");
    options.pin = false;
    return options;
  }

  void carry_mail() {  // until the server does not know the box any more
    const std::optional<Error> lost = error_of([this] { exchange_mail(); });
    if (lost) {
      EXPECT_EQ(lost->code(), ErrorCode::kNotFound) << lost->what();
    }
  }
  void exchange_mail() {
    const uint64_t shard = post_.welcome().shard;
    post_.add(shard_.take_reports());
    const ShardMail reports = post_.reporting();
    server_.shards().take_mail(shard, reports, [](const Result<ShardOrders>&) {});
    post_.delivered(reports);
    server_.shards().take_mail(shard, post_.asking(), [this](Result<ShardOrders> result) {
      for (ShardOrder& order : post_.take(*result.value)) {
        for (ShardBoundary& boundary : order.boundary) {
          if (change_) change_(boundary);
        }
        if (!is_stuck_) shard_.handle(order);
      }
    });
  }

  ServerOptions with_notes() {
    ServerOptions server = options<ServerOptions>();
    server.note = [this](const std::string& line) { notes_ += line + '\n'; };
    return server;
  }
  ShardServer shard_{options<ShardServerOptions>(), transports(), clock_};
  ShardPost post_;
  Change change_;
  Credential who_;
  int admitted_ = 0;
};

TEST_F(ShardServerTest, MovesThatDoNotFitFailTheJob) {
  expect_failure(
      [](ShardBoundary& boundary) {
        for (BranchMove& move : boundary.moves) move.to = 9;
      },
      "the server orders what does not fit a box's part: moves of branches");
}

TEST_F(ShardServerTest, ALostRankThatIsNoneFailsTheJob) {
  expect_failure(
      [](ShardBoundary& boundary) {
        boundary.lost = {{.rank = 0}, {.rank = 7}};
      },
      "what does not fit a box's part: a rank that is lost");
}

TEST_F(ShardServerTest, ANewRankWithoutConnectionsFailsTheJob) {
  expect_failure([](ShardBoundary& boundary) { boundary.admitted = {{.rank = 5}}; },
                 "what does not fit a box's part: a rank that is admitted");
}

TEST_F(ShardServerTest, AStateThatIsNotThereFailsTheJob) {
  expect_failure([](ShardBoundary& boundary) { boundary.state = 3; },
                 "state of keys 3, which a boundary moves, is not there");
}

TEST_F(ShardServerTest, ABranchThatIsNotThereFailsTheJob) {
  expect_failure([](ShardBoundary& boundary) { boundary.branch = 4; },
                 "branch 4, which a boundary moves, is not there");
}

TEST_F(ShardServerTest, ABoxThatMailsAndDoesNothingIsGivenUp) {
  is_stuck_ = true;
  std::optional<Result<JoinReply>> joined;
  server_.join(request_for("other"), [&](Result<JoinReply> reply) { joined = std::move(reply); });
  for (int tenths = 0; tenths < 400 && !joined; ++tenths) {
    clock_.now += 100;
    run(4);
  }
  ASSERT_TRUE(joined) << "the join waits for ever";
  EXPECT_EQ(joined->code, ErrorCode::kUnavailable) << "without that box it can be made";
  EXPECT_THAT(notes_, HasSubstr("it sends mail, but has not answered for"));
}

// It would end a wait for all cores' answers, and wrap their number.
TEST_F(ShardServerTest, ABoxThatAnswersWhatNobodyAskedIsLost) {
  for (int i = 0; i < 3; ++i) say({.kind = ShardSays::kHeld, .job = 1, .min_round = 1});
  run();
  EXPECT_THAT(failure(), HasSubstr("had a part of it, and is lost"));
  EXPECT_THAT(notes_, HasSubstr("nobody asked this core, or it has answered already"));
}

TEST_F(ShardServerTest, ABoxThatNamesARankThatIsNoneIsLost) {
  say({.kind = ShardSays::kDisconnected, .job = 1, .rank = 2, .incarnation = 1});
  run();
  EXPECT_THAT(failure(), HasSubstr("had a part of it, and is lost"));
  EXPECT_THAT(notes_, HasSubstr("a report does not fit its job: rank 2"));
}

TEST_F(ShardServerTest, AnOverflowIsNoRanksFault) {
  say({.kind = ShardSays::kNonFinite, .job = 1, .rank = CoreReport::kNoRank, .round = 3});
  run();
  EXPECT_THAT(failure(), HasSubstr("the sum of finite gradients overflowed in key 'w'"));
}

}  // namespace shard_server_test
}  // namespace phub

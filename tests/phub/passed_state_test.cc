// The state of keys that ranks of a rack read and set: calls to a parent whose answers the test
// gives.
#include "phub/job/passed_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "phub/background.h"
#include "tests/phub/fake_parent.h"

namespace phub {
namespace passed_state_test {

using ::testing::ElementsAre;
using testing::FakeParent;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::SetClock;
using ::testing::SizeIs;
using testing::take;

class PassedStateTest : public ::testing::Test {
 protected:
  PassedStateTest() {
    JoinRequest request{.id = "one"};
    request.spec.name = "job";
    request.spec.lease_ms = 400;
    time_.begin_round(8000);
    uplink_ = std::make_shared<Uplink>(parent_, time_, request);
    uplink_->join([](const Result<Done>&) {});
    JoinReply reply{.rank = 1, .incarnation = 3, .first_round = 7};
    reply.offer.ticket = "ticket";
    take(parent_.joins)(reply);
    state_ = std::make_unique<PassedState>("job", *uplink_);
  }
  template <typename T>
  Reply<T> say() {
    return [this](const Result<T>& result) {
      said_.push_back(result ? "done" : std::string(name_of(result.code)) + ": " + result.message);
    };
  }
  // What the rank is refused with at once; "": nothing.
  std::string begin(uint32_t rank, bool sets) {
    const auto failed =
        error_of([&] { state_->begin({.rank = rank, .set = sets}, say<StateReply>()); });
    return failed ? failed->what() : "";
  }
  void open(uint32_t rank, bool sets) {
    ASSERT_EQ(begin(rank, sets), "");
    take(parent_.begins)(StateReply{.bytes = 64});
    ASSERT_THAT(said_, ElementsAre("done"));
    said_.clear();
  }

  SetClock clock_;
  ServedTime time_{clock_};
  FakeParent parent_;
  std::shared_ptr<Uplink> uplink_;
  std::unique_ptr<PassedState> state_;
  std::vector<std::string> said_;
};

TEST_F(PassedStateTest, IsOneRanksAtATime) {
  open(4, true);
  EXPECT_THAT(begin(5, false), HasSubstr("rank 4 sets the state of job 'job'"));
  EXPECT_EQ(begin(4, false), "");  // one that is open is replaced
  EXPECT_THAT(begin(4, false), HasSubstr("rank 4 reads"));
  take(parent_.begins)(StateReply{.bytes = 8});
  EXPECT_THAT(said_, ElementsAre("done"));
  EXPECT_THAT(parent_.ends, IsEmpty());
}

// The parent knows one rank: what comes next must not be dropped in the stead of what was.
TEST_F(PassedStateTest, TheNextOneWaitsUntilTheParentHasDroppedTheOneBefore) {
  open(4, true);
  state_->end(5);  // not its own
  EXPECT_THAT(parent_.ends, IsEmpty());
  state_->end(4);
  EXPECT_EQ(begin(5, false), "");
  EXPECT_THAT(begin(6, false), HasSubstr("rank 5 reads"));
  EXPECT_THAT(parent_.begins, IsEmpty());
  take(parent_.ends)({ErrorCode::kUnavailable, "the connection broke"});
  EXPECT_THAT(parent_.begins, IsEmpty());
  state_->tick();
  state_->tick();
  ASSERT_THAT(parent_.ends, SizeIs(1));
  take(parent_.ends)(Done{});
  take(parent_.begins)(StateReply{.bytes = 8});
  EXPECT_THAT(said_, ElementsAre("done"));
  EXPECT_EQ(parent_.begun.back().rank, 5u);
}

TEST_F(PassedStateTest, TheEndIsAnsweredWhenTheParentHasDroppedIt) {
  state_->end(4, say<Done>());
  EXPECT_THAT(said_, ElementsAre("done"));  // there was nothing
  said_.clear();
  open(4, true);
  state_->end(4, say<Done>());
  EXPECT_THAT(said_, IsEmpty());
  take(parent_.ends)(Done{});
  EXPECT_THAT(said_, ElementsAre("done"));
}

TEST_F(PassedStateTest, OneThatWaitsMayEndOrBeRefused) {
  open(4, false);
  state_->end(4);
  EXPECT_EQ(begin(5, false), "");
  state_->end(5);
  EXPECT_THAT(said_, ElementsAre(HasSubstr("rank 5 has ended it")));
  EXPECT_EQ(begin(6, false), "");
  state_->refuse(ErrorCode::kNotFound, "the job has ended");
  EXPECT_THAT(said_, ElementsAre(HasSubstr("5"), HasSubstr("the job has ended")));
  take(parent_.ends)(Done{});
  EXPECT_THAT(parent_.begins, IsEmpty());
}

TEST_F(PassedStateTest, ARankThatIsLostMeanwhileHoldsUpNobody) {
  EXPECT_EQ(begin(4, false), "");
  state_->end(4);
  EXPECT_THAT(parent_.ends, IsEmpty());
  take(parent_.begins)(StateReply{.bytes = 8});
  take(parent_.ends)(Done{});
  said_.clear();
  open(5, false);
}

// Whether the parent has begun it is not known.
TEST_F(PassedStateTest, OneWhoseAnswerIsLostIsEnded) {
  EXPECT_EQ(begin(4, false), "");
  take(parent_.begins)({ErrorCode::kTimeout, "no answer"});
  EXPECT_THAT(said_, ElementsAre(HasSubstr("no answer")));
  ASSERT_THAT(parent_.ends, SizeIs(1));
  take(parent_.ends)(Done{});
}

TEST_F(PassedStateTest, OneThatTheParentRefusesIsNone) {
  EXPECT_EQ(begin(4, false), "");
  take(parent_.begins)({ErrorCode::kTaken, "another rack"});
  EXPECT_THAT(parent_.ends, IsEmpty());
  said_.clear();
  open(5, false);
}

TEST_F(PassedStateTest, PiecesAreOfWhatIsOpen) {
  const auto refused = [](auto call) {
    const auto failed = error_of(call);
    return failed ? std::string(failed->what()) : "";
  };
  const auto read = [&] { state_->read(4, 0, say<PartBytes>()); };
  const auto check = [&](uint64_t offset, uint64_t bytes) {
    return refused([&] { state_->check_piece(4, offset, bytes); });
  };
  EXPECT_THAT(refused(read), HasSubstr("does not read"));
  open(4, true);
  EXPECT_THAT(refused(read), HasSubstr("does not read"));
  EXPECT_EQ(check(0, 64), "");
  EXPECT_EQ(check(60, 4), "");
  EXPECT_THAT(check(64, 4), HasSubstr("no piece"));
  EXPECT_THAT(check(60, 8), HasSubstr("no piece"));
  EXPECT_THAT(check(0, 3), HasSubstr("no piece"));
  EXPECT_THAT(refused([&] { state_->check_piece(5, 0, 4); }), HasSubstr("rank 5"));
  state_->end(4);
  EXPECT_THAT(check(0, 64), HasSubstr("does not set"));
}

TEST_F(PassedStateTest, CallsAreRefusedWhenTheParentsJobEnds) {
  open(4, true);
  state_->apply(4, say<HyperReply>());
  uplink_->leave();
  EXPECT_THAT(said_, ElementsAre(HasSubstr("the job has ended")));
}

}  // namespace passed_state_test
}  // namespace phub

// Chunks that close now and are done later: a way whose results come from elsewhere, here from the
// test, in any order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phub/core/lock_step.h"
#include "tests/phub/core_job_rig.h"

namespace phub {
namespace core_job_pending_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr float kAll3 = 1 + 4 + 16;
const std::vector<uint32_t> kRanks = {0, 1, 2};

class Deferred final : public LockStep {
 public:
  using LockStep::LockStep;

  Closed close(uint32_t index) override {
    if (LockStep::close(index) != Closed::kDone) return Closed::kNotNow;
    EXPECT_TRUE(pending.insert(index).second) << "chunk " << index << " is closed twice";
    return Closed::kPending;
  }
  uint32_t next_done() override {
    if (done.empty()) return kNoChunk;
    const uint32_t index = done.front();
    done.pop_front();
    pending.erase(index);
    return index;
  }

  std::set<uint32_t> pending;
  std::deque<uint32_t> done;
};

struct HasWay {
  Deferred* way = nullptr;
};
class Rig : public HasWay, public testing::BasicCoreJobRig<testing::FakeEndpoint> {
 public:
  explicit Rig(Options options) : BasicCoreJobRig(with_way(std::move(options), way)) {}

  // These chunks are done: what goes out.
  std::vector<std::string> finish(const std::vector<uint32_t>& chunks) {
    way->done.insert(way->done.end(), chunks.begin(), chunks.end());
    run();
    return take_posts();
  }

 private:
  static Options with_way(Options options, Deferred*& made) {
    options.make_lock_step = [&made](const Stages& stages) {
      auto way = std::make_unique<Deferred>(stages);
      made = way.get();
      return way;
    };
    return options;
  }
};

TEST(CoreJobPending, ResultsGoOutWhenTheyAreDoneInAnyOrder) {
  Rig rig({});
  for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(kRanks, chunk, 1);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  EXPECT_THAT(rig.way->pending, ElementsAre(0, 1, 2, 3));
  EXPECT_TRUE(rig.job->arm()) << "nothing is to be done until a result comes";

  // Its slot has been read: what is there now changes nothing, and is not counted again.
  rig.push(1, 2, 1, 1000);
  EXPECT_THAT(rig.finish({2, 0}),
              ElementsAre("0:2@1", "1:2@1", "2:2@1", "0:0@1", "1:0@1", "2:0@1"));
  EXPECT_EQ(rig.result(2), kAll3);

  // The others go on, and overtake what is pending still.
  rig.push_all(kRanks, 2, 2);
  rig.run();
  EXPECT_THAT(rig.way->pending, ElementsAre(1, 2, 3));
  EXPECT_THAT(rig.finish({2}), ElementsAre("0:2@2", "1:2@2", "2:2@2"));
  EXPECT_THAT(rig.take_reports(), IsEmpty());
  rig.push(0, 3, 2, 1);  // nobody has the result of round 1 of chunk 3 yet
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("violation 0"));
}

// Rank 1 is lost and rank 3 comes while chunk 0 is closed, chunk 1 is open, and others are not
// begun.
TEST(CoreJobPending, BoundariesAndLossesLookAtWhatIsClosed) {
  Rig rig({.parameters = {.max_ranks = 4, .slots_belong_to_worker = true}});
  rig.push_all(kRanks, 0, 1);
  rig.push_all(std::vector<uint32_t>{0, 1}, 1, 1);
  rig.run();
  EXPECT_THAT(rig.way->pending, ElementsAre(0));

  const CoreReport held = rig.job->hold();
  EXPECT_EQ(held.round, 2u) << "no newcomer can take part in a round that is closed";
  EXPECT_EQ(held.min_round, 1u) << "hyperparameters of what is not done are needed still";
  EXPECT_EQ(held.started, 1u);
  std::vector<uint64_t> last(4, 99);
  rig.job->commit({.round = 2,
                   .lost = {{.rank = 1, .last_rounds = last}},
                   .admitted = {rig.admission(3, 1, 2)}});
  // By the chunks' numbers in the job, which run the other way here.
  EXPECT_THAT(last, ElementsAre(0, 0, 0, 1)) << "it took part in chunk 0 alone";
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());

  rig.push(2, 1, 1, rig.digit(2));
  rig.run();
  EXPECT_THAT(rig.way->pending, ElementsAre(0, 1));
  EXPECT_THAT(rig.finish({1, 0}),
              ElementsAre("0:1@1", "2:1@1", "3:1@1", "0:0@1", "2:0@1", "3:0@1"));
  EXPECT_EQ(rig.result(1), 1 + 16);
  EXPECT_EQ(rig.result(0), kAll3);

  rig.push_all(std::vector<uint32_t>{0, 2}, 0, 2);
  rig.run();
  EXPECT_THAT(rig.way->pending, IsEmpty());  // round 2 waits for the newcomer
  rig.push(3, 0, 2, rig.digit(3));
  rig.run();
  EXPECT_THAT(rig.finish({0}), ElementsAre("0:0@2", "2:0@2", "3:0@2"));
  EXPECT_EQ(rig.result(0), 1 + 16 + 64);
  EXPECT_THAT(rig.take_reports(), IsEmpty());
}

TEST(CoreJobPending, WhatIsPendingIsDoneDuringAHoldAndTheNextRoundWaits) {
  Rig rig({.chunks = 2});
  rig.push_all(kRanks, 0, 1);
  rig.run();
  EXPECT_EQ(rig.job->hold().round, 2u);
  EXPECT_THAT(rig.finish({0}), ElementsAre("0:0@1", "1:0@1", "2:0@1"));
  rig.push_all(kRanks, 0, 2);
  rig.push_all(kRanks, 1, 1);  // of an earlier round
  rig.run();
  EXPECT_THAT(rig.way->pending, ElementsAre(1));
  rig.job->commit({.round = 2});
  rig.run();
  EXPECT_THAT(rig.way->pending, ElementsAre(0, 1));
  EXPECT_THAT(rig.finish({0, 1}),
              ElementsAre("0:0@2", "1:0@2", "2:0@2", "0:1@1", "1:1@1", "2:1@1"));
}

TEST(CoreJobPending, WhoTookPartIsGoneWhenTheResultComes) {
  Rig rig({.chunks = 1, .expected = {0}});
  rig.push(0, 0, 1, 5);
  rig.run();
  EXPECT_EQ(rig.job->hold().round, 2u);
  rig.job->commit({.round = 2, .lost = {{.rank = 0}}, .admitted = {rig.admission(1, 1, 2)}});
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  EXPECT_THAT(rig.finish({0}), ElementsAre("1:0@1"));
  rig.push(1, 0, 2, 7);
  rig.run();
  EXPECT_THAT(rig.finish({0}), ElementsAre("1:0@2"));
  EXPECT_EQ(rig.result(0), 7);
}

TEST(CoreJobPending, AfterANaNNothingIsFinishedAnyMore) {
  Rig rig({.chunks = 2});
  rig.push_all(kRanks, 0, 1);
  rig.run();
  rig.push(0, 1, 1, std::numeric_limits<float>::quiet_NaN());
  rig.push_all(std::vector<uint32_t>{1, 2}, 1, 1);
  rig.run();
  EXPECT_THAT(rig.take_reports(), ElementsAre("nonfinite 0 chunk 0 @1"));
  EXPECT_THAT(rig.finish({0}), IsEmpty());
}

}  // namespace core_job_pending_test
}  // namespace phub

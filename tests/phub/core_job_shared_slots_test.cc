// A core whose chunks share slots: who is told that a gradient was taken, and when one is taken out
// of its slot before it is summed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "phub/core/gated.h"
#include "phub/core/shared_slots.h"
#include "tests/phub/core_job_rig.h"
#include "transport/slot_window.h"

namespace phub::testing {
namespace core_job_shared_slots_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr uint32_t kRanks = 3, kChunks = 4, kElements = 64;
constexpr uint64_t kBytes = kElements * sizeof(float);
constexpr uint64_t kSecond = 1'000'000'000;

class CoreJobSharedSlots : public ::testing::Test {
 protected:
  // Chunk c has slot c % slots.
  void start(uint32_t slots, std::vector<uint32_t> expected = {0, 1, 2},
             JobParameters parameters = {.max_ranks = kRanks},
             CoreJob::MakeLockStep make_lock_step = {}) {
    box_.limit = &limit_;
    SlotWindow::Shape shape{.queue_chunks = {kChunks},
                            .max_ranks = kRanks,
                            .end_rank = kRanks,
                            .places = 0,
                            .box = &box_};
    std::vector<uint32_t> slot_of;
    for (uint32_t i = 0; i < kChunks; ++i) {
      shape.slots.push_back({i % slots * kBytes, kBytes});
      slot_of.push_back(i % slots);
    }
    window_ = std::make_unique<SlotWindow>(std::move(shape));
    shared_ = std::make_unique<SharedSlots>(slot_of, slots, kRanks);
    rig_ = std::make_unique<CoreJobRig>(
        CoreJobRig::Options{.parameters = std::move(parameters),
                            .expected = std::move(expected),
                            .make_lock_step = std::move(make_lock_step),
                            .window = window_.get(),
                            .shared = shared_.get(),
                            .shared_slots = slots});
  }
  void push(uint32_t rank, uint32_t chunk, uint64_t round = 1) {
    rig_->push(rank, chunk, round, CoreJobRig::digit(rank));
    rig_->run();
  }
  bool sleeps() {
    rig_->endpoint.time_ns += 1'000'000;
    const bool armed = rig_->job->arm();
    if (armed) rig_->job->disarm();
    rig_->run();  // what it has to say goes out
    return armed;
  }
  MemoryLimit limit_{100 * SlotWindow::place_bytes(kBytes)};
  WindowsOfBox box_{kRanks};
  std::unique_ptr<SlotWindow> window_;
  std::unique_ptr<SharedSlots> shared_;
  std::unique_ptr<CoreJobRig> rig_;
};

TEST_F(CoreJobSharedSlots, AResultFreesTheSlot) {
  start(1);
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) push(rank, chunk);
    EXPECT_EQ(rig_->result(chunk), 1 + 4 + 16);
    for (uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(shared_->used(rank), 0u);
  }
  EXPECT_EQ(rig_->take_posts().size(), kRanks * kChunks) << "results, and nothing else";
  EXPECT_EQ(box_.growths, 0u);
}

TEST_F(CoreJobSharedSlots, WhoWritesOverAnotherGradientIsGone) {
  start(2);
  push(0, 0);
  push(0, 1);
  push(0, 2);
  EXPECT_THAT(rig_->take_reports(), ElementsAre("violation 0 slot 0"));
}

// Each waits for a chunk whose slot at the other has another gradient.
TEST_F(CoreJobSharedSlots, WhoWaitForEachOtherAreToldAtOnce) {
  start(1, {0, 1});
  push(0, 0);
  EXPECT_TRUE(sleeps()) << "rank 1 may send chunk 0 next";
  push(1, 1);
  EXPECT_THAT(rig_->take_posts(), IsEmpty());
  EXPECT_FALSE(sleeps());
  EXPECT_THAT(rig_->take_posts(), UnorderedElementsAre("0:0i1", "1:1i1"));
  EXPECT_EQ(box_.grown_bytes, 2 * SlotWindow::place_bytes(kBytes));
  push(0, 1);
  push(1, 0);
  EXPECT_EQ(rig_->result(0), 1 + 4);
  EXPECT_EQ(rig_->result(1), 1 + 4);
  EXPECT_THAT(rig_->take_posts(), UnorderedElementsAre("0:0@1", "1:0@1", "0:1@1", "1:1@1"));
  EXPECT_EQ(box_.grown_bytes, 0u);
  EXPECT_EQ(limit_.used(), 0u);
}

TEST_F(CoreJobSharedSlots, WithoutRoomElsewhereTheyWaitAndCountAsLate) {
  start(1, {0, 1});
  limit_.take(1, limit_.limit());
  push(0, 0);
  push(1, 1);
  EXPECT_EQ(rig_->waited_for(), 0u) << "neither can send what the other waits for";
  for (int i = 0; i < 10; ++i, rig_->endpoint.time_ns += kSecond) EXPECT_TRUE(sleeps());
  EXPECT_TRUE(box_.refused);
  EXPECT_EQ(rig_->waited_for(), 3u);
  EXPECT_TRUE(rig_->job->owes());
  limit_.release(limit_.limit());
  EXPECT_FALSE(sleeps());
  push(0, 1);
  push(1, 0);
  EXPECT_EQ(rig_->result(0), 1 + 4);
}

// Rank 2 has sent nothing: the others get on with what they have, some seconds later.
TEST_F(CoreJobSharedSlots, ForALateRankTheOthersWaitSomeSeconds) {
  start(1);
  push(0, 0);
  push(1, 1);
  EXPECT_EQ(rig_->waited_for(), 4u);
  EXPECT_TRUE(sleeps());
  rig_->endpoint.time_ns += 2 * kSecond;
  EXPECT_TRUE(sleeps());
  rig_->endpoint.time_ns += 2 * kSecond;
  EXPECT_FALSE(sleeps());
  EXPECT_THAT(rig_->take_posts(), UnorderedElementsAre("0:0i1", "1:1i1"));
}

// Rank 1 waits for the result of chunk 1, which rank 0 cannot send: its slot has a gradient of the
// next round.
TEST_F(CoreJobSharedSlots, WhoWaitsForAnEarlierRoundIsNotLate) {
  start(2, {0, 1});
  for (const uint32_t chunk : {0, 3}) {
    push(0, chunk);
    push(1, chunk);
  }
  rig_->take_posts();
  push(1, 1);
  push(0, 3, 2);
  push(0, 0, 2);
  EXPECT_FALSE(sleeps());
  EXPECT_THAT(rig_->take_posts(), UnorderedElementsAre("0:3i2", "1:1i1"));
  push(0, 1);
  EXPECT_EQ(rig_->result(1), 1 + 4);
}

TEST_F(CoreJobSharedSlots, ALookThatIsNotDueIsMadeSoon) {
  start(1, {0, 1});
  push(0, 0);
  EXPECT_TRUE(sleeps());
  push(1, 1);
  EXPECT_TRUE(rig_->job->arm()) << "it has just looked";
  rig_->job->disarm();
  EXPECT_EQ(rig_->job->retry_ms(), 1u);
  EXPECT_FALSE(sleeps());
}

TEST_F(CoreJobSharedSlots, WhatFindsNoRoomInAQueueIsToldLater) {
  start(1, {0, 1});
  push(0, 0);
  push(1, 1);
  rig_->endpoint.room = 0;
  EXPECT_FALSE(sleeps());
  EXPECT_THAT(rig_->take_posts(), IsEmpty());
  EXPECT_TRUE(rig_->job->owes());
  rig_->endpoint.room = 100;
  rig_->run();
  EXPECT_THAT(rig_->take_posts(), UnorderedElementsAre("0:0i1", "1:1i1"));
  EXPECT_FALSE(rig_->job->owes());
}

// The result overtakes what was still to be told: nobody is told then.
TEST_F(CoreJobSharedSlots, WhoHasTheResultIsNotTold) {
  start(1, {0, 1});
  push(0, 0);
  push(1, 1);
  rig_->endpoint.room = 0;
  EXPECT_FALSE(sleeps());
  push(1, 0);  // as if it had been told
  rig_->endpoint.room = 100;
  rig_->run();
  EXPECT_THAT(rig_->take_posts(), UnorderedElementsAre("1:1i1", "0:0@1", "1:0@1"));
}

// After a reconnection the rank sends everything once more, in another order perhaps: what is
// accepted is taken out of the slots before. The rank is told once its gradient has come again: or
// the next one would meet it in the slot.
TEST_F(CoreJobSharedSlots, WhatWasAcceptedOutlivesAReconnection) {
  start(1, {0, 1});
  push(0, 0);
  rig_->job->detach(0);
  rig_->job->reattach(0, 2);
  EXPECT_EQ(shared_->used(0), 0u);
  rig_->fill(0, 2, 99);  // the slot is another chunk's now
  push(1, 1);
  EXPECT_TRUE(sleeps()) << "rank 0 may send";
  EXPECT_THAT(rig_->take_posts(), IsEmpty());
  push(0, 0);
  EXPECT_THAT(rig_->take_posts(), ElementsAre("0:0i1"));
  push(0, 1);
  push(1, 0);
  EXPECT_EQ(rig_->result(0), 1 + 4);
  EXPECT_EQ(rig_->result(1), 1 + 4);
  EXPECT_THAT(rig_->take_reports(), IsEmpty());
}

TEST_F(CoreJobSharedSlots, ALostRanksGradientOutlivesItsSuccessor) {
  start(1);
  push(0, 0);
  rig_->job->hold();
  Boundary boundary{.round = 2};
  boundary.lost.push_back({.rank = 0});
  boundary.admitted.push_back(rig_->admission(0, 2, 2));
  rig_->job->commit(boundary);
  rig_->fill(0, 3, 99);
  push(1, 0);
  push(2, 0);
  EXPECT_EQ(rig_->result(0), 1 + 4 + 16);
}

// Beyond the limit for memory, or the loss would have to wait.
TEST_F(CoreJobSharedSlots, AReconnectionNeedsNoRoomInTheLimit) {
  start(1, {0, 1});
  limit_.take(1, limit_.limit());
  push(0, 0);
  rig_->job->detach(0);
  rig_->job->reattach(0, 2);
  rig_->fill(0, 1, 99);
  push(1, 0);
  EXPECT_EQ(rig_->result(0), 1 + 4);
}

// In SSP a gradient is applied when it comes; its result may wait.
TEST_F(CoreJobSharedSlots, OutOfLockStepWhatIsAppliedWasTaken) {
  JobParameters parameters = {.max_ranks = kRanks, .slack = 0};
  parameters.rules.consistency = Consistency::kSsp;
  parameters.rules.optimizer = kernels::Optimizer::kSgd;
  start(1, {0, 1}, parameters);
  push(0, 0);
  EXPECT_THAT(rig_->take_posts(), ElementsAre("0:0i1"));
  push(0, 1);
  EXPECT_THAT(rig_->take_posts(), ElementsAre("0:1i1"));
  rig_->job->detach(0);
  rig_->job->reattach(0, 2);
  push(0, 0);
  EXPECT_THAT(rig_->take_posts(), ElementsAre("0:0i1")) << "it may have been lost";
  push(1, 0);
  EXPECT_THAT(rig_->take_posts(), UnorderedElementsAre("1:0i1", "0:0@1", "1:0@1"));
}

// Behind a gate a result waits for all chunks of the round: each must be able to come.
TEST_F(CoreJobSharedSlots, BehindAGateWhatIsSummedWasTaken) {
  JobParameters parameters = {.max_ranks = kRanks};
  parameters.rules.gated = true;
  parameters.rules.optimizer = kernels::Optimizer::kSgd;
  parameters.rules.on_nonfinite = OnNonFinite::kSkip;
  RoundGate gate(1, kChunks, true);
  start(1, {0, 1}, parameters, [&gate](const Stages& stages) -> std::unique_ptr<LockStep> {
    return std::make_unique<Gated>(stages, gate, 0);
  });
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    push(0, chunk);
    push(1, chunk);
    if (chunk + 1 == kChunks) break;
    EXPECT_THAT(rig_->take_posts(), UnorderedElementsAre("0:" + std::to_string(chunk) + "i1",
                                                         "1:" + std::to_string(chunk) + "i1"));
  }
  EXPECT_GE(rig_->take_posts().size(), 2 * kChunks);
}

}  // namespace core_job_shared_slots_test
}  // namespace phub::testing

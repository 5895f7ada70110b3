// A core that has a window of slots: who gets places back, and when there are more of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tests/phub/core_job_rig.h"
#include "transport/slot_window.h"

namespace phub::testing {
namespace core_job_window_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint32_t kRanks = 3, kChunks = 4, kElements = 64;
constexpr uint64_t kBytes = kElements * sizeof(float);

class CoreJobWindow : public ::testing::Test {
 protected:
  void start(uint32_t places, std::vector<uint32_t> expected = {0, 1, 2},
             JobParameters parameters = {.max_ranks = kRanks}) {
    box_.limit = &limit_;
    SlotWindow::Shape shape{.queue_chunks = {kChunks},
                            .max_ranks = kRanks,
                            .end_rank = kRanks,
                            .places = places,
                            .box = &box_};
    for (uint32_t i = 0; i < kChunks; ++i) shape.slots.push_back({i * kBytes, kBytes});
    window_ = std::make_unique<SlotWindow>(std::move(shape));
    rig_ = std::make_unique<CoreJobRig>(CoreJobRig::Options{.parameters = std::move(parameters),
                                                            .expected = std::move(expected),
                                                            .window = window_.get()});
  }
  // False: there is no place for it.
  bool land(uint32_t rank, uint32_t chunk, float value) {
    auto* const at = reinterpret_cast<float*>(window_->take(rank, 0, chunk, chunk * kBytes));
    if (at != nullptr) std::fill_n(at, kElements, value);
    return at != nullptr;
  }
  void announce(uint32_t rank, uint32_t chunk, uint64_t round, ImmKind kind = ImmKind::kData) {
    rig_->endpoint.inbox.push_back({.rank = rank,
                                    .imm = encode({chunk, static_cast<uint32_t>(round), kind}),
                                    .bytes = kind == ImmKind::kNull ? 0 : kBytes,
                                    .offset = chunk * kBytes});
  }
  bool push(uint32_t rank, uint32_t chunk, uint64_t round = 1) {
    if (!land(rank, chunk, CoreJobRig::digit(rank))) return false;
    announce(rank, chunk, round);
    rig_->run();
    return true;
  }
  bool has_place(uint32_t rank, uint32_t chunk) const {
    return window_->at(rank, chunk) != nullptr;
  }
  bool sleeps() {
    rig_->endpoint.time_ns += 1'000'000;
    const bool armed = rig_->job->arm();
    if (armed) rig_->job->disarm();
    return armed;
  }

  MemoryLimit limit_{100 * SlotWindow::place_bytes(kBytes)};
  WindowsOfBox box_{kRanks};
  std::unique_ptr<SlotWindow> window_;
  std::unique_ptr<CoreJobRig> rig_;
};

TEST_F(CoreJobWindow, PlacesAreFreeOnceTheChunkIsSummed) {
  start(1);
  EXPECT_TRUE(push(0, 2) && push(1, 2));
  EXPECT_TRUE(has_place(0, 2) && has_place(1, 2));
  EXPECT_FALSE(push(0, 3));
  EXPECT_TRUE(push(2, 2));
  EXPECT_EQ(rig_->result(2), 1 + 4 + 16);
  for (uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_FALSE(has_place(rank, 2)) << rank;
  EXPECT_TRUE(push(0, 3));
}

TEST_F(CoreJobWindow, ANullNeedsNone) {
  start(1);
  EXPECT_TRUE(push(0, 0));
  announce(0, 1, 1, ImmKind::kNull);
  announce(1, 1, 1, ImmKind::kNull);
  rig_->run();
  EXPECT_TRUE(push(2, 1));
  EXPECT_EQ(rig_->result(1), 16);
}

// Ranks that send in different orders, each with one place.
TEST_F(CoreJobWindow, WhoWaitForEachOtherGetPlacesAtOnce) {
  start(1, {0, 1});
  EXPECT_TRUE(push(0, 0) && push(1, 1));
  EXPECT_FALSE(push(0, 1));
  EXPECT_TRUE(sleeps()) << "rank 1 may have a place for chunk 0";
  EXPECT_FALSE(push(1, 0));
  EXPECT_TRUE(rig_->job->owes());
  EXPECT_FALSE(sleeps());
  EXPECT_EQ(window_->grown(), 2u);
  EXPECT_FALSE(rig_->job->owes());
  EXPECT_TRUE(push(0, 1) && push(1, 0));
  EXPECT_EQ(rig_->result(0), 1 + 4);
  EXPECT_EQ(rig_->result(1), 1 + 4);
}

TEST_F(CoreJobWindow, WithoutRoomWhoWaitForEachOtherWaitOn) {
  start(1, {0, 1});
  limit_.take(1, limit_.limit());
  EXPECT_TRUE(push(0, 0) && push(1, 1));
  EXPECT_FALSE(push(0, 1) || push(1, 0));
  EXPECT_EQ(rig_->waited_for(), 0u);
  for (int i = 0; i < 10; ++i, rig_->endpoint.time_ns += 1'000'000'000) EXPECT_TRUE(sleeps());
  EXPECT_TRUE(box_.refused);
  EXPECT_EQ(rig_->waited_for(), 3u) << "or nobody would ever be late";
  EXPECT_TRUE(rig_->job->owes());
  limit_.release(limit_.limit());
  EXPECT_FALSE(sleeps());
  EXPECT_FALSE(box_.refused);
  EXPECT_TRUE(push(0, 1) && push(1, 0));
  EXPECT_EQ(rig_->result(0), 1 + 4);
  EXPECT_EQ(limit_.used(), 0u);
}

TEST_F(CoreJobWindow, ForALateRankTheOthersWaitSomeSeconds) {
  start(1);
  EXPECT_TRUE(push(0, 0) && push(1, 0));
  EXPECT_FALSE(push(0, 1) || push(1, 1));
  EXPECT_TRUE(sleeps());
  rig_->endpoint.time_ns += 2'900'000'000;
  EXPECT_TRUE(sleeps());
  EXPECT_EQ(rig_->job->retry_ms(), 100u);
  announce(2, 3, 1, ImmKind::kNull);  // that counts anew
  rig_->run();
  EXPECT_TRUE(sleeps());
  rig_->endpoint.time_ns += 2'900'000'000;
  EXPECT_TRUE(sleeps());
  rig_->endpoint.time_ns += 200'000'000;
  EXPECT_FALSE(sleeps());
  EXPECT_TRUE(push(0, 1) && push(1, 1));
  EXPECT_FALSE(push(0, 2) || push(1, 2));
  EXPECT_TRUE(sleeps());
  rig_->endpoint.time_ns += 2'900'000'000;
  EXPECT_TRUE(sleeps());
  rig_->endpoint.time_ns += 200'000'000;
  EXPECT_FALSE(sleeps());
}

// Ranks that the box does not read from are not late.
TEST_F(CoreJobWindow, WhoIsShortIsNotWaitedFor) {
  start(1);
  EXPECT_TRUE(push(0, 0) && push(1, 1));
  EXPECT_FALSE(push(0, 1));
  EXPECT_EQ(rig_->waited_for(), 0b110u);
  EXPECT_FALSE(push(1, 0));
  EXPECT_EQ(rig_->waited_for(), 0b100u);
}

TEST_F(CoreJobWindow, WhatHasNoPlaceIsReadBeforeABoundary) {
  start(1);
  EXPECT_TRUE(push(0, 0));
  EXPECT_FALSE(push(0, 1));
  limit_.take(1, limit_.limit());
  rig_->job->hold();
  EXPECT_TRUE(push(0, 1)) << "or a full limit would hold up the loss of a rank";
  EXPECT_GT(limit_.used(), limit_.limit());
  limit_.release(limit_.limit());
}

// A worker that says that it sends rows, and sends nothing.
TEST_F(CoreJobWindow, AGradientWithoutAPayloadIsNone) {
  start(1);
  rig_->endpoint.inbox.push_back({.rank = 0, .imm = encode({0, 1, ImmKind::kData}), .bytes = 0});
  rig_->run();
  EXPECT_THAT(rig_->take_reports(), ElementsAre("violation 0 bytes 0"));
}

// What holds it up may be that it has no place at another core.
TEST_F(CoreJobWindow, ForARankThatIsShortElsewhereTheyWaitLess) {
  start(1);
  EXPECT_TRUE(push(0, 0) && push(1, 0));
  EXPECT_FALSE(push(0, 1));
  box_.short_ranks[2] = 1;
  EXPECT_TRUE(sleeps());
  rig_->endpoint.time_ns += 100'000'000;
  EXPECT_TRUE(sleeps());
  rig_->endpoint.time_ns += 200'000'000;
  EXPECT_FALSE(sleeps());
}

TEST_F(CoreJobWindow, ForARankThatIsGoneTheyWait) {
  start(1);
  EXPECT_TRUE(push(0, 0) && push(1, 0));
  EXPECT_FALSE(push(0, 1));
  rig_->job->detach(2);
  for (int i = 0; i < 100; ++i, rig_->endpoint.time_ns += 1'000'000'000) ASSERT_TRUE(sleeps());
  EXPECT_EQ(window_->grown(), 0u);
}

TEST_F(CoreJobWindow, OfADetachedRankWhatIsAcceptedStays) {
  start(2);
  EXPECT_TRUE(push(0, 0));
  EXPECT_TRUE(land(0, 1, 7));  // in part
  EXPECT_FALSE(land(0, 2, 7));
  EXPECT_TRUE(window_->is_short(0));
  rig_->job->detach(0);
  EXPECT_TRUE(has_place(0, 0));
  EXPECT_FALSE(has_place(0, 1));
  EXPECT_FALSE(window_->is_short());
  EXPECT_EQ(box_.short_ranks[0], 0u);
  EXPECT_TRUE(push(1, 0) && push(2, 0));
  EXPECT_EQ(rig_->result(0), 1 + 4 + 16);
}

// After a reconnection a rank sends again what was accepted, and meanwhile the chunk is summed: the
// place may be another chunk's.
TEST_F(CoreJobWindow, WhatCameTwiceAndLostItsPlaceIsAnswered) {
  start(1);
  EXPECT_TRUE(push(0, 0) && push(1, 0));
  rig_->job->detach(0);
  rig_->job->reattach(0, 2);
  EXPECT_TRUE(land(0, 0, 1));
  EXPECT_TRUE(push(2, 0));
  EXPECT_THAT(rig_->take_posts(), ElementsAre("1:0@1", "2:0@1"));  // rank 0 may be under way
  EXPECT_TRUE(land(0, 1, 9));
  announce(0, 0, 1);
  rig_->run();
  EXPECT_THAT(rig_->take_posts(), ElementsAre("0:0@1"));
  EXPECT_TRUE(has_place(0, 1));
  EXPECT_THAT(rig_->take_reports(), IsEmpty());
}

TEST_F(CoreJobWindow, OutOfLockStepPlacesAreFreeOnceApplied) {
  JobParameters parameters = {.max_ranks = kRanks, .slack = 1};
  parameters.rules.consistency = Consistency::kSsp;
  parameters.rules.optimizer = kernels::Optimizer::kSgd;
  start(1, {0, 1, 2}, parameters);
  EXPECT_TRUE(push(0, 0));
  EXPECT_FALSE(has_place(0, 0));
  EXPECT_TRUE(push(0, 1));
}

}  // namespace core_job_window_test
}  // namespace phub::testing

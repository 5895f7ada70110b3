// Racks at a core: of the parent, whose ranks are racks, and of a rack, whose results come from
// above.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phub/core/uplinked.h"
#include "tests/phub/core_job_rig.h"
#include "transport/error.h"

namespace phub {
namespace core_job_racks_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint32_t kElements = 64, kStride = 96;
constexpr uint64_t kAbove = 4096;  // where its slots begin at the parent

// --- the parent ----------------------------------------------------------------------------------

class ParentRig : public testing::CoreJobRig {
 public:
  explicit ParentRig(bool mean = true, OnNonFinite on_nonfinite = OnNonFinite::kStop)
      : BasicCoreJobRig({.parameters = {.max_ranks = 3,
                                        .rack_ranks = {2, 4, 1},
                                        .mean = mean,
                                        .on_nonfinite = on_nonfinite},
                         .elements = kElements,
                         .stride = kStride}) {}

  void push_sum(uint32_t rank, uint32_t chunk, uint64_t round, float value, uint32_t participants) {
    auto* slot = reinterpret_cast<float*>(slots[rank].data()) + chunk * kStride;
    std::fill_n(slot, kElements, value);
    std::memcpy(slot + kElements, &participants, sizeof participants);
    send(rank, {chunk, low8(round), ImmKind::kData}, (kElements + 1) * 4, chunk * kStride * 4);
  }
  void push_null(uint32_t rank, uint32_t chunk, uint64_t round, uint32_t participants) {
    auto* slot = reinterpret_cast<float*>(slots[rank].data()) + chunk * kStride;
    std::memcpy(slot + kElements, &participants, sizeof participants);
    send(rank, {chunk, low8(round), ImmKind::kNull}, 4, (chunk * kStride + kElements) * 4);
  }
  void send(uint32_t rank, const Imm& imm, uint64_t bytes, uint64_t offset) {
    endpoint.inbox.push_back({.rank = rank, .imm = encode(imm), .bytes = bytes, .offset = offset});
  }
  std::optional<CoreReport> violation() {
    run();
    CoreReport report;
    if (!job->next_report(report)) return std::nullopt;
    return report;
  }
};

TEST(Parent, AMeanCountsTheRanksOfTheRacks) {
  ParentRig rig;
  rig.push_sum(0, 0, 1, 6, 2);
  rig.push_sum(1, 0, 1, 8, 4);
  rig.push_sum(2, 0, 1, 0, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), 14 * static_cast<float>(1.0 / 7));
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "1:0@1", "2:0@1"));
  rig.push_sum(0, 0, 2, 6, 1);  // the others of it were lost
  rig.push_null(1, 0, 2, 3);
  rig.push_null(2, 0, 2, 0);  // nobody is there
  rig.run();
  EXPECT_EQ(rig.result(0), 6 * static_cast<float>(1.0 / 4));
}

TEST(Parent, WhatWasSentTwiceIsCountedOnce) {
  ParentRig rig;
  rig.push_sum(0, 0, 1, 6, 2);
  rig.push_sum(0, 0, 1, 6, 2);
  rig.push_sum(1, 0, 1, 8, 4);
  rig.push_sum(2, 0, 1, 0, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), 14 * static_cast<float>(1.0 / 7));
}

TEST(Parent, NobodysRoundChangesNothing) {
  ParentRig rig;
  for (uint32_t rank = 0; rank < 3; ++rank) rig.push_null(rank, 0, 1, 0);
  rig.run();
  EXPECT_EQ(rig.result(0), 0);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:0@1", "1:0@1", "2:0@1"));
  rig.push_sum(0, 0, 2, 6, 2);
  for (uint32_t rank = 1; rank < 3; ++rank) rig.push_null(rank, 0, 2, 0);
  rig.run();
  EXPECT_EQ(rig.result(0), 3);
  for (uint32_t rank = 0; rank < 3; ++rank) rig.push_null(rank, 0, 3, 0);
  rig.run();
  EXPECT_EQ(rig.result(0), 3);
}

void expect_stopped_by_rack_1(ParentRig& rig) {
  const std::optional<CoreReport> report = rig.violation();
  ASSERT_TRUE(report);
  EXPECT_EQ(report->type, CoreReport::kNonFinite);
  EXPECT_EQ(report->rank, 1u);
  EXPECT_THAT(rig.take_posts(), IsEmpty());
}

// As in one box, where the last rank's NaN ends the job.
TEST(Parent, ARoundOfWhichAllAreLeftOutStopsTheJob) {
  for (const OnNonFinite policy : {OnNonFinite::kStop, OnNonFinite::kExclude}) {
    ParentRig rig(true, policy);
    rig.push_null(0, 0, 1, 0);
    rig.push_null(1, 0, 1, kNoneLeft);
    rig.push_null(2, 0, 1, 0);
    expect_stopped_by_rack_1(rig);
  }
}

// Ranks are to be left out in no rack of such a job.
TEST(Parent, ARackThatLeavesItsRanksOutStopsAJobThatIsToStop) {
  for (const OnNonFinite policy : {OnNonFinite::kStop, OnNonFinite::kPass}) {
    ParentRig rig(true, policy);
    rig.push_sum(0, 0, 1, 6, 2);
    rig.push_null(1, 0, 1, kNoneLeft);
    rig.push_null(2, 0, 1, 1);
    expect_stopped_by_rack_1(rig);
  }
}

// It has found whose gradient it was, and left that out: what is not finite now is a sum.
TEST(Parent, ARackIsNotLeftOut) {
  ParentRig rig(true, OnNonFinite::kExclude);
  rig.push_sum(0, 0, 1, 6, 2);
  rig.push_sum(1, 0, 1, INFINITY, 4);
  rig.push_sum(2, 0, 1, 1, 1);
  const std::optional<CoreReport> report = rig.violation();
  ASSERT_TRUE(report);
  EXPECT_EQ(report->type, CoreReport::kNonFinite);
  EXPECT_EQ(report->rank, 1u);
}

TEST(Parent, OthersGoOnWithoutARackOfWhichAllAreLeftOut) {
  ParentRig rig(true, OnNonFinite::kExclude);
  rig.push_null(1, 0, 1, kNoneLeft);
  rig.push_sum(0, 0, 1, 6, 2);
  rig.push_null(2, 0, 1, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), 6 * static_cast<float>(1.0 / 3));
}

TEST(Parent, NumbersOfRanksThatCannotBeAreViolations) {
  for (const uint32_t participants : {0u, 3u, ~0u}) {
    ParentRig rig;
    rig.push_sum(0, 1, 1, 1, participants);
    const std::optional<CoreReport> report = rig.violation();
    ASSERT_TRUE(report) << participants;
    EXPECT_EQ(report->type, CoreReport::kViolation);
    EXPECT_EQ(report->violation, CoreReport::kParticipants);
    EXPECT_EQ(report->said, participants);
  }
  ParentRig rig;
  rig.push_null(2, 1, 1, 2);
  EXPECT_EQ(rig.violation().value().violation, CoreReport::kParticipants);
}

TEST(Parent, AGradientWithoutItsTrailerIsAViolation) {
  ParentRig rig;
  rig.send(0, {0, 1, ImmKind::kData}, kElements * 4, 0);
  EXPECT_EQ(rig.violation().value().violation, CoreReport::kBytes);
  rig.send(1, {0, 1, ImmKind::kNull}, 0, 0);
  EXPECT_EQ(rig.violation().value().violation, CoreReport::kBytes);
  rig.send(2, {0, 1, ImmKind::kNull}, 4, 0);
  EXPECT_EQ(rig.violation().value().violation, CoreReport::kPlace);
}

// --- the rack ------------------------------------------------------------------------------------

class FakeUplink : public Endpoint {
 public:
  size_t poll(std::span<Arrival> out) override {
    size_t n = 0;
    while (n < out.size() && !inbox.empty()) out[n++] = inbox.pop_front();
    return n;
  }
  bool post(QueuePair to, const Write& write) override {
    if (room == 0 || full_queue == to.queue) return false;
    --room;
    posted.emplace_back(to.queue, write);
    return true;
  }
  void flush() override { flushed = posted.size(); }
  bool arm(std::span<const uint32_t>) override { return inbox.empty(); }
  void disarm() override {}
  int wake_fd() const override { return -1; }

  testing::Inbox inbox;
  std::vector<std::pair<uint32_t, Write>> posted;
  size_t flushed = 0;
  uint64_t refused_for_ns() const override { return refused_ns; }

  size_t room = ~size_t{0};
  uint32_t full_queue = ~0u;
  uint64_t refused_ns = 0;
};

const std::vector<uint32_t> kRanks = {0, 1, 2};

struct HasUplink {
  FakeUplink uplink;
  std::vector<std::byte> up_sums = std::vector<std::byte>(4 * kStride * 4);
  std::vector<std::byte> up_results = std::vector<std::byte>(4 * kStride * 4);
};

// The chunks lie at the parent in reverse order, in two queues.
class RackRig : public HasUplink, public testing::CoreJobRig {
 public:
  explicit RackRig(JobParameters parameters = {}, std::vector<uint32_t> expected = {0, 1, 2},
                   std::vector<int32_t> priorities = {})
      : BasicCoreJobRig(with_uplink(*this, std::move(parameters), std::move(expected),
                                    std::move(priorities))) {}

  // The parent has the result of the chunk's round.
  void answer(uint32_t chunk, uint64_t round, float value) {
    const uint32_t at = 3 - chunk;
    auto* to = reinterpret_cast<float*>(up_results.data()) + at * kStride;
    std::fill_n(to, kElements, value);
    uplink.inbox.push_back({.queue = at / 2,
                            .imm = encode({at % 2, low8(round), ImmKind::kData}),
                            .bytes = kElements * 4,
                            .offset = at * kStride * 4});
    run();
  }
  void answer_all(uint64_t round, float value) {
    for (uint32_t chunk = 0; chunk < 4; ++chunk) answer(chunk, round, value);
    take_posts();
  }
  // What went up since the last call: "chunk@round=sum/participants", n: null, i: initial.
  std::vector<std::string> take_sent() {
    run();
    std::vector<std::string> out;
    for (const auto& [queue, write] : std::exchange(uplink.posted, {})) {
      const Imm imm = decode(write.imm);
      const uint32_t at = queue * 2 + imm.chunk;
      const auto* slot = reinterpret_cast<const float*>(up_sums.data()) + at * kStride;
      uint32_t participants = 0;
      std::memcpy(&participants, slot + kElements, sizeof participants);
      EXPECT_EQ(write.remote_offset, kAbove + write.local_offset);
      if (imm.kind == ImmKind::kInitial) {
        EXPECT_EQ(write.bytes, kElements * 4);
        out.push_back(fmt::format("{}i={}", 3 - at, slot[0]));
      } else if (imm.kind == ImmKind::kNull) {
        EXPECT_EQ(write.local_offset, (at * kStride + kElements) * 4);
        EXPECT_EQ(write.bytes, 4u);
        out.push_back(fmt::format("{}@{}n/{}", 3 - at, imm.round, participants));
      } else if (imm.kind == ImmKind::kControl) {
        EXPECT_EQ(write.bytes, 0u);
        out.push_back(fmt::format("{}?{}", 3 - at, imm.round));
      } else {
        EXPECT_EQ(write.local_offset, at * kStride * 4);
        EXPECT_EQ(write.bytes, kElements * 4 + 4);
        out.push_back(fmt::format("{}@{}={}/{}", 3 - at, imm.round, slot[0], participants));
      }
    }
    return out;
  }

 private:
  static Options with_uplink(HasUplink& up, JobParameters parameters,
                             std::vector<uint32_t> expected, std::vector<int32_t> priorities) {
    parameters.max_ranks = 3;
    parameters.has_parent = true;
    if (parameters.first_round == 0) parameters.first_round = 1;
    return {.parameters = parameters,
            .elements = kElements,
            .stride = kStride,
            .expected = std::move(expected),
            .priorities = std::move(priorities),
            .make_lock_step = [&up](const Stages& stages) {
              CoreUplink uplink{.endpoint = &up.uplink,
                                .sums = up.up_sums,
                                .results = up.up_results,
                                .places = {},
                                .rack_results = nullptr};
              for (uint32_t chunk = 0; chunk < 4; ++chunk) {
                const uint32_t at = 3 - chunk;
                uplink.places.push_back({.sum = at * kStride * uint64_t{4},
                                         .slot = kAbove + at * kStride * uint64_t{4},
                                         .result = at * kStride * uint64_t{4},
                                         .queue = at / 2,
                                         .index = at % 2});
              }
              uplink.rack_results = static_cast<RackRig&>(up).results.data();
              return std::make_unique<Uplinked>(stages, std::move(uplink));
            }};
  }
};

// Nobody rings when there are tokens: the core sleeps as long as the bucket says. Where a queue has
// no room, the endpoint rings, and the core also looks by itself.
TEST(Rack, WhatHasNoBudgetWaitsAndTheCoreSleeps) {
  RackRig rig;
  rig.answer_all(0, 1);
  rig.take_sent();
  rig.uplink.room = 1;
  for (uint32_t chunk = 0; chunk < 2; ++chunk) rig.push_all(kRanks, chunk, 1);
  rig.run();
  EXPECT_TRUE(rig.job->owes());
  EXPECT_EQ(rig.job->retry_ms(), 1);
  EXPECT_TRUE(rig.job->arm());
  rig.job->disarm();
  rig.uplink.refused_ns = 2'300'000;
  EXPECT_TRUE(rig.job->owes());
  EXPECT_EQ(rig.job->retry_ms(), 3);
  EXPECT_TRUE(rig.job->arm());
  rig.job->disarm();
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@1=21/3"));
  rig.uplink.room = 1;
  rig.run();
  EXPECT_THAT(rig.take_sent(), ElementsAre("1@1=21/3"));
  EXPECT_FALSE(rig.job->owes());
  EXPECT_TRUE(rig.job->arm());
}

// Chunks 3 and 2 are of the first queue.
TEST(Rack, WhatWaitsGoesByPriority) {
  RackRig rig({}, kRanks, {0, 7, 2, 5});
  rig.answer_all(0, 1);
  rig.take_sent();
  rig.uplink.room = 0;
  for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(kRanks, chunk, 1);
  rig.run();
  rig.uplink.room = 100;
  EXPECT_THAT(rig.take_sent(), ElementsAre("3@1=21/3", "2@1=21/3", "1@1=21/3", "0@1=21/3"));
}

TEST(Rack, AQueueThatWaitsHoldsUpNoOther) {
  RackRig rig;
  rig.answer_all(0, 1);
  rig.take_sent();
  rig.uplink.full_queue = 0;
  for (uint32_t chunk = 0; chunk < 4; ++chunk) rig.push_all(kRanks, chunk, 1);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@1=21/3", "1@1=21/3"));
  // Nor one that waits for the same reason as another, which goes on before it.
  rig.uplink.room = 0;
  rig.answer(0, 1, 5);
  rig.answer(1, 1, 5);
  for (uint32_t chunk = 0; chunk < 2; ++chunk) rig.push_all(kRanks, chunk, 2);
  rig.run();
  rig.uplink.room = 100;
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@2=21/3", "1@2=21/3"));
  rig.uplink.full_queue = ~0u;
  EXPECT_THAT(rig.take_sent(), ElementsAre("2@1=21/3", "3@1=21/3"));
}

TEST(Rack, ASumGoesUpAndTheResultComesDown) {
  RackRig rig;
  rig.answer_all(0, 0);
  rig.push_all(kRanks, 2, 1);
  EXPECT_THAT(rig.take_sent(), ElementsAre("2@1=21/3"));
  EXPECT_EQ(rig.uplink.flushed, 1u);
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  EXPECT_TRUE(rig.job->arm());
  rig.answer(2, 1, 42);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:2@1", "1:2@1", "2:2@1"));
  EXPECT_EQ(rig.result(2), 42);
  EXPECT_THROW(rig.answer(2, 1, 42), Error) << "no parent sends it twice";
}

TEST(Rack, NothingIsThereBeforeTheParentsFirstResult) {
  RackRig rig({.first_round = 300});
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  rig.answer(1, 299, 7);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:1@43", "1:1@43", "2:1@43"));
  EXPECT_EQ(rig.result(1), 7);
  rig.push_all(kRanks, 1, 300);
  EXPECT_THAT(rig.take_sent(), ElementsAre("1@44=21/3"));
}

TEST(Rack, NullOnlyIfNobodySentAGradient) {
  RackRig rig;
  rig.answer_all(0, 0);
  for (const uint32_t rank : kRanks) rig.arrive(rank, {0, 1, ImmKind::kNull});
  for (const uint32_t rank : {0u, 1u}) rig.arrive(rank, {1, 1, ImmKind::kNull});
  rig.push(2, 1, 1, -0.0f);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@1n/3", "1@1=-0/3"));
}

TEST(Rack, ALostRankCountsWhereItTookPart) {
  RackRig rig;
  rig.answer_all(0, 0);
  rig.push(2, 0, 1, 16);
  rig.run();
  rig.job->hold();
  rig.job->commit({.round = 1, .lost = {{.rank = 2}}});
  for (const uint32_t chunk : {0u, 1u}) rig.push_all(std::vector<uint32_t>{0, 1}, chunk, 1);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@1=21/3", "1@1=5/2"));
}

// Everybody who knew the round is gone: the parent still waits for it.
TEST(Rack, ARoundThatNobodyIsInAnyMoreIsCompletedAllTheSame) {
  RackRig rig({}, {0});
  rig.answer_all(0, 0);
  rig.push(0, 0, 1, 1);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@1=1/1"));
  rig.job->hold();
  Boundary boundary{.round = 3};
  boundary.lost.push_back({.rank = 0});
  boundary.admitted.push_back(rig.admission(1, 1, 3));
  rig.job->commit(boundary);
  EXPECT_THAT(rig.take_sent(), ElementsAre("1@1n/0", "2@1n/0", "3@1n/0"));
  rig.answer_all(1, 5);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@2n/0", "1@2n/0", "2@2n/0", "3@2n/0"));
  rig.answer(0, 2, 6);
  EXPECT_THAT(rig.take_posts(), ElementsAre("1:0@2")) << "what its first round begins with";
  rig.push(1, 0, 3, 4);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@3=4/1"));
}

TEST(Rack, ANaNIsReportedAndGoesUp) {
  RackRig rig;
  rig.answer_all(0, 0);
  rig.push(0, 0, 1, 1);
  rig.push(1, 0, 1, NAN);
  rig.push(2, 0, 1, 1);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@1=nan/3"));
  EXPECT_THAT(rig.take_reports(), ElementsAre("nonfinite 1 chunk 3 @1"));
}

TEST(Rack, WhoseGradientsAreExcludedIsNotCounted) {
  RackRig rig({.on_nonfinite = OnNonFinite::kExclude});
  rig.answer_all(0, 0);
  rig.push(0, 0, 1, 1);
  rig.push(1, 0, 1, INFINITY);
  rig.push(2, 0, 1, 16);
  for (const uint32_t rank : kRanks) rig.push(rank, 1, 1, NAN);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@1=17/2", fmt::format("1@1n/{}", kNoneLeft)));
}

TEST(Rack, InitialParametersGoUpOnce) {
  RackRig rig({.initial_broadcast = true});
  rig.push(0, 1, 0, 9);
  rig.endpoint.inbox.clear();
  rig.arrive(0, {1, 0, ImmKind::kInitial});
  EXPECT_THAT(rig.take_sent(), ElementsAre("1i=9"));
  EXPECT_THAT(rig.take_posts(), IsEmpty()) << "the result is the answer";
  rig.arrive(0, {1, 0, ImmKind::kInitial});  // sent again
  EXPECT_THAT(rig.take_sent(), IsEmpty());
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  rig.answer(1, 0, 9);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:1@0", "1:1@0", "2:1@0"));
}

TEST(Rack, AfterABrokenConnectionWhatWasNotAnsweredIsSentAgain) {
  RackRig rig;
  rig.answer_all(0, 0);
  for (const uint32_t chunk : {0u, 1u}) rig.push_all(kRanks, chunk, 1);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@1=21/3", "1@1=21/3"));
  rig.answer(0, 1, 1);
  rig.take_posts();
  rig.uplink.inbox.push_back({.ok = false});
  rig.push_all(kRanks, 2, 1);
  EXPECT_THAT(rig.take_sent(), IsEmpty());
  EXPECT_THAT(rig.take_reports(), ElementsAre("parent nobody"));
  EXPECT_TRUE(rig.job->arm());
  rig.job->detach(CoreReport::kNoRank);
  rig.job->reattach(CoreReport::kNoRank, 0);
  EXPECT_THAT(rig.take_sent(), ElementsAre("2@1=21/3", "1@1=21/3")) << "queue by queue";
  rig.answer(2, 1, 3);
  EXPECT_THAT(rig.take_posts(), ElementsAre("0:2@1", "1:2@1", "2:2@1"));
}

TEST(Rack, AfterABrokenConnectionFirstResultsAreAskedFor) {
  RackRig rig({.first_round = 300});
  rig.answer(1, 299, 7);
  rig.take_posts();
  rig.uplink.inbox.push_back({.ok = false});
  rig.run();
  rig.job->detach(CoreReport::kNoRank);
  rig.job->reattach(CoreReport::kNoRank, 0);
  EXPECT_THAT(rig.take_sent(), ElementsAre("2?43", "3?43", "0?43"));
}

TEST(Rack, WhatFindsNoRoomWaits) {
  RackRig rig;
  rig.answer_all(0, 0);
  rig.uplink.room = 1;
  for (const uint32_t chunk : {0u, 1u, 2u}) rig.push_all(kRanks, chunk, 1);
  EXPECT_THAT(rig.take_sent(), ElementsAre("0@1=21/3"));
  EXPECT_TRUE(rig.job->owes()) << "what waits is tried again, whoever rings";
  rig.uplink.room = 2;
  EXPECT_THAT(rig.take_sent(), ElementsAre("2@1=21/3", "1@1=21/3"));
}

TEST(Rack, AnAnswerThatMakesNoSenseEndsTheJob) {
  const auto refused = [](const Arrival& arrival) {
    RackRig rig;
    rig.answer_all(0, 0);
    rig.uplink.inbox.push_back(arrival);
    EXPECT_THROW(rig.run(), Error);
  };
  const uint32_t data = encode({0, 0, ImmKind::kData});
  refused({.queue = 7, .imm = data});
  refused({.queue = 0, .imm = encode({9, 0, ImmKind::kData})});
  refused({.queue = 0, .imm = encode({0, 5, ImmKind::kData}), .bytes = kElements * 4, .offset = 0});
  refused({.queue = 0, .imm = data, .bytes = 8, .offset = 0});
  refused({.queue = 0, .imm = data, .bytes = kElements * 4, .offset = 128});
  refused({.queue = 0, .imm = encode({0, 0, ImmKind::kControl}), .bytes = 0});
  refused({.ok = false, .violation = true});
}

}  // namespace core_job_racks_test
}  // namespace phub

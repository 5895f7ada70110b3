// In which order a session sends what waits, on each NIC by itself; and what it carries over.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "tests/worker/session_rig.h"
#include "transport/error.h"
#include "worker/memory/magnitude.h"

namespace phub {
namespace send_order_test {

using ::testing::ElementsAre;
using testing::reply_of;
using ::testing::UnorderedElementsAre;
using testing::Wire;

void answer(Wire& wire, Session& session, const std::vector<uint32_t>& chunks, uint32_t round) {
  for (const uint32_t chunk : chunks) {
    wire.arrivals.push_back({.imm = encode({chunk, round, ImmKind::kData})});
  }
  session.poll();
}

constexpr uint32_t kKeys = 5;
const std::vector<uint32_t> kAll = {0, 1, 2, 3, 4};

// What goes first of keys with these priorities, pushed one after another with these magnitudes.
std::vector<uint32_t> sent(SendOrder order, const std::string& job = "job", uint32_t rank = 0,
                           uint32_t round = 1) {
  Wire wire;
  JoinReply reply = reply_of({0, 5, -2, 5, 3});
  reply.spec.name = job;
  reply.rank = rank;
  reply.first_round = round;
  Session session(reply, wire, order);
  answer(wire, session, kAll, low8(round - 1));
  const std::vector<float> magnitudes = {0.5, 0, 1e-20, 30, 0.5};
  for (uint32_t key = 0; key < kKeys; ++key) {
    session.push(key, 0, false, {&magnitudes[key], 1});
  }
  EXPECT_TRUE(wire.posted.empty());
  wire.room = true;
  session.poll();
  return wire.posted;
}

TEST(SendOrder, IsThatOfTheSession) {
  EXPECT_THAT(sent(SendOrder::kPriority), ElementsAre(1, 3, 4, 0, 2));
  EXPECT_THAT(sent(SendOrder::kFifo), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(sent(SendOrder::kMagnitude), ElementsAre(3, 0, 4, 2, 1));
}

TEST(SendOrder, AtRandomDependsOnJobRankAndRoundAlone) {
  const auto first = sent(SendOrder::kRandom);
  EXPECT_THAT(first, UnorderedElementsAre(0, 1, 2, 3, 4));
  EXPECT_EQ(first, sent(SendOrder::kRandom));
  std::set<std::vector<uint32_t>> orders;
  for (uint32_t round = 1; round <= 20; ++round)
    orders.insert(sent(SendOrder::kRandom, "job", 0, round));
  EXPECT_GT(orders.size(), 10u);
  orders.clear();
  for (uint32_t rank = 0; rank < 20; ++rank) orders.insert(sent(SendOrder::kRandom, "job", rank));
  EXPECT_GT(orders.size(), 10u);
  orders.clear();
  for (char job = 'a'; job < 'u'; ++job) orders.insert(sent(SendOrder::kRandom, {job}));
  EXPECT_GT(orders.size(), 10u);
}

// A NIC without budget does not hold the others up.
TEST(SendOrder, IsOfEachNicByItself) {
  Wire wire;
  wire.nics = {"a", "b"};
  JoinReply reply = reply_of({9, 8, 1, 2});
  reply.layout.queue_chunks = {{0, 1}, {2, 3}};
  Session session(reply, wire);
  wire.room = true;
  for (const uint32_t queue : {0u, 1u}) {
    for (const uint32_t chunk : {0u, 1u}) {
      wire.arrivals.push_back({.queue = queue, .imm = encode({chunk, 0, ImmKind::kData})});
    }
  }
  session.poll();
  ASSERT_TRUE(session.all_ready());
  wire.full_nic = "a";
  wire.refused_ns = 1'500'000;
  EXPECT_EQ(session.room_in().count(), 0) << "nothing waits";
  for (size_t key = 0; key < 4; ++key) session.push(key, 0, false);
  EXPECT_THAT(wire.posted, ElementsAre(0, 1));  // of queue 1
  EXPECT_TRUE(session.waits_for_room());
  EXPECT_EQ(session.room_in(), std::chrono::nanoseconds(1'500'000));
  wire.full_nic = "none";
  session.poll();
  EXPECT_THAT(wire.posted, ElementsAre(0, 1, 0, 1));
  EXPECT_FALSE(session.waits_for_room());
}

TEST(SendOrder, WordsAreChecked) {
  EXPECT_EQ(parse_send_order("magnitude"), SendOrder::kMagnitude);
  EXPECT_THROW(parse_send_order("Magnitude"), Error);
  EXPECT_THROW(parse_send_order(""), Error);
}

// Three keys, of which the first was sent when room ended.
class CarryOver : public ::testing::Test {
 protected:
  CarryOver() : session_(reply_of({3, 2, 1}), wire_) {
    wire_.refused_ns = 1;  // a budget holds back what has no room
    answer(wire_, session_, {0, 1, 2}, 0);
    push(1);
  }
  void push(uint32_t round) {
    wire_.room = true;
    session_.push(0, 0, false);
    wire_.room = false;
    session_.push(1, 0, false);
    session_.push(2, 0, false);
    round_ = round;
  }
  void carry(size_t key, uint32_t most = 1) {
    session_.carry_over(key, most, [this](size_t k, const ChunkLayout& chunk, size_t offset) {
      EXPECT_EQ(chunk.key, k);
      EXPECT_EQ(offset, 0u);
      if (k == refused_) return false;
      kept_.push_back(k);
      return true;
    });
  }
  void finish() {
    wire_.room = true;
    session_.poll();
    answer(wire_, session_, {0, 1, 2}, round_);
    ASSERT_TRUE(session_.all_ready()) << session_.problem();
    wire_.posted.clear(), wire_.imms.clear(), kept_.clear();
  }
  std::vector<ImmKind> kinds() const {
    std::vector<ImmKind> kinds;
    for (const Imm& imm : wire_.imms) kinds.push_back(imm.kind);
    return kinds;
  }

  Wire wire_;
  Session session_;
  uint32_t round_ = 0;
  std::vector<size_t> kept_;
  size_t refused_ = 99;
};

TEST_F(CarryOver, WhatWaitsBecomesANullThatGoesFirst) {
  carry(2);
  EXPECT_THAT(kept_, ElementsAre(2));
  wire_.room = true;
  session_.poll();
  EXPECT_THAT(wire_.posted, ElementsAre(0, 2, 1));
  EXPECT_THAT(kinds(), ElementsAre(ImmKind::kData, ImmKind::kNull, ImmKind::kData));
  EXPECT_EQ(session_.chunks_carried_over(), 1u);
}

TEST_F(CarryOver, WhatWasSentStaysSent) {
  carry(0);
  EXPECT_TRUE(kept_.empty());
  // Also if nobody knows whether it arrived: what is sent again has the same bytes.
  wire_.arrivals.push_back({.ok = false});
  session_.poll();
  session_.resend();
  carry(Session::kAllKeys);
  EXPECT_THAT(kept_, UnorderedElementsAre(1, 2));
  wire_.room = true;
  session_.poll();
  EXPECT_THAT(wire_.imms.back(), (Imm{0, 1, ImmKind::kData}));
}

TEST_F(CarryOver, EndsAfterSoManyRoundsAndBeginsAnewWhenTheChunkWasSent) {
  for (const bool again : {false, true}) {
    for (uint32_t round = 1; round <= 2; ++round) {
      carry(1, 2);
      EXPECT_THAT(kept_, ElementsAre(1)) << again << round;
      finish();
      push(round_ + 1);
    }
    carry(1, 2);
    EXPECT_TRUE(kept_.empty()) << "it must go now";
    finish();
    push(round_ + 1);
  }
}

TEST_F(CarryOver, WhatCannotBeKeptIsSent) {
  refused_ = 1;
  carry(Session::kAllKeys);
  EXPECT_THAT(kept_, ElementsAre(2));
  wire_.room = true;
  session_.poll();
  EXPECT_THAT(kinds(), ElementsAre(ImmKind::kData, ImmKind::kNull, ImmKind::kData));
}

TEST_F(CarryOver, LeavesNullsOfTheCallerAlone) {
  finish();
  session_.push(1, 0, true);
  wire_.room = false;
  session_.push(0, 0, true);
  carry(Session::kAllKeys);
  EXPECT_TRUE(kept_.empty());
}

// Of keys in several chunks, in plain and coded formats, against sums of squares.
TEST(Magnitude, IsRelativeToTheParametersOfTheChunk) {
  Wire wire;
  JoinReply reply;
  reply.spec.name = "job";
  reply.spec.chunk_elements = 32;
  reply.spec.keys = {{.name = "a", .elements = 70}};
  reply.layout.queue_chunks = {{0, 1, 2}};
  reply.layout.key_offset = {0};
  reply.layout.total_elements = 96;
  Session session(reply, wire);
  std::vector<float> gradient(70), parameters(70);
  std::ranges::fill(std::span(gradient).first(32), 3.0F);
  std::ranges::fill(std::span(parameters).first(32), 2.0F);
  gradient[40] = 8;
  parameters[63] = 16;
  const auto bytes = [](const auto& v) { return reinterpret_cast<const std::byte*>(v.data()); };
  std::vector<float> found;
  relative_magnitudes(session, 0, {bytes(gradient)}, {bytes(parameters)}, found);
  EXPECT_THAT(found, ElementsAre(1.5F, 0.5F, 0.0F));
  relative_magnitudes(session, 0, {bytes(gradient)}, {}, found);
  EXPECT_THAT(found, ElementsAre(std::sqrt(288.0F), 8.0F, 0.0F));
  gradient[69] = 1;  // its parameters are zero
  gradient[0] = std::numeric_limits<float>::quiet_NaN();
  std::vector<uint16_t> half(70);
  kernels::convert(gradient.data(), kernels::DType::kF32, half.data(), kernels::DType::kBF16, 70);
  relative_magnitudes(session, 0, {bytes(half), kernels::DType::kBF16}, {bytes(parameters)}, found);
  const float infinite = std::numeric_limits<float>::infinity();
  EXPECT_THAT(found, ElementsAre(infinite, 0.5F, infinite));
}

}  // namespace send_order_test
}  // namespace phub

// What waits for room goes out by priority: that of the key, with that of the push on top; initial
// parameters and what is sent again by that of the key. And which links a session refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/worker/session_rig.h"
#include "transport/error.h"

namespace phub {
namespace priority_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::reply_of;
using testing::Wire;

void answer(Wire& wire, Session& session, uint32_t keys, uint32_t round) {
  for (uint32_t k = 0; k < keys; ++k) {
    wire.arrivals.push_back({.imm = encode({k, round, ImmKind::kData})});
  }
  session.poll();
}

TEST(Priority, OfTheKeyAndOfThePushAreAdded) {
  Wire wire;
  Session session(reply_of({0, 5, -2, 5, 3}), wire);
  answer(wire, session, 5, 0);
  ASSERT_TRUE(session.all_ready());
  session.push(0, 0, false);
  session.push(1, 0, false);
  session.push(2, 9, false);  // 7
  session.push(3, 0, false);  // as key 1, which was pushed before
  session.push(4, 1, true);   // 4
  EXPECT_THAT(wire.posted, ElementsAre());
  wire.room = true;
  session.poll();
  EXPECT_THAT(wire.posted, ElementsAre(2, 1, 3, 4, 0));

  // Once more, after the connection broke: by the keys alone.
  wire.posted.clear();
  wire.arrivals.push_back({.ok = false});
  session.poll();
  ASSERT_TRUE(session.broken());
  session.resend();
  EXPECT_THAT(wire.posted, ElementsAre(1, 3, 4, 0, 2));
}

// Who computes after its pushes does not poll for a while.
TEST(Priority, WhatAFlushMakesRoomForGoesAtOnce) {
  Wire wire;
  wire.room = true;
  Session session(reply_of({0, 0, 0, 0, 0}), wire);
  answer(wire, session, 5, 0);
  wire.room_until_flush = 2;
  for (uint32_t key = 0; key < 5; ++key) session.push(key, 0, false);
  EXPECT_THAT(wire.posted, ElementsAre(0, 1, 2, 3, 4));
}

TEST(Priority, OfTheKeyIsThatOfItsInitialParameters) {
  Wire wire;
  JoinReply reply = reply_of({1, 2, 3});
  reply.send_initial = true;
  Session session(reply, wire);
  const std::vector<float> initial(32);
  session.send_initial([&](size_t) { return initial.data(); });
  wire.room = true;
  session.poll();
  EXPECT_THAT(wire.posted, ElementsAre(2, 1, 0));
}

// While its queues are made anew, nothing is posted into them.
TEST(Priority, WhatIsPushedWhileTheConnectionIsMadeAgainWaitsForIt) {
  Wire wire;
  wire.room = true;
  Session session(reply_of({1, 2, 3}), wire);
  answer(wire, session, 3, 0);
  session.push(0, 0, false);
  ASSERT_THAT(wire.posted, ElementsAre(0));
  session.suspend();
  session.push(1, 0, false);
  session.push(2, 0, true);
  session.poll();
  EXPECT_THAT(wire.posted, ElementsAre(0));
  session.resend();
  EXPECT_THAT(wire.posted, ElementsAre(0, 2, 1, 0));  // 0 once more: what became of it is unknown
}

TEST(Session, RefusesALinkThatIsSmallerThanItsJob) {
  constexpr size_t kSlot = 32 * sizeof(float);
  const auto refusal = [](size_t gradients, size_t results) -> std::string {
    Wire wire(gradients, results);
    try {
      Session session(reply_of({0, 0, 0}), wire);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(3 * kSlot, 3 * kSlot), "");
  EXPECT_THAT(refusal(2 * kSlot, 3 * kSlot), HasSubstr("contradicts itself: 256 bytes"));
  EXPECT_THAT(refusal(3 * kSlot, 3 * kSlot - 1), HasSubstr("383 of results for 96 elements"));
}

TEST(Session, RefusesARankThatItsJobDoesNotHave) {
  JoinReply reply = reply_of({0});
  reply.spec.consistency = "async";
  reply.spec.max_ranks = 2;
  reply.rank = 1;
  EXPECT_EQ(link_layout_of(reply).result_copy, 1u);
  reply.rank = 2;
  EXPECT_THROW(link_layout_of(reply), Error);
}

// Sums that no 32 bits hold.
TEST(Priority, MayBeAsLargeAsItsTypeAllows) {
  Wire wire;
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  Session session(reply_of({kMin, kMax, 0}), wire);
  answer(wire, session, 3, 0);
  session.push(0, kMin, false);
  session.push(1, kMax, false);
  session.push(2, 0, false);
  wire.room = true;
  session.poll();
  EXPECT_THAT(wire.posted, ElementsAre(1, 2, 0));
}

}  // namespace priority_test
}  // namespace phub

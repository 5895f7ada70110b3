// A session whose chunks share slots at the box: what it sends, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/worker/session_rig.h"

namespace phub {
namespace session_slots_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::reply_of;
using testing::Wire;

// Keys of a chunk each: chunk c has slot c % 2.
struct Worker {
  explicit Worker(const std::vector<int32_t>& priorities) : session(reply(priorities), wire) {
    wire.room = true;
    std::vector<Arrival> first;
    for (uint32_t chunk = 0; chunk < priorities.size(); ++chunk) first.push_back(result(chunk, 0));
    arrive(first);
  }
  static JoinReply reply(const std::vector<int32_t>& priorities) {
    JoinReply reply = reply_of(priorities);
    reply.layout.queue_offset = {0};
    reply.layout.queue_slots = {0};
    reply.layout.queue_shares = {2};
    return reply;
  }
  static Arrival result(uint32_t chunk, uint32_t round) {
    return {.imm = encode({chunk, round, ImmKind::kData})};
  }
  static Arrival taken(uint32_t chunk, uint32_t round) {
    return {.imm = encode({chunk, round, ImmKind::kInitial}), .bytes = 0};
  }
  void arrive(const std::vector<Arrival>& arrivals) {
    wire.arrivals = arrivals;
    session.poll();
  }
  void push_all(bool null = false) {
    for (size_t key = 0; key < session.keys(); ++key) session.push(key, 0, null);
  }
  std::vector<uint32_t> posted() { return std::exchange(wire.posted, {}); }

  Wire wire;
  Session session;
};

TEST(SessionSlots, AChunkIsSentWhenTheResultOfTheOneInItsSlotIsHere) {
  Worker worker({0, 0, 0, 0, 0});
  worker.push_all();
  EXPECT_THAT(worker.posted(), ElementsAre(0, 1));
  EXPECT_TRUE(worker.session.waits_for_room()) << "any arrival is to wake the worker";
  worker.arrive({Worker::result(1, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(3));
  worker.arrive({Worker::result(0, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(2));
  worker.arrive({Worker::result(3, 1), Worker::result(2, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(4));
  EXPECT_FALSE(worker.session.waits_for_room());
  worker.arrive({Worker::result(4, 1)});
  EXPECT_TRUE(worker.session.all_ready());
}

TEST(SessionSlots, TheFirstInTheOrderHasTheSlotNext) {
  Worker worker({0, 0, 1, 0, 2});
  worker.push_all();
  EXPECT_THAT(worker.posted(), ElementsAre(0, 1));
  worker.arrive({Worker::result(0, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(4));
  worker.arrive({Worker::result(4, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(2));
}

// Or other ranks, which wait for the results of this round, would send nothing of the next one.
TEST(SessionSlots, AnEarlierRoundHasTheSlotBeforeALaterOne) {
  Worker worker({2, 0, 0, 0, 0});
  worker.push_all();
  EXPECT_THAT(worker.posted(), ElementsAre(0, 1));
  worker.arrive({Worker::taken(0, 1), Worker::result(0, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(2));
  worker.session.push(0, 0, false);
  worker.arrive({Worker::result(2, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(4));
  worker.arrive({Worker::result(4, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(0));
}

// Once a slot is free it belongs to the first that waits for it, though there is no room yet.
TEST(SessionSlots, WhoseTurnItIsIsNotOvertaken) {
  Worker worker({2, 0, 0});
  worker.push_all();
  EXPECT_THAT(worker.posted(), ElementsAre(0, 1));
  worker.wire.room = false;
  worker.arrive({Worker::result(0, 1)});
  worker.session.push(0, 0, false);
  worker.wire.room = true;
  worker.arrive({});
  EXPECT_THAT(worker.posted(), ElementsAre(2));
  worker.arrive({Worker::result(2, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(0));
}

// What finds no room in a queue has no slot yet.
TEST(SessionSlots, WhatWaitsForRoomIsOvertakenInItsSlot) {
  Worker worker({0, 0, 1});
  worker.wire.room = false;
  worker.push_all();
  worker.wire.room = true;
  worker.arrive({});
  EXPECT_THAT(worker.posted(), ElementsAre(2, 1));
  worker.arrive({Worker::result(2, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(0));
}

// The next one for a slot is left to a later round before it is sent: the one behind it goes on,
// without the null's result. (That may wait for other ranks, and they for this one.)
TEST(SessionSlots, WhoDoesNotNeedTheSlotAfterAllHoldsUpNobody) {
  Worker worker({0, 0, 2, 0, 1});
  worker.push_all();
  EXPECT_THAT(worker.posted(), ElementsAre(0, 1));
  worker.wire.room = false;
  worker.wire.refused_ns = 1;
  worker.arrive({Worker::result(0, 1)});
  worker.session.carry_over(2, 1, [](size_t, const ChunkLayout&, size_t) { return true; });
  worker.wire.room = true;
  worker.arrive({});
  EXPECT_THAT(worker.posted(), ElementsAre(2, 4)) << "the first as a null";
  worker.arrive({Worker::result(2, 1)});
  EXPECT_THAT(worker.posted(), IsEmpty());
  worker.arrive({Worker::taken(4, 1), Worker::result(4, 1)});
  EXPECT_FALSE(worker.session.broken()) << worker.session.problem();
}

TEST(SessionSlots, AGradientThatWasTakenLeavesTheSlot) {
  Worker worker({0, 0, 0, 0});
  worker.push_all();
  EXPECT_THAT(worker.posted(), ElementsAre(0, 1));
  worker.arrive({Worker::taken(0, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(2));
  EXPECT_FALSE(worker.session.ready(0)) << "its result is to come";
  worker.arrive({Worker::result(0, 1)});
  EXPECT_TRUE(worker.session.ready(0));
  EXPECT_THAT(worker.posted(), IsEmpty());
}

// What the box said of an earlier round came late; or it says it twice.
TEST(SessionSlots, WhatIsSaidOfAnotherRoundChangesNothing) {
  Worker worker({0, 0, 0, 0});
  worker.push_all();
  worker.posted();
  worker.arrive({Worker::taken(0, 0), Worker::taken(1, 2), Worker::taken(2, 1)});
  EXPECT_THAT(worker.posted(), IsEmpty());
  worker.arrive({Worker::taken(0, 1), Worker::taken(0, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(2));
  worker.arrive({Worker::result(0, 1), Worker::taken(0, 1)});
  EXPECT_THAT(worker.posted(), IsEmpty());
  EXPECT_FALSE(worker.session.broken()) << worker.session.problem();
}

TEST(SessionSlots, ANullNeedsNone) {
  Worker worker({0, 0, 0, 0});
  worker.push_all(true);
  EXPECT_THAT(worker.posted(), ElementsAre(0, 1, 2, 3));
}

// The box has what was accepted elsewhere, and everything is sent once more, one at a time.
TEST(SessionSlots, AfterAReconnectionAllSlotsAreFree) {
  Worker worker({0, 0, 0, 0});
  worker.push_all();
  worker.posted();
  worker.arrive({Worker::taken(0, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(2));
  worker.session.suspend();
  worker.session.resend();
  EXPECT_THAT(worker.posted(), ElementsAre(0, 1));
  worker.arrive({Worker::taken(0, 1)});
  EXPECT_THAT(worker.posted(), ElementsAre(2));
}

TEST(SessionSlots, InitialParametersHaveTheSlotUntilTheyAreThere) {
  Wire wire;
  wire.room = true;
  JoinReply reply = Worker::reply({0, 0, 0});
  reply.send_initial = true;
  Session session(reply, wire);
  const std::vector<float> initial(32);
  session.send_initial([&](size_t) { return initial.data(); });
  EXPECT_THAT(std::exchange(wire.posted, {}), ElementsAre(0, 1));
  wire.arrivals = {Worker::result(0, 0)};
  session.poll();
  EXPECT_THAT(std::exchange(wire.posted, {}), ElementsAre(2));
}

}  // namespace session_slots_test
}  // namespace phub

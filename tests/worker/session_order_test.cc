// What comes from the box comes in any order: verdicts on gated rounds before or after the results,
// and after a reconnection only what the worker has asked for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "tests/worker/session_rig.h"

namespace phub {
namespace session_order_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::reply_of;
using testing::Wire;

constexpr uint32_t kKeys = 3;

JoinReply gated() {
  JoinReply reply = reply_of({0, 0, 0});
  reply.spec.on_nonfinite = "skip";
  return reply;
}

Arrival result(uint32_t chunk, uint32_t round) {
  return {.imm = encode({chunk, round, ImmKind::kData})};
}

// A worker after the first results, which has pushed round 1.
struct Worker {
  explicit Worker(const JoinReply& reply) : session(reply, wire) {
    wire.room = true;
    arrive({result(0, 0), result(1, 0), result(2, 0)});
    push();
  }
  void push() {
    for (size_t key = 0; key < kKeys; ++key) session.push(key, 0, false);
  }
  void arrive(const std::vector<Arrival>& arrivals) {
    wire.arrivals = arrivals;
    session.poll();
  }

  Wire wire;
  Session session;
};

TEST(SessionOrder, AResultCountsWhenTheVerdictOnItsRoundIsThere) {
  std::array<uint32_t, 6> order = {0, 1, 2, 3, 4, 5};  // three results, three parts of the verdict
  do {
    Worker worker(gated());
    EXPECT_FALSE(worker.session.verdict().has_value());
    for (uint64_t round = 1; round <= 3; ++round) {
      const RoundVerdict verdict{round, 0.5 / static_cast<double>(round), round == 2};
      uint32_t parts = 0, results = 0;
      for (const uint32_t which : order) {
        if (which < kKeys) {
          worker.arrive({result(which, static_cast<uint32_t>(round))});
          ++results;
        } else {
          worker.arrive({{.imm = verdict_imm(verdict, which - kKeys)}});
          ++parts;
        }
        ASSERT_FALSE(worker.session.broken()) << worker.session.problem();
        ASSERT_EQ(worker.session.outstanding(), parts < kVerdictParts ? kKeys : kKeys - results);
        if (worker.session.outstanding() < kKeys) EXPECT_EQ(worker.session.verdict(), verdict);
      }
      worker.push();
    }
  } while (std::ranges::next_permutation(order).found);
}

// What is still to come may be a part of the verdict alone.
TEST(SessionOrder, WhereAResultIsEarlyTheNextArrivalWakes) {
  Worker worker(gated());
  ASSERT_TRUE(worker.session.arm(Session::kAllKeys));
  EXPECT_THAT(worker.wire.wake_after, ElementsAre(3));
  worker.arrive({result(0, 1), result(2, 1)});
  ASSERT_TRUE(worker.session.arm(Session::kAllKeys));
  EXPECT_THAT(worker.wire.wake_after, ElementsAre(1));
  ASSERT_TRUE(worker.session.arm(1));
  EXPECT_THAT(worker.wire.wake_after, ElementsAre(1));
}

// The box sends them once more, and the first copy must not be followed by the next round.
TEST(SessionOrder, EarlyResultsAreForgottenWithTheirQueue) {
  Worker worker(gated());
  worker.arrive({result(0, 1), result(2, 1), {.ok = false}});
  ASSERT_TRUE(worker.session.broken());
  worker.wire.posted.clear();
  worker.session.resend();
  EXPECT_THAT(worker.wire.posted, ElementsAre(0, 1, 2));
  for (uint32_t part = 0; part < kVerdictParts; ++part) {
    worker.arrive({{.imm = verdict_imm({1, 2.5, false}, part)}});
  }
  EXPECT_EQ(worker.session.outstanding(), kKeys);
  worker.arrive({result(2, 1), result(0, 1), result(1, 1)});
  EXPECT_TRUE(worker.session.all_ready()) << worker.session.problem();
}

// By the round before the first, as no contribution asks for it.
// The box tells the verdict once more on the new queue: what is late of that must not come after
// the verdict on the next round.
TEST(SessionOrder, VerdictsAreForgottenWithTheirQueue) {
  Worker worker(gated());
  const RoundVerdict verdict{1, 2.5, false};
  for (uint32_t part = 0; part < kVerdictParts; ++part) {
    worker.arrive({{.imm = verdict_imm(verdict, part)}});
  }
  worker.arrive({result(0, 1), result(2, 1), {.ok = false}});
  worker.session.resend();
  worker.arrive({result(1, 1)});
  for (const uint32_t part : {2u, 0u, 1u}) {
    EXPECT_EQ(worker.session.outstanding(), 1u);
    worker.arrive({{.imm = verdict_imm(verdict, part)}});
  }
  EXPECT_TRUE(worker.session.all_ready());
  EXPECT_EQ(worker.session.verdict(), verdict);
}

TEST(SessionOrder, AfterAReconnectionFirstResultsAreAskedFor) {
  Wire wire;
  wire.room = true;
  JoinReply reply = reply_of({0, 0, 0});
  reply.first_round = 300;
  Session session(reply, wire);
  wire.arrivals = {result(1, low8(299)), {.ok = false}};
  session.poll();
  session.resend();
  EXPECT_THAT(wire.imms, ElementsAre(Imm{0, low8(299), ImmKind::kControl},
                                     Imm{2, low8(299), ImmKind::kControl}));
}

TEST(SessionOrder, OnlyWhatABudgetHoldsBackIsCarriedOver) {
  Wire wire;
  Session session(reply_of({0}), wire);
  wire.arrivals = {result(0, 0)};
  session.poll();
  session.push(0, 0, false);
  const auto carry = [&] {
    session.carry_over(0, 3, [](size_t, const ChunkLayout&, size_t) { return true; });
    return session.chunks_carried_over();
  };
  EXPECT_EQ(carry(), 0u) << "there is no room in a connection";
  wire.refused_ns = 1;
  EXPECT_EQ(carry(), 1u);
}

TEST(SessionOrder, AResultThatComesTwiceIsAnError) {
  for (const bool pushed : {false, true}) {
    Worker worker(reply_of({0, 0, 0}));
    worker.arrive({result(1, 1)});
    if (pushed) worker.session.push(1, 0, false);
    worker.arrive({result(1, 1)});
    EXPECT_TRUE(worker.session.protocol_violation());
    EXPECT_THAT(worker.session.problem(), HasSubstr("round 1 (mod 256) of chunk 1"));
  }
}

TEST(SessionOrder, AVerdictOnNoRoundIsAnError) {
  Worker worker(reply_of({0, 0, 0}));
  worker.arrive({{.imm = verdict_imm({1, 1, false}, 0)}});
  EXPECT_TRUE(worker.session.protocol_violation());
}

// What a switch that adds begins is nothing to a rank that sends directly.
TEST(SessionOrder, ABeginningOfASwitchIsNoVerdict) {
  Worker worker(gated());
  worker.arrive({{.imm = encode({0, 1 << 2 | 3, ImmKind::kControl})}});
  EXPECT_FALSE(worker.session.protocol_violation());
  EXPECT_EQ(worker.session.problem(), "");
}

}  // namespace session_order_test
}  // namespace phub

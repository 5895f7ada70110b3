// A switch that adds, in many seeded scenes: every result is the sum of all slots to the bit, of
// everyone once, whatever the network and the switch do. And the state machines, call by call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/seeds.h"
#include "tests/transport/switch_rig.h"

namespace phub::test {
namespace switch_test {

using ::testing::ElementsAre;

SwitchScene random_scene(uint64_t seed) {
  std::mt19937_64 random(seed);
  SwitchScene scene{.seed = seed};
  scene.workers = 1 + static_cast<uint32_t>(random() % 6);
  scene.slots = static_cast<uint16_t>(1 + random() % 8);
  scene.elements.clear();
  for (size_t n = 1 + random() % 6; n > 0; --n) {
    scene.elements.push_back(static_cast<uint32_t>(1 + random() % 2000));
  }
  scene.rounds = static_cast<uint32_t>(1 + random() % 5);
  const double shares[] = {0, 0.01, 0.1, 0.3};
  scene.loss = shares[random() % 4];
  scene.twice = shares[random() % 4];
  scene.late = shares[random() % 3];
  return scene;
}

// What scenes go through, and what must come of it.
struct Trouble {
  const char* name;
  uint64_t scenes;
  void (*change)(SwitchScene& scene, uint64_t seed);
  bool all_by_switch = false;                          // in every scene the switch does it all
  bool all_pass_it_by = false;                         // in every scene something goes directly
  bool some_by_switch = false, some_directly = false;  // in all scenes together
  bool is_full = false;  // the switch has fewer slots than the workers use
};
constexpr Trouble kTroubles[] = {
    // 30% on three ways, both directions: still the switch does it all.
    {.name = "Network",
     .scenes = 150,
     .change = [](SwitchScene&, uint64_t) {},
     .all_by_switch = true},
    // What it had is sent again. A worker that has the acknowledgement does not repeat it: then the
    // box has the sum, and says so.
    {.name = "ThatForgets",
     .scenes = 100,
     .change = [](SwitchScene& scene,
                  uint64_t seed) { scene.forgets_ns = 500'000 + seed % 40'000'000; },
     .some_by_switch = true},
    {.name = "ThatDies",
     .scenes = 60,
     .change =
         [](SwitchScene& scene, uint64_t seed) {
           scene.give_up_ns = 400'000'000;
           scene.dead_from_ns = seed % 8'000'000;
           scene.dead_to_ns = seed % 2 == 0 ? ~uint64_t{0} : scene.dead_from_ns + 500'000'000;
           scene.silent = seed % 3 == 0;
         },
     .some_directly = true},
    {.name = "ThatIsFull",
     .scenes = 30,
     .change =
         [](SwitchScene& scene, uint64_t) {
           scene.slots = 8;
           scene.elements.push_back(8 * 256);  // all are used
         },
     .all_pass_it_by = true,
     .is_full = true},
    {.name = "AWorkerThatIsReplaced",
     .scenes = 100,
     .change =
         [](SwitchScene& scene, uint64_t seed) {
           scene.rounds += 3;
           scene.replaced_ns = 2'000'000 + seed % 40'000'000;
         }},
    // Longer than anybody would wait for a switch that is gone.
    {.name = "AWorkerThatIsLate",
     .scenes = 20,
     .change =
         [](SwitchScene& scene, uint64_t) {
           scene.workers += 1;
           scene.straggler_ns = 2'000'000'000;
           scene.give_up_ns = 400'000'000;
           scene.loss = std::min(scene.loss, 0.1);
         },
     .all_by_switch = true},
};

class SwitchInTrouble : public ::testing::TestWithParam<Trouble> {};

TEST_P(SwitchInTrouble, EveryChunkIsTheSumOfEveryoneOnce) {
  const Trouble& trouble = GetParam();
  const auto seeds = phub::testing::fresh_seeds(trouble.scenes);
  uint64_t by_switch = 0, directly = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE("PHUB_SEED=" + std::to_string(seed));
    SwitchScene scene = random_scene(seed);
    trouble.change(scene, seed);
    PlainAdder adder(trouble.is_full ? static_cast<uint16_t>(seed % 8) : scene.slots);
    const SwitchOutcome outcome = play(scene, adder);
    ASSERT_EQ(outcome.problem, "");
    const uint64_t chunks = scene.rounds * scene.elements.size();
    ASSERT_EQ(outcome.closed_by_switch + outcome.closed_directly, chunks);
    if (trouble.all_by_switch) {
      ASSERT_EQ(outcome.closed_directly, 0u);
      ASSERT_EQ(outcome.generations, 1u);
    }
    if (trouble.all_pass_it_by) {
      ASSERT_GT(outcome.closed_directly, 0u);
    }
    by_switch += outcome.closed_by_switch;
    directly += outcome.closed_directly;
  }
  EXPECT_TRUE(!trouble.some_by_switch || by_switch > 0);
  EXPECT_TRUE(!trouble.some_directly || directly > 0 || seeds.count == 1);
}

INSTANTIATE_TEST_SUITE_P(Every, SwitchInTrouble, ::testing::ValuesIn(kTroubles),
                         [](const auto& instance) { return instance.param.name; });

TEST(Switch, WithoutLossNothingIsRepeated) {
  SwitchScene scene{.seed = phub::testing::fresh_seeds(1).first};
  PlainAdder adder(scene.slots);
  const SwitchOutcome outcome = play(scene, adder);
  ASSERT_EQ(outcome.problem, "");
  EXPECT_EQ(outcome.repeats, 0u);
}

// --- Call by call.

SwitchPacket part(uint8_t worker, uint32_t turn, int32_t code, uint32_t chunk = 0) {
  SwitchPacket packet{};
  packet.header = {.magic = kSwitchMagic,
                   .kind = kSwitchPart,
                   .worker = worker,
                   .generation = 1,
                   .turn = turn,
                   .chunk = chunk,
                   .next_exponent = static_cast<int16_t>(worker),
                   .workers = 3};
  std::ranges::fill(packet.codes, code);
  return packet;
}
SwitchVerdict take(PlainAdder& adder, SwitchPacket packet) { return adder.take(packet); }

TEST(SwitchSlot, AddsInTurnsAndSaysTheSumAgain) {
  PlainAdder adder(1);
  EXPECT_EQ(take(adder, part(0, 1, 5)), kSwitchAdded);
  SwitchPacket waits = part(0, 1, 5);
  EXPECT_EQ(adder.take(waits), kSwitchStill);
  EXPECT_EQ(waits.header.kind, kSwitchWaiting);
  EXPECT_EQ(waits.header.workers, 1u);
  SwitchPacket sum = part(1, 1, -7);
  EXPECT_EQ(adder.take(sum), kSwitchComplete);
  EXPECT_EQ(sum.header.kind, kSwitchSum);
  EXPECT_EQ(sum.header.next_exponent, 1);
  EXPECT_EQ(sum.header.workers, 3u);
  EXPECT_EQ(sum.codes[0], -2);
  EXPECT_EQ(sum.codes[255], -2);
  EXPECT_EQ(take(adder, part(1, 2, 1)), kSwitchAdded);
  SwitchPacket again = part(0, 1, 5);  // turn 1 is still there
  EXPECT_EQ(adder.take(again), kSwitchRepeated);
  EXPECT_EQ(0, std::memcmp(again.codes, sum.codes, sizeof sum.codes));
  EXPECT_EQ(take(adder, part(0, 2, 1)), kSwitchComplete);
  EXPECT_EQ(take(adder, part(0, 3, 1)), kSwitchAdded);
  EXPECT_EQ(take(adder, part(0, 1, 5)), kSwitchLate);
}

TEST(SwitchSlot, RefusesWhatDisagrees) {
  PlainAdder adder(1);
  EXPECT_EQ(take(adder, part(0, 1, 5)), kSwitchAdded);
  const auto wrong = [&](auto change) {
    SwitchPacket packet = part(1, 1, 5);
    change(packet.header);
    const SwitchPacket before = packet;
    EXPECT_EQ(adder.take(packet), kSwitchRefused);
    EXPECT_EQ(0, std::memcmp(&packet, &before, sizeof packet));
  };
  wrong([](SwitchHeader& h) { h.chunk = 1; });
  wrong([](SwitchHeader& h) { h.round = 1; });
  wrong([](SwitchHeader& h) { h.part = 1; });
  wrong([](SwitchHeader& h) { h.exponent = 1; });
  wrong([](SwitchHeader& h) { h.workers = 7; });
  wrong([](SwitchHeader& h) { h.workers = 1; });  // it is none of them
  wrong([](SwitchHeader& h) { h.worker = 64; });
  wrong([](SwitchHeader& h) { h.worker = 255; });
  wrong([](SwitchHeader& h) { h.slot = 1; });
  EXPECT_EQ(take(adder, part(1, 1, 5)), kSwitchComplete);
}

TEST(SwitchSlot, NumbersOutOfBoundsHaveNoSum) {
  for (const int32_t code : {4194304, -4194305, INT32_MAX, INT32_MIN}) {
    PlainAdder adder(1);
    EXPECT_EQ(take(adder, part(0, 1, code)), kSwitchAdded);
    EXPECT_EQ(take(adder, part(1, 1, 1)), kSwitchRefused);
    EXPECT_EQ(take(adder, part(0, 1, code)), kSwitchRefused);
    EXPECT_EQ(take(adder, part(0, 2, 4194303)), kSwitchAdded);  // the next turn is another
    EXPECT_EQ(take(adder, part(1, 2, -4194304)), kSwitchComplete);
  }
}

// What is late of an earlier one takes the slot, too, and adds nothing to what is sent again.
TEST(SwitchSlot, AnotherGenerationBeginsAnew) {
  PlainAdder adder(1);
  const auto newer = [](uint8_t worker) {
    SwitchPacket packet = part(worker, 1, 5);
    packet.header.generation = 2;
    return packet;
  };
  EXPECT_EQ(take(adder, part(0, 7, 1)), kSwitchAdded);
  EXPECT_EQ(take(adder, newer(0)), kSwitchAdded);
  EXPECT_EQ(take(adder, part(1, 7, 1)), kSwitchAdded);
  EXPECT_EQ(take(adder, newer(1)), kSwitchAdded);
  SwitchPacket again = newer(0);
  EXPECT_EQ(adder.take(again), kSwitchComplete);
  EXPECT_EQ(again.codes[0], 10);
}

// --- What comes to a worker from anywhere.

class NoOwner : public SwitchOwner {
 public:
  void fill(uint64_t /*chunk*/, uint32_t first, int exponent, std::span<int32_t> codes) override {
    filled.emplace_back(first, exponent);
    std::ranges::fill(codes, 1);
  }
  void send(const SwitchPacket& packet) override { sent.push_back(packet.header); }

  std::vector<std::pair<uint32_t, int>> filled;
  std::vector<SwitchHeader> sent;
};

TEST(SwitchSender, AgreesOnAnExponentOnePacketAhead) {
  NoOwner uplink;
  SwitchSender sender({.worker = 1, .workers = 3, .first_slot = 4, .slots = 1, .max_chunks = 2},
                      uplink);
  const auto acknowledge = [&](int16_t next_exponent) {
    SwitchHeader header = uplink.sent.back();
    header.kind = kSwitchTaken;
    header.next_exponent = next_exponent;
    sender.receive(header, 0);
  };
  sender.push({.round = 7, .chunk = 5, .elements = 300, .exponent = -3}, 0);
  ASSERT_EQ(uplink.sent.size(), 1u);  // exponents only: nobody has agreed yet
  EXPECT_EQ(uplink.sent[0].chunk, kSwitchNoChunk);
  EXPECT_EQ(uplink.sent[0].next_exponent, -3);
  EXPECT_EQ(uplink.sent[0].slot, 4);
  acknowledge(2);
  ASSERT_EQ(uplink.sent.size(), 2u);
  EXPECT_EQ(uplink.sent[1].chunk, 5u);
  EXPECT_EQ(uplink.sent[1].round, 7u);
  EXPECT_EQ(uplink.sent[1].exponent, 2);
  EXPECT_EQ(uplink.sent[1].next_exponent, -3);  // of the chunk's next part
  acknowledge(2);
  ASSERT_EQ(uplink.sent.size(), 3u);
  EXPECT_EQ(uplink.sent[2].part, 1);
  EXPECT_EQ(uplink.sent[2].next_exponent, kSwitchUnknown);
  EXPECT_THAT(uplink.filled, ElementsAre(std::pair(0u, 2), std::pair(256u, 2)));
  sender.push({.round = 7, .chunk = 6, .elements = 1, .exponent = kSwitchNothing}, 0);
  acknowledge(kSwitchUnknown);  // another worker did not have it either
  ASSERT_EQ(uplink.sent.size(), 4u);
  EXPECT_EQ(uplink.sent[3].chunk, kSwitchNoChunk);
  acknowledge(kSwitchNothing);
  ASSERT_EQ(uplink.sent.size(), 5u);
  EXPECT_EQ(uplink.sent[4].chunk, 6u);
  EXPECT_EQ(uplink.filled.size(), 2u);  // zeros are zeros
  EXPECT_FALSE(sender.idle());
  acknowledge(kSwitchUnknown);
  EXPECT_TRUE(sender.idle());
  EXPECT_FALSE(sender.ended());
}

TEST(SwitchSender, BelievesNothing) {
  NoOwner uplink;
  SwitchSender sender({.workers = 1, .generation = 3, .first_slot = 4, .slots = 2}, uplink);
  sender.push({.elements = 256, .exponent = -3}, 0);
  SwitchHeader good = uplink.sent.back();
  good.kind = kSwitchTaken;
  const auto ignores = [&](auto change) {
    SwitchHeader header = good;
    change(header);
    sender.receive(header, 0);
    EXPECT_EQ(uplink.sent.size(), 1u);
    EXPECT_FALSE(sender.ended());
  };
  ignores([](SwitchHeader& h) { h.magic ^= 1; });
  ignores([](SwitchHeader& h) { h.generation = 2; });
  ignores([](SwitchHeader& h) { h.kind = kSwitchSum; });
  ignores([](SwitchHeader& h) { h.kind = kSwitchEnded, h.generation = 4; });
  ignores([](SwitchHeader& h) { h.slot = 3; });
  ignores([](SwitchHeader& h) { h.slot = 5; });  // nothing is out there
  ignores([](SwitchHeader& h) { h.slot = 6; });
  ignores([](SwitchHeader& h) { h.turn = 2; });
  SwitchHeader low = good;
  low.next_exponent = -4;  // this worker asked for -3
  sender.receive(low, 0);
  EXPECT_TRUE(sender.ended());
  sender.receive(good, 0);
  EXPECT_EQ(uplink.sent.size(), 1u);
}

// The first one is known to have a switch; of another one the first answer says so.
TEST(SwitchSender, GivesUpAnotherGenerationSoonUntilItHearsSomethingOfIt) {
  constexpr uint64_t kGiveUp = 5'000, kProbe = 400;
  NoOwner uplink;
  SwitchSender sender({.generation = 1, .retry_ns = 100, .give_up_ns = kGiveUp, .probe_ns = kProbe},
                      uplink);
  const auto push_at = [&sender](uint64_t now) {
    sender.push({.elements = 256, .exponent = -3}, now);
  };
  push_at(0);
  sender.poll(kGiveUp - 1);
  EXPECT_FALSE(sender.ended());
  sender.poll(kGiveUp);
  EXPECT_TRUE(sender.ended());

  sender.begin(2);
  push_at(10'000);
  sender.poll(10'000 + kProbe - 1);
  EXPECT_FALSE(sender.ended());
  EXPECT_EQ(sender.due_ns(), 10'000 + kProbe);
  sender.poll(10'000 + kProbe);
  EXPECT_TRUE(sender.ended());

  sender.begin(3);
  push_at(20'000);
  SwitchHeader waiting = uplink.sent.back();
  waiting.kind = kSwitchWaiting;
  sender.receive(waiting, 20'000);
  sender.poll(20'000 + kGiveUp - 1);
  EXPECT_FALSE(sender.ended());
  sender.poll(20'000 + kGiveUp);
  EXPECT_TRUE(sender.ended());
}

// --- What comes to the box from anywhere.

SwitchReceiver::Answer give(SwitchReceiver& receiver, const SwitchPacket& packet) {
  return receiver.receive(std::as_bytes(std::span(&packet, 1)));
}

TEST(SwitchReceiver, BelievesNothing) {
  const auto fresh = [] {
    return SwitchReceiver({.workers = 3, .generation = 1, .first_round = 0, .elements = {300, 5}});
  };
  SwitchPacket sum = part(0, 1, 5);
  sum.header.kind = kSwitchSum;
  {
    SwitchReceiver receiver = fresh();
    const auto bytes = std::as_bytes(std::span(&sum, 1));
    for (const size_t size : {size_t{0}, size_t{39}, size_t{40}, bytes.size() - 1}) {
      EXPECT_EQ(receiver.receive(bytes.first(size)).to, SwitchReceiver::To::kNobody);
    }
    SwitchPacket other = sum;
    other.header.magic ^= 1;
    EXPECT_EQ(give(receiver, other).to, SwitchReceiver::To::kNobody);
    other = sum;
    other.header.generation = 2;  // whose number somebody has made up, or that is over
    const auto answer = give(receiver, other);
    EXPECT_EQ(answer.to, SwitchReceiver::To::kSender);
    EXPECT_EQ(answer.header.kind, kSwitchEnded);
    EXPECT_EQ(answer.header.generation, 2u);
    other = sum;
    other.header.kind = kSwitchEnded;
    EXPECT_EQ(give(receiver, other).to, SwitchReceiver::To::kNobody);
    EXPECT_FALSE(receiver.ended());
  }
  const auto ends = [&](const char* why, auto change) {
    SwitchReceiver receiver = fresh();
    SwitchPacket packet = sum;
    change(packet.header);
    const auto answer = give(receiver, packet);
    EXPECT_EQ(answer.header.kind, kSwitchEnded);
    EXPECT_EQ(answer.to, SwitchReceiver::To::kAll);
    EXPECT_THAT(receiver.why(), ::testing::HasSubstr(why));
    EXPECT_EQ(give(receiver, sum).header.kind, kSwitchEnded);
  };
  ends("did not add", [](SwitchHeader& h) { h.kind = kSwitchPart; });
  ends("not of all workers", [](SwitchHeader& h) { h.workers = 1; });
  ends("slot that is not planned", [](SwitchHeader& h) { h.slot = 1; });
  ends("chunk that is not planned", [](SwitchHeader& h) { h.chunk = 2; });
  ends("part that is not planned", [](SwitchHeader& h) { h.part = 2; });
  ends("later round", [](SwitchHeader& h) { h.round = 1; });
}

// What is said of one slot does not hide what was said of another.
TEST(SwitchReceiver, KnowsOfEverySlotWhomItWaitsFor) {
  SwitchReceiver receiver({.workers = 7, .slots = 3, .elements = {300, 5, 5}});
  const auto lacking = [&receiver] {
    std::vector<uint64_t> by_chunk(3);
    receiver.find_lacking(by_chunk);
    return by_chunk;
  };
  const auto say = [&receiver](uint8_t kind, uint16_t slot, uint32_t turn, uint32_t chunk,
                               uint64_t workers) {
    SwitchPacket packet = part(0, turn, 5, chunk);
    packet.header.kind = kind;
    packet.header.slot = slot;
    packet.header.round = 1;
    packet.header.workers = workers;
    return give(receiver, packet).header.kind;
  };
  EXPECT_THAT(lacking(), ElementsAre(0u, 0u, 0u));
  EXPECT_EQ(say(kSwitchWaiting, 0, 1, 0, 3), kSwitchWaiting);
  EXPECT_EQ(say(kSwitchWaiting, 2, 1, 1, 5), kSwitchWaiting);
  EXPECT_THAT(lacking(), ElementsAre(4u, 2u, 0u));
  EXPECT_EQ(say(kSwitchWaiting, 2, 1, 1, 3), kSwitchWaiting);  // the latest is true
  EXPECT_THAT(lacking(), ElementsAre(4u, 4u, 0u));
  EXPECT_EQ(say(kSwitchSum, 1, 1, 2, 7), kSwitchTaken);
  EXPECT_EQ(say(kSwitchSum, 2, 1, 1, 7), kSwitchTaken);
  EXPECT_THAT(lacking(), ElementsAre(4u, 0u, 0u));
  EXPECT_EQ(say(kSwitchWaiting, 2, 1, 1, 1), kSwitchTaken);    // it is late
  EXPECT_EQ(say(kSwitchWaiting, 3, 1, 1, 1), kSwitchWaiting);  // of no slot of the job
  EXPECT_THAT(lacking(), ElementsAre(4u, 0u, 0u));
  // Of exponents alone the chunk is not told: it is the next that is not closed.
  EXPECT_EQ(say(kSwitchWaiting, 1, 2, kSwitchNoChunk, 6), kSwitchWaiting);
  EXPECT_THAT(lacking(), ElementsAre(5u, 0u, 0u));
}

// What comes once more is no news of anybody.
TEST(SwitchReceiver, CountsWhatItKnowsOfEachWorker) {
  SwitchReceiver receiver(
      {.workers = 7, .generation = 1, .slots = 2, .first_round = 0, .elements = {2000}});
  const auto heard = [&receiver] {
    return std::vector{receiver.heard(0), receiver.heard(1), receiver.heard(2)};
  };
  const auto say = [&](uint8_t kind, uint32_t turn, uint64_t workers, uint16_t slot) {
    SwitchPacket packet = part(0, turn, 5);
    packet.header.kind = kind;
    packet.header.workers = workers;
    packet.header.slot = slot;
    packet.header.part = static_cast<uint16_t>(2 * (turn - 1) + slot);
    packet.header.next_exponent = 0;
    give(receiver, packet);
  };
  for (int times = 0; times < 3; ++times) say(kSwitchWaiting, 1, 1, 0);
  EXPECT_THAT(heard(), ElementsAre(1, 0, 0));
  say(kSwitchWaiting, 1, 5, 0);
  EXPECT_THAT(heard(), ElementsAre(1, 0, 1));
  say(kSwitchWaiting, 1, 2, 1);
  EXPECT_THAT(heard(), ElementsAre(1, 1, 1));
  for (int times = 0; times < 3; ++times) say(kSwitchSum, 1, 7, 0);
  EXPECT_THAT(heard(), ElementsAre(2, 2, 2));
  say(kSwitchWaiting, 1, 1, 0);  // it is late
  EXPECT_THAT(heard(), ElementsAre(2, 2, 2));
  say(kSwitchWaiting, 2, ~uint64_t{0} ^ 2, 0);  // and of workers that there are none
  EXPECT_THAT(heard(), ElementsAre(3, 2, 3));
}

TEST(SwitchReceiver, ClosesAChunkWhenAllItsPartsAreThere) {
  SwitchReceiver receiver({.workers = 3, .generation = 1, .first_round = 9, .elements = {300}});
  SwitchPacket sum = part(0, 1, 5);
  sum.header.kind = kSwitchSum;
  sum.header.round = 9;
  sum.header.part = 1;
  auto answer = give(receiver, sum);
  EXPECT_EQ(answer.header.kind, kSwitchTaken);
  EXPECT_EQ(answer.to, SwitchReceiver::To::kAll);
  EXPECT_FALSE(answer.closed);
  answer = give(receiver, sum);  // it came twice
  EXPECT_EQ(answer.to, SwitchReceiver::To::kSender);
  EXPECT_FALSE(receiver.closed(0));
  sum.header.part = 0;
  std::ranges::fill(sum.codes, 6);
  EXPECT_TRUE(give(receiver, sum).closed);
  EXPECT_EQ(receiver.sums(0).size(), 300u);
  EXPECT_EQ(receiver.sums(0)[255], 6);
  EXPECT_EQ(receiver.sums(0)[256], 5);
  receiver.begin_next(0);
  EXPECT_EQ(receiver.round(0), 10u);
  EXPECT_EQ(give(receiver, sum).header.kind, kSwitchTaken);  // of round 9
  EXPECT_FALSE(receiver.closed(0));
  sum.header.round = 10;
  EXPECT_EQ(give(receiver, sum).to, SwitchReceiver::To::kAll);
  sum.header.part = 1;
  sum.header.exponent = 3;
  EXPECT_EQ(give(receiver, sum).header.kind, kSwitchEnded);
  EXPECT_THAT(receiver.why(), ::testing::HasSubstr("exponents"));
}

}  // namespace switch_test
}  // namespace phub::test

// The program of the switch, in the kernel: packet for packet what the state machine does that the
// other tests drive, over the packets of whole scenes (BPF_PROG_TEST_RUN). Needs root; skipped
// where the kernel or this build has no such program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/bpf.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "tests/seeds.h"
#include "tests/transport/switch_rig.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "transport/switch/program.h"

namespace phub::test {
namespace switch_program_test {

using Frame = std::vector<std::byte>;

constexpr uint32_t kLoopback = 1;  // BPF_PROG_TEST_RUN's port

// Null: why not is in `problem`.
std::unique_ptr<SwitchProgram> load(uint32_t slots, std::string& problem) {
  try {
    auto program = std::make_unique<SwitchProgram>(slots);
    program->set_ports(std::vector<uint32_t>(kSwitchWorkers, kLoopback));
    return program;
  } catch (const Error& error) {
    problem = error.what();
    return nullptr;
  }
}
#define LOAD_OR_SKIP(program, slots)                                   \
  std::string problem;                                                 \
  const std::unique_ptr<SwitchProgram> program = load(slots, problem); \
  if (!program) GTEST_SKIP() << problem

// Ethernet, IPv4, UDP, and the packet.
Frame frame_of(const SwitchPacket& packet) {
  Frame frame(kSwitchFrameHeader + sizeof packet);
  const auto set = [&frame](size_t at, uint32_t value) {
    frame[at] = static_cast<std::byte>(value);
  };
  set(12, 0x08);
  set(14, 0x45);
  set(23, 17);
  const size_t udp = 8 + sizeof packet;
  set(34 + 4, static_cast<uint32_t>(udp >> 8));
  set(34 + 5, static_cast<uint32_t>(udp));
  set(34 + 6, 0xAB);  // a checksum
  set(34 + 7, 0xCD);
  std::memcpy(frame.data() + kSwitchFrameHeader, &packet, sizeof packet);
  return frame;
}

// Gives each packet to the program and to the state machine.
class BothAdders : public Adder {
 public:
  BothAdders(SwitchProgram& program, uint16_t slots) : program_(program), plain_(slots) {}

  SwitchVerdict take(SwitchPacket& packet) override {
    Frame frame = frame_of(packet);
    const Frame before = frame;
    const uint32_t result = program_.run(frame);
    const SwitchVerdict verdict = plain_.take(packet);
    const bool ends = verdict == kSwitchAdded || verdict == kSwitchLate;
    const bool same =
        result == (ends ? XDP_DROP : XDP_PASS) &&
        (ends || 0 == std::memcmp(frame.data() + kSwitchFrameHeader, &packet, sizeof packet));
    // The headers stay, but for the checksum of what has changed.
    Frame header(before.begin(), before.begin() + kSwitchFrameHeader);
    if (!ends && verdict != kSwitchRefused) header[40] = header[41] = std::byte{0};
    const bool kept = ends || std::equal(header.begin(), header.end(), frame.begin());
    if (!(same && kept) && problem.empty()) {
      problem = "packet " + std::to_string(packets) + ": the program returns " +
                std::to_string(result) + ", the state machine verdict " + std::to_string(verdict) +
                (kept ? "" : "; the headers differ");
    }
    ++packets;
    ++verdicts[verdict];
    return verdict;
  }
  void forget() override {
    program_.forget();
    plain_.forget();
  }

  std::string problem;
  uint64_t packets = 0;
  std::array<uint64_t, kSwitchCounters> verdicts{};

 private:
  SwitchProgram& program_;
  PlainAdder plain_;
};

TEST(SwitchProgram, AnswersAsTheStateMachineDoes) {
  const auto seeds = phub::testing::fresh_seeds(8);
  std::array<uint64_t, kSwitchCounters> seen{};
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937_64 random(seed);
    SwitchScene scene{.seed = seed};
    scene.workers = 1 + static_cast<uint32_t>(random() % 5);
    scene.slots = static_cast<uint16_t>(1 + random() % 8);
    scene.loss = seed % 3 == 0 ? 0 : 0.1;
    scene.twice = 0.2;
    scene.late = 0.05;
    if (seed % 2 == 0) scene.forgets_ns = 40'000'000;
    if (seed % 4 == 1) scene.replaced_ns = 30'000'000;
    // Of some of them it has too few.
    const uint16_t slots = seed % 4 == 3 ? 1 : scene.slots;
    LOAD_OR_SKIP(program, slots);
    BothAdders both(*program, slots);
    const SwitchOutcome outcome = play(scene, both);
    ASSERT_EQ(outcome.problem, "") << "PHUB_SEED=" << seed;
    ASSERT_EQ(both.problem, "") << "PHUB_SEED=" << seed;
    ASSERT_GT(both.packets, 0u);
    ASSERT_EQ(program->counters(), both.verdicts);
    for (size_t i = 0; i < seen.size(); ++i) seen[i] += both.verdicts[i];
  }
  for (const SwitchVerdict verdict : {kSwitchAdded, kSwitchComplete, kSwitchRepeated}) {
    EXPECT_TRUE(seen[verdict] > 0 || seeds.count == 1) << verdict;
  }
}

// Any headers and numbers: not only what workers send.
TEST(SwitchProgram, AnswersAsTheStateMachineDoesToAnything) {
  const uint64_t seed = phub::testing::fresh_seeds(1).first;
  std::mt19937_64 random(seed);
  LOAD_OR_SKIP(program, 2);
  BothAdders both(*program, 2);
  for (int i = 0; i < 3000; ++i) {
    SwitchPacket packet{};
    packet.header = {.magic = kSwitchMagic,
                     .kind = kSwitchPart,
                     .worker = static_cast<uint8_t>(random() % 3),
                     .slot = static_cast<uint16_t>(random() % 3),
                     .generation = uint64_t{1} + (random() % 50 == 0),
                     .turn = static_cast<uint32_t>(1 + i / 200 + random() % 3),
                     .chunk = static_cast<uint32_t>(random() % 20 == 0),
                     .round = static_cast<uint16_t>(random() % 20 == 0),
                     .exponent = static_cast<int16_t>(random() % 20 == 0),
                     .next_exponent = static_cast<int16_t>(random()),
                     .workers = random() % 20 == 0 ? random() : 7};
    if (random() % 50 == 0) packet.header.worker = static_cast<uint8_t>(random() % 64);
    const bool any = random() % 30 == 0;
    for (int32_t& code : packet.codes) {
      code = static_cast<int32_t>(random());
      if (!any) code >>= 9;
    }
    both.take(packet);
    ASSERT_EQ(both.problem, "") << "PHUB_SEED=" << seed;
  }
  EXPECT_EQ(program->counters(), both.verdicts);
}

SwitchPacket a_part() {
  SwitchPacket packet{};
  packet.header = {
      .magic = kSwitchMagic, .kind = kSwitchPart, .generation = 1, .turn = 1, .workers = 1};
  packet.codes[3] = 77;
  return packet;
}

TEST(SwitchProgram, WhatIsNotForItPassesAsItIs) {
  LOAD_OR_SKIP(program, 2);
  const auto passes = [&](const char* what, auto change) {
    Frame frame = frame_of(a_part());
    change(frame);
    const Frame before = frame;
    EXPECT_EQ(program->run(frame), uint32_t{XDP_PASS}) << what;
    EXPECT_EQ(frame, before) << what;
  };
  const auto byte = [](size_t at, int value) {
    return [at, value](Frame& frame) { frame[at] = static_cast<std::byte>(value); };
  };
  passes("IPv6", byte(12, 0x86));
  passes("options", byte(14, 0x46));
  passes("TCP", byte(23, 6));
  passes("a fragment", byte(21, 1));
  passes("more fragments", byte(20, 0x20));
  passes("another length", byte(39, 1));
  passes("another magic", byte(kSwitchFrameHeader, 1));
  passes("an acknowledgement", byte(kSwitchFrameHeader + 4, kSwitchTaken));
  passes("a sum", byte(kSwitchFrameHeader + 4, kSwitchSum));
  passes("a slot that it has not", byte(kSwitchFrameHeader + 6, 2));
  for (const size_t size : {size_t{14}, size_t{33}, size_t{60}, size_t{81}, size_t{1105}}) {
    passes("a frame that ends early", [size](Frame& frame) { frame.resize(size); });
  }
  passes("a longer frame of another length", [](Frame& frame) {
    frame.resize(1200);
    frame[39] = std::byte{9};
  });
  Frame good = frame_of(a_part());
  EXPECT_EQ(program->run(good), uint32_t{XDP_PASS});
  EXPECT_EQ(good[kSwitchFrameHeader + 4], std::byte{kSwitchSum});
}

TEST(SwitchProgram, APartFromAnotherPortThanItsWorkersEndsThere) {
  LOAD_OR_SKIP(program, 2);
  program->set_ports(std::vector<uint32_t>{kLoopback + 1, kLoopback});
  Frame forged = frame_of(a_part());
  EXPECT_EQ(program->run(forged), uint32_t{XDP_DROP});
  SwitchPacket packet = a_part();
  packet.header.worker = 7;  // there is no such port
  Frame unknown = frame_of(packet);
  EXPECT_EQ(program->run(unknown), uint32_t{XDP_DROP});
  packet.header.worker = 255;
  unknown = frame_of(packet);
  EXPECT_EQ(program->run(unknown), uint32_t{XDP_DROP});
  EXPECT_EQ(program->counters()[kSwitchForged], 3u);
  packet.header.worker = 1;
  packet.header.workers = 2;
  Frame good = frame_of(packet);
  EXPECT_EQ(program->run(good), uint32_t{XDP_PASS});
  EXPECT_EQ(program->counters()[kSwitchComplete], 1u);
}

TEST(SwitchProgram, ErrorsSayWhatIsWrong) {
  LOAD_OR_SKIP(program, 1);
  using phub::testing::error_of;
  const auto slots = ::testing::HasSubstr("slots: must be from 1");
  EXPECT_THAT(error_of([] { SwitchProgram none(0); }), slots);
  EXPECT_THAT(error_of([] { SwitchProgram many(kMostSwitchSlots + 1); }), slots);
  const std::vector<std::string> none, unknown = {"no-such-port"}, twice = {"lo", "lo"};
  EXPECT_THAT(error_of([&] { program->attach(none); }), ::testing::HasSubstr("1 to 64 workers"));
  EXPECT_THAT(error_of([&] { program->attach(unknown); }),
              ::testing::HasSubstr("interface 'no-such-port': there is none"));
  EXPECT_THAT(error_of([&] { program->attach(twice); }),
              ::testing::HasSubstr("'lo' is there twice"));
}

}  // namespace switch_program_test
}  // namespace phub::test

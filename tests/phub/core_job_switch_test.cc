// CoreJob with sums that come through a switch: what counts of them and of what ranks send
// directly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/phub/core_job_rig.h"
#include "transport/switch/generation.h"
#include "transport/switch/socket.h"
#include "transport/switch/stream.h"

namespace phub {
namespace core_job_switch_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;
using Rig = testing::CoreJobRig;

constexpr float kAll3 = 1 + 4 + 16;

sockaddr_in here(uint16_t port) { return switch_address("127.0.0.1:" + std::to_string(port)); }

// The switch and the workers behind it: what they send, and what they are answered.
struct Behind {
  explicit Behind(Rig& rig) {
    const auto ranks = static_cast<uint32_t>(rig.options_.expected.size());
    all = switch_workers(ranks);
    SwitchIntake::Options options{.ranks = ranks, .all_chunks = rig.options_.chunks};
    for (uint32_t chunk = 0; chunk < rig.options_.chunks; ++chunk) {
      options.chunks.push_back(chunk);
      options.elements.push_back(rig.options_.elements);
    }
    options.slots = static_cast<uint16_t>(rig.options_.chunks);
    options.rounds_between = 2;
    options.to_all = here(socket.port());
    auto own = std::make_unique<SwitchSocket>(0);
    box = here(own->port());
    rig.job->take_sums_of(std::make_unique<SwitchIntake>(options, std::move(own)));
  }

  void send_sum(uint32_t chunk, uint32_t round, int32_t value) {
    send(kSwitchSum, chunk, round, all, value);
  }
  // The switch waits for ranks beside these.
  void send_waiting(uint32_t chunk, uint32_t round, uint64_t there) {
    send(kSwitchWaiting, chunk, round, there, 0);
  }
  void send(uint8_t kind, uint32_t chunk, uint32_t round, uint64_t workers, int32_t value) {
    SwitchPacket packet{.header = {.magic = kSwitchMagic,
                                   .kind = kind,
                                   .slot = static_cast<uint16_t>(chunk),
                                   .generation = generation,
                                   .turn = round - turns_from + 1,
                                   .chunk = chunk,
                                   .round = static_cast<uint16_t>(round),
                                   .exponent = 0,
                                   .workers = workers}};
    std::ranges::fill(packet.codes, value);
    socket.send(std::as_bytes(std::span(&packet, 1)), box);
    socket.flush();
  }
  // The generation with this index, from this round on.
  void begin(uint32_t index, uint32_t first_round) {
    generation = switch_generation(1, 0, index);
    turns_from = first_round;
  }
  std::optional<int> last_answer() {
    std::optional<int> last;
    while (const auto next = answer()) last = next;
    return last;
  }
  // The kind of the next answer; nothing: there is none.
  std::optional<int> answer() {
    const std::optional<Datagram> got = socket.receive();
    if (!got || got->bytes.size() != sizeof(SwitchHeader)) return {};
    SwitchHeader header;
    std::memcpy(&header, got->bytes.data(), sizeof header);
    return header.kind;
  }

  uint64_t generation = 1;
  uint32_t turns_from = 1;  // the round of the first turn
  SwitchSocket socket{0};
  sockaddr_in box{};
  uint64_t all = 0;
};

TEST(CoreJobSwitch, ASumTakesThePlaceOfAllSlots) {
  Rig rig({});
  Behind behind(rig);
  for (uint32_t round = 1; round <= 3; ++round) {
    behind.send_sum(2, round, static_cast<int32_t>(100 * round));
    rig.run();
    EXPECT_EQ(rig.result(2), 100.0f * static_cast<float>(round));
    EXPECT_THAT(rig.take_posts(), SizeIs(3));
    EXPECT_EQ(behind.answer(), kSwitchTaken);
  }
  EXPECT_THAT(rig.take_reports(), IsEmpty());
}

TEST(CoreJobSwitch, WhoSendsDirectlyAfterTheSumCountsOnceAndGetsNoSecondResult) {
  Rig rig({});
  Behind behind(rig);
  behind.send_sum(0, 1, 21);
  rig.run();
  EXPECT_THAT(rig.take_posts(), SizeIs(3));
  rig.push(1, 0, 1, Rig::digit(1));
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  EXPECT_EQ(rig.result(0), kAll3);
  EXPECT_THAT(rig.take_reports(), ElementsAre("switch 1"));
  // From now on all of them send directly.
  behind.send_sum(0, 2, 999);
  rig.push_all(std::vector<uint32_t>{0, 1, 2}, 0, 2);
  rig.run();
  EXPECT_EQ(rig.result(0), kAll3);
  EXPECT_THAT(rig.take_posts(), SizeIs(3));
}

TEST(CoreJobSwitch, AfterADirectContributionNoSumCounts) {
  Rig rig({});
  Behind behind(rig);
  rig.push(2, 0, 1, Rig::digit(2));
  behind.send_sum(0, 1, 999);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  EXPECT_EQ(behind.answer(), kSwitchEnded);
  rig.push_all(std::vector<uint32_t>{0, 1}, 0, 1);
  rig.run();
  EXPECT_EQ(rig.result(0), kAll3);
  EXPECT_THAT(rig.take_posts(), SizeIs(3));
}

// What was posted since the last call: which rank was told of which beginning. Before it, it has
// got no result with which it could send the generation's first round.
std::vector<std::pair<uint32_t, SwitchBeginning>> take_beginnings(Rig& rig, uint64_t first_round) {
  std::vector<std::pair<uint32_t, SwitchBeginning>> told;
  std::set<uint32_t> could_send;
  for (const auto& [rank, write] : std::exchange(rig.endpoint.posted, {})) {
    const Imm imm = decode(write.imm);
    if (is_switch_beginning(imm)) {
      EXPECT_FALSE(could_send.contains(rank)) << "rank " << rank << " is told too late";
      told.emplace_back(rank, switch_beginning(imm, first_round));
    } else if (imm.round == low8(first_round - 1)) {
      could_send.insert(rank);
    }
  }
  return told;
}

void push_round(Rig& rig, uint64_t round) {
  for (uint32_t chunk = 0; chunk < rig.options_.chunks; ++chunk) {
    rig.push_all(std::vector<uint32_t>{0, 1, 2}, chunk, round);
    rig.run();
  }
}

// The first one ends in round 1, and two rounds later another begins with the round after those in
// progress: everybody is told with the results of these.
TEST(CoreJobSwitch, AnotherGenerationBeginsWithARoundThatNobodyCanHaveSent) {
  Rig rig({});
  Behind behind(rig);
  for (uint64_t round = 1; round <= 2; ++round) {
    push_round(rig, round);
    EXPECT_THAT(take_beginnings(rig, round + 1), IsEmpty());
  }
  EXPECT_THAT(rig.take_reports(), ElementsAre("switch 0"));
  push_round(rig, 3);
  using Told = std::pair<uint32_t, SwitchBeginning>;
  EXPECT_THAT(take_beginnings(rig, 4),
              UnorderedElementsAre(Told(0, {1, 4}), Told(1, {1, 4}), Told(2, {1, 4})));
  EXPECT_THAT(rig.take_reports(), ElementsAre("begun @4"));
  behind.send_sum(1, 4, 999);  // of the generation that has ended
  rig.run();
  EXPECT_EQ(behind.last_answer(), kSwitchEnded);
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  behind.begin(1, 4);
  for (uint32_t round = 4; round <= 9; ++round) {
    for (uint32_t chunk = 0; chunk < 4; ++chunk) behind.send_sum(chunk, round, 100);
    rig.run();
    EXPECT_THAT(rig.take_posts(), SizeIs(12));
    EXPECT_EQ(rig.result(3), 100.0f);
  }
  EXPECT_EQ(behind.last_answer(), kSwitchTaken);
  // This one has lasted: it is waited for two rounds again.
  push_round(rig, 10);
  EXPECT_THAT(rig.take_reports(), ElementsAre("switch 0"));
  push_round(rig, 11);
  push_round(rig, 12);
  EXPECT_THAT(rig.take_reports(), ElementsAre("begun @13"));
}

// Those that bring nothing are tried again after twice as many rounds each time.
TEST(CoreJobSwitch, WhatDoesNotLastIsTriedLessAndLessOften) {
  Rig rig({});
  Behind behind(rig);
  std::vector<uint64_t> begun;
  for (uint64_t round = 1; round <= 120; ++round) {
    push_round(rig, round);
    for (const std::string& report : rig.take_reports()) {
      if (report.starts_with("begun")) begun.push_back(std::stoull(report.substr(7)));
    }
  }
  ASSERT_GE(begun.size(), 4u);
  for (size_t i = 1; i + 1 < begun.size(); ++i) {
    EXPECT_GE(begun[i + 1] - begun[i], 2 * (begun[i] - begun[i - 1]) - 4) << i;
  }
  EXPECT_LE(begun.size(), 7u);
}

// Without one of the ranks there is none, nor where another one is there that the switch does not
// know.
TEST(CoreJobSwitch, AGenerationNeedsItsRanks) {
  Rig rig({.parameters = {.max_ranks = 4}, .expected = {0, 1, 2}});
  Behind behind(rig);
  push_round(rig, 1);
  rig.job->detach(2);
  EXPECT_THAT(rig.take_reports(), ElementsAre("switch 0"));
  for (uint64_t round = 2; round <= 6; ++round) {
    for (uint32_t chunk = 0; chunk < 4; ++chunk) {
      rig.push(0, chunk, round, 1);
      rig.push(1, chunk, round, 1);
      rig.run();
    }
    if (round == 2) {
      rig.job->hold();
      rig.job->commit({.round = 2, .lost = {{.rank = 2}}});
      rig.run();
    }
  }
  EXPECT_THAT(take_beginnings(rig, 8), IsEmpty());
  rig.job->hold();
  rig.job->commit({.round = 7, .admitted = {rig.admission(2, 2, 7)}});
  rig.take_posts();
  push_round(rig, 7);
  push_round(rig, 8);
  EXPECT_THAT(take_beginnings(rig, 9), SizeIs(3));
  EXPECT_THAT(rig.take_reports(), SizeIs(1));
  // A fourth one comes: it is over, and stays so.
  rig.job->hold();
  rig.job->commit({.round = 9, .admitted = {rig.admission(3, 1, 9)}});
  EXPECT_THAT(rig.take_reports(), ElementsAre("switch nobody"));
  for (uint64_t round = 9; round <= 30; ++round) {
    for (uint32_t chunk = 0; chunk < 4; ++chunk) {
      rig.push_all(std::vector<uint32_t>{0, 1, 2, 3}, chunk, round);
      rig.run();
    }
  }
  EXPECT_THAT(take_beginnings(rig, 32), IsEmpty());
  EXPECT_THAT(rig.take_reports(), IsEmpty());
}

// A queue without room gets the news before the results that it is owed.
TEST(CoreJobSwitch, WhoIsOwedResultsIsToldOfABeginningBefore) {
  Rig rig({});
  Behind behind(rig);
  push_round(rig, 1);
  push_round(rig, 2);
  rig.take_reports();
  rig.take_posts();
  rig.endpoint.room = 0;
  push_round(rig, 3);
  EXPECT_THAT(rig.endpoint.posted, IsEmpty());
  for (int i = 0; i < 40; ++i) {
    rig.endpoint.room = 1;
    rig.job->step();
  }
  EXPECT_THAT(rig.endpoint.posted, SizeIs(12 + 3));
  EXPECT_THAT(take_beginnings(rig, 4), SizeIs(3));
}

// One that was never there is lost, or one comes that the switch does not know.
TEST(CoreJobSwitch, WhereRanksChangeNoSumCounts) {
  for (const bool comes : {true, false}) {
    Rig rig({.parameters = {.max_ranks = 4}, .expected = {0, 1, 2}, .admit = false});
    Behind behind(rig);
    const auto commit = [&](Boundary boundary) {
      rig.job->hold();
      rig.job->commit(boundary);
    };
    commit({.round = 1, .admitted = {rig.admission(0, 1, 1), rig.admission(1, 1, 1)}});
    commit(comes ? Boundary{.round = 1, .admitted = {rig.admission(3, 1, 1)}}
                 : Boundary{.round = 1, .lost = {{.rank = 2}}});
    rig.take_posts();
    behind.send_sum(0, 1, 999);
    rig.run();
    EXPECT_THAT(rig.take_posts(), IsEmpty());
    EXPECT_EQ(behind.answer(), kSwitchEnded);
  }
}

// So many ranks that a pass ends before all chunks are closed.
Rig::Options large() {
  Rig::Options options{.parameters = {.max_ranks = 64}, .chunks = 30, .elements = 256};
  options.expected.clear();
  for (uint32_t rank = 0; rank < 64; ++rank) options.expected.push_back(rank);
  return options;
}

// Their round is settled: who is lost at the boundary is in it, whenever the chunks close.
TEST(CoreJobSwitch, SumsThatCameBeforeABoundaryHaveAllRanksAlsoOneThatIsLostAtIt) {
  for (const bool is_lost : {false, true}) {
    Rig rig(large());
    Behind behind(rig);
    for (uint32_t chunk = 0; chunk < 30; ++chunk) {
      behind.send_sum(chunk, 1, static_cast<int32_t>(100 + chunk));
    }
    rig.job->step();
    const size_t closed = rig.take_posts().size() / 64;
    ASSERT_LT(closed, 30u);
    const CoreReport held = rig.job->hold();
    EXPECT_EQ(held.round, 2u);
    EXPECT_EQ(held.started, 1u);
    Boundary boundary{.round = held.round};
    std::vector<uint64_t> last_rounds(30);
    if (is_lost) {
      boundary.lost = {{.rank = 5, .last_rounds = last_rounds}};
    } else {
      rig.run();  // what was ready at the boundary is completed before it, too
    }
    rig.job->commit(boundary);
    rig.run();
    for (uint32_t chunk = 0; chunk < 30; ++chunk) {
      EXPECT_EQ(rig.result(chunk), 100.0f + static_cast<float>(chunk));
      if (is_lost) EXPECT_EQ(last_rounds[chunk], 1u);
    }
    EXPECT_EQ(rig.take_posts().size(), (30 - closed) * (is_lost ? 63 : 64));
  }
}

TEST(CoreJobSwitch, SumsThatComeDuringABoundaryCountAfterIt) {
  Rig rig({});
  Behind behind(rig);
  const CoreReport held = rig.job->hold();
  EXPECT_EQ(held.round, 1u);
  EXPECT_EQ(held.started, 0u);
  behind.send_sum(0, 1, 21);
  rig.run();
  EXPECT_THAT(rig.take_posts(), IsEmpty());
  EXPECT_EQ(behind.answer(), std::nullopt);
  rig.job->commit({.round = 1});
  rig.run();
  EXPECT_EQ(rig.result(0), 21.0f);
  EXPECT_THAT(rig.take_posts(), SizeIs(3));
}

// Of a round that is half through the switch nobody may be left out as if it had not begun.
TEST(CoreJobSwitch, ARoundHasStartedWithTheFirstPartThatIsKnownOf) {
  const auto started = [](const auto& send) {
    Rig rig({.elements = 300});
    Behind behind(rig);
    send(behind);
    rig.run();
    return rig.job->hold().started;
  };
  EXPECT_EQ(started([](Behind&) {}), 0u);
  EXPECT_EQ(started([](Behind& b) { b.send_sum(1, 1, 5); }), 1u);  // one of two parts
  EXPECT_EQ(started([](Behind& b) { b.send_waiting(1, 1, 3); }), 1u);
  // Another chunk is complete: others of its round are on their way.
  Rig rig({});
  Behind behind(rig);
  behind.send_sum(0, 1, 21);
  rig.run();
  EXPECT_EQ(rig.job->hold().started, 1u);
}

// A chunk may take long: who does its part of it is not one that sends nothing.
TEST(CoreJobSwitch, AProbeCountsThePartsOfEachRankBeforeAChunkIsComplete) {
  Rig rig({.elements = 3 * kSwitchElements});
  Behind behind(rig);
  const auto parts = [&rig] {
    Probe probe;
    probe.arrivals.resize(3);
    probe.parts.resize(3);
    probe.waited_for.resize(1);
    rig.run();
    rig.job->probe(probe);
    EXPECT_THAT(probe.arrivals, ElementsAre(0, 0, 0));
    return probe.parts;
  };
  EXPECT_THAT(parts(), ElementsAre(0, 0, 0));
  behind.send_waiting(0, 1, 5);
  EXPECT_THAT(parts(), ElementsAre(1, 0, 1));
  behind.send_waiting(0, 1, 5);
  EXPECT_THAT(parts(), ElementsAre(1, 0, 1));
  behind.send_sum(0, 1, 21);
  EXPECT_THAT(parts(), ElementsAre(2, 1, 2));
}

TEST(CoreJobSwitch, AProbeNamesWhoTheSwitchWaitsFor) {
  Rig rig({});
  Behind behind(rig);
  const auto waited_for = [&rig] {
    Probe probe;
    probe.arrivals.resize(3);
    probe.waited_for.resize(1);
    probe.lacks.resize(3);
    rig.run();
    rig.job->probe(probe);
    EXPECT_EQ(probe.lacks[1].chunks, probe.waited_for[0] == 0 ? 0u : 1u);
    return probe.waited_for[0];
  };
  behind.send_waiting(0, 1, 5);
  behind.send_sum(2, 1, 21);
  EXPECT_EQ(waited_for(), 2u);
  behind.send_waiting(3, 1, 6);
  EXPECT_EQ(waited_for(), 3u);
  behind.send_sum(3, 1, 21);
  EXPECT_EQ(waited_for(), 2u);
  behind.send_sum(0, 1, 21);
  EXPECT_EQ(waited_for(), 0u);
}

}  // namespace core_job_switch_test
}  // namespace phub

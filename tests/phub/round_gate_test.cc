// The gate of rounds that are applied as a whole, over several boxes: all decide as one box would.
#include "phub/core/round_gate.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "tests/seeds.h"

namespace phub {
namespace round_gate_test {

constexpr uint32_t kChunks = 60, kCores = 2, kBoxes = 3;

bool same(const Decision& a, const Decision& b) {
  return a.round == b.round && a.skipped == b.skipped &&
         std::bit_cast<uint64_t>(a.norm) == std::bit_cast<uint64_t>(b.norm) &&
         std::bit_cast<uint32_t>(a.factor) == std::bit_cast<uint32_t>(b.factor);
}

bool is_rung(const RoundGate& gate, uint32_t core) {
  pollfd bell = {gate.wake_fd(core), POLLIN, 0};
  return ::poll(&bell, 1, 0) == 1;
}

class Boxes {
 public:
  explicit Boxes(std::mt19937& random) {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) chunks_[random() % kBoxes].push_back(chunk);
    for (uint32_t box = 0; box < kBoxes; ++box) {
      gates_.push_back(std::make_unique<RoundGate>(
          kCores, kChunks, true,
          box == 0 ? GateShare{.others = kBoxes - 1} : GateShare{.is_told = true}));
    }
  }

  void set_square(uint32_t chunk, double square) {
    for (uint32_t box = 0; box < kBoxes; ++box) {
      if (std::ranges::count(chunks_[box], chunk) > 0) gates_[box]->set_square(chunk, square);
    }
  }
  // All close the round, in any order; then those that are told are.
  void close(std::mt19937& random, uint64_t round, double max_norm) {
    std::vector<uint32_t> order;
    for (uint32_t i = 0; i < kBoxes * kCores; ++i) order.push_back(i);
    std::ranges::shuffle(order, random);
    for (const uint32_t i : order) {
      const uint32_t box = i / kCores;
      EXPECT_TRUE(gates_[box]->arm(i % kCores, round));
      EXPECT_FALSE(gates_[0]->has_decided(round));
      if (!gates_[box]->close(i % kCores, round, max_norm)) continue;
      EXPECT_NE(box, 0u);
      const std::vector<double> squares = gates_[box]->take_squares(chunks_[box]);
      gates_[0]->close_for(chunks_[box], squares, round);
    }
    ASSERT_TRUE(gates_[0]->has_decided(round));
    for (uint32_t box = 1; box < kBoxes; ++box) {
      EXPECT_FALSE(gates_[box]->has_decided(round));
      gates_[box]->tell(gates_[0]->decision());
      EXPECT_TRUE(gates_[box]->has_decided(round));
      for (uint32_t core = 0; core < kCores; ++core) EXPECT_TRUE(is_rung(*gates_[box], core));
    }
  }
  const Decision& decision(uint32_t box) const { return gates_[box]->decision(); }

 private:
  std::vector<uint32_t> chunks_[kBoxes];
  std::vector<std::unique_ptr<RoundGate>> gates_;
};

// Squares of many magnitudes, whose sum depends on the order. In every round some chunks have none.
TEST(RoundGate, BoxesDecideAsOne) {
  const testing::Seeds seeds = testing::fresh_seeds(50);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    Boxes boxes(random);
    RoundGate one(kCores, kChunks, true);
    for (uint64_t round = 1; round <= 6; ++round) {
      for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        if (random() % 4 == 0) continue;
        const double square = std::ldexp(random(), static_cast<int>(random() % 60) - 60);
        one.set_square(chunk, square);
        boxes.set_square(chunk, square);
      }
      const double max_norm = random() % 3 == 0 ? 0 : std::ldexp(1.0, static_cast<int>(round));
      for (uint32_t core = 0; core < kCores; ++core) one.close(core, round, max_norm);
      boxes.close(random, round, max_norm);
      for (uint32_t box = 0; box < kBoxes; ++box) {
        EXPECT_TRUE(same(boxes.decision(box), one.decision())) << seed << ", round " << round;
      }
    }
  }
}

TEST(RoundGate, WhatHasBegunElsewhereHasBegun) {
  RoundGate gate(1, 1, false);
  gate.begin(3);
  gate.begin_elsewhere(2);
  EXPECT_EQ(gate.begun(), 3u);
  gate.begin_elsewhere(4);
  EXPECT_TRUE(gate.has_begun(4));
  EXPECT_FALSE(gate.has_begun(5));
}

}  // namespace round_gate_test
}  // namespace phub

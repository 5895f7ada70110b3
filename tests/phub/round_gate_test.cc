// The gate of rounds that are applied as a whole, over several boxes: all decide as one box would.
#include "phub/core/round_gate.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "tests/seeds.h"

namespace phub {
namespace round_gate_test {

constexpr uint32_t kChunks = 60, kKeys = 7, kCores = 2, kBoxes = 3;

bool same(const Decision& a, const Decision& b) {
  return a.round == b.round && a.skipped == b.skipped &&
         std::bit_cast<uint64_t>(a.norm) == std::bit_cast<uint64_t>(b.norm) &&
         std::bit_cast<uint32_t>(a.factor) == std::bit_cast<uint32_t>(b.factor);
}

bool same(std::span<const kernels::KeyNorms> a, std::span<const kernels::KeyNorms> b) {
  return std::ranges::equal(a, b, [](const kernels::KeyNorms& x, const kernels::KeyNorms& y) {
    return x.parameters == y.parameters && x.update == y.update;
  });
}

// Every key has a chunk at least.
std::vector<uint32_t> some_keys(std::mt19937& random) {
  std::vector<uint32_t> keys;
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    keys.push_back(chunk < kKeys ? chunk : random() % kKeys);
  }
  std::ranges::sort(keys);
  return keys;
}

double some_square(std::mt19937& random) {
  return std::ldexp(random(), static_cast<int>(random() % 60) - 60);
}

bool is_rung(const RoundGate& gate, uint32_t core) {
  pollfd bell = {gate.wake_fd(core), POLLIN, 0};
  return ::poll(&bell, 1, 0) == 1;
}

class Boxes {
 public:
  Boxes(std::mt19937& random, const std::vector<uint32_t>& keys) {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) chunks_[random() % kBoxes].push_back(chunk);
    for (uint32_t box = 0; box < kBoxes; ++box) {
      gates_.push_back(std::make_unique<RoundGate>(
          kCores, kChunks, true,
          box == 0 ? GateShare{.others = kBoxes - 1} : GateShare{.is_told = true}, keys));
    }
  }

  void set_squares(uint32_t chunk, const ChunkSquares& squares) {
    for (uint32_t box = 0; box < kBoxes; ++box) {
      if (std::ranges::count(chunks_[box], chunk) > 0) gates_[box]->set_squares(chunk, squares);
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
      EXPECT_EQ(squares.size(), chunks_[box].size() * gates_[0]->numbers_per_chunk());
      gates_[0]->close_for(chunks_[box], squares, round);
    }
    ASSERT_TRUE(gates_[0]->has_decided(round));
    for (uint32_t box = 1; box < kBoxes; ++box) {
      EXPECT_FALSE(gates_[box]->has_decided(round));
      gates_[box]->tell(gates_[0]->decision(), gates_[0]->norms());
      EXPECT_TRUE(gates_[box]->has_decided(round));
      for (uint32_t core = 0; core < kCores; ++core) EXPECT_TRUE(is_rung(*gates_[box], core));
    }
  }
  const RoundGate& gate(uint32_t box) const { return *gates_[box]; }

 private:
  std::vector<uint32_t> chunks_[kBoxes];
  std::vector<std::unique_ptr<RoundGate>> gates_;
};

// Squares of many magnitudes, whose sum depends on the order. In every round some chunks have none.
TEST(RoundGate, BoxesDecideAsOne) {
  const testing::Seeds seeds = testing::fresh_seeds(50);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    const auto keys = seed % 2 == 0 ? some_keys(random) : std::vector<uint32_t>();
    Boxes boxes(random, keys);
    RoundGate one(kCores, kChunks, true, {}, keys);
    for (uint64_t round = 1; round <= 6; ++round) {
      for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        if (random() % 4 == 0) continue;
        ChunkSquares squares{.gradient = some_square(random), .key = {}};
        if (!keys.empty()) squares.key = {some_square(random), some_square(random)};
        one.set_squares(chunk, squares);
        boxes.set_squares(chunk, squares);
      }
      const double max_norm = random() % 3 == 0 ? 0 : std::ldexp(1.0, static_cast<int>(round));
      for (uint32_t core = 0; core < kCores; ++core) one.close(core, round, max_norm);
      boxes.close(random, round, max_norm);
      for (uint32_t box = 0; box < kBoxes; ++box) {
        EXPECT_TRUE(same(boxes.gate(box).decision(), one.decision()) &&
                    same(boxes.gate(box).norms(), one.norms()))
            << seed << ", round " << round << ", box " << box;
      }
    }
  }
}

TEST(RoundGate, ANormIsOfAllChunksOfItsKeyInOneRound) {
  RoundGate gate(1, 4, false, {}, {0, 1, 1, 2});
  gate.set_squares(1, {.gradient = 1, .key = {9, 0.25}});
  gate.set_squares(2, {.gradient = 1, .key = {16, 0}});
  gate.set_squares(3, {.gradient = 2, .key = {4, 1}});
  gate.close(0, 1, 0);
  EXPECT_EQ(gate.decision().norm, 2);
  for (const uint32_t chunk : {1, 2}) {
    EXPECT_EQ(gate.norms_of(chunk).parameters, 5);
    EXPECT_EQ(gate.norms_of(chunk).update, 0.5);
  }
  EXPECT_EQ(gate.norms_of(0).parameters, 0);
  EXPECT_EQ(gate.norms_of(3).parameters, 2);
  gate.close(0, 2, 0);  // with no gradient
  for (const kernels::KeyNorms& norms : gate.norms()) EXPECT_EQ(norms.parameters + norms.update, 0);
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

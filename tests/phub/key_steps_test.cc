// Steps of whole keys, of which a round leaves some chunks out.
#include "phub/core/key_steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>
#include <span>
#include <vector>

#include "tests/seeds.h"

namespace phub {
namespace key_steps_test {

TEST(KeySteps, ChunksThatARoundLeavesOutHaveAGradientOfZero) {
  constexpr uint32_t kElements = 4, kChunks = 3, kAll = kChunks * kElements;
  JobSpec spec;
  spec.optimizer = "adafactor";
  spec.keys = {{.name = "key", .elements = kAll}};
  const auto optimizer = kernels::Optimizer::kAdafactor;
  const HyperTable table(spec, optimizer, key_classes(spec));
  const std::vector<kernels::WholeKey> keys = whole_keys(spec, optimizer);
  std::vector<float> parameters(kAll, 0.5f), state(kAll), new_state(kAll), sums(kAll);
  std::vector<KeySteps::Chunk> chunks;
  std::vector<StatePiece> pieces;
  for (uint32_t id = 0; id < kChunks; ++id) {
    const uint64_t offset = uint64_t{id} * kElements;
    chunks.push_back({.key = 0, .elements = kElements, .offset = offset});
    pieces.push_back({.offset = {offset, 0}, .elements = {kElements, 0}});
  }
  JobArrays arrays;
  arrays.parameters = parameters.data(), arrays.state0 = state.data(), arrays.sums = sums.data();
  arrays.new_state = new_state.data(), arrays.state_pieces = pieces;
  KeySteps steps(keys, chunks, arrays, 1);
  const HyperView view = table.view();

  std::mt19937 random(static_cast<uint32_t>(testing::fresh_seeds(1).first));
  for (uint64_t round = 1; round <= 4; ++round) {
    // Rounds 2 and 4 lose chunks: their sums stay as the round before has left them.
    const uint32_t lost = round % 2 == 0 ? 1 + random() % (kChunks - 1) : 0;
    std::vector<float> gradient(kAll, 0.0f), expected(kAll);
    for (uint32_t id = lost; id < kChunks; ++id) {
      for (uint32_t i = id * kElements; i < (id + 1) * kElements; ++i) {
        sums[i] = gradient[i] = 1 + static_cast<float>(random() % 100);
      }
      steps.close(0, id, round, round, false, view);
    }
    steps.complete(0, round, view);
    const kernels::KeyStep step =
        kernels::step_of_key(keys[0], view.of(round, 0), round, kAll * 0.25, state.data(),
                             gradient.data(), expected.data(), nullptr);
    for (uint32_t id = 0; id < kChunks; ++id) {
      const KeySteps::Part part = steps.part_of(id);
      EXPECT_FALSE(part.unused);
      EXPECT_EQ(std::bit_cast<uint32_t>(part.step.scale), std::bit_cast<uint32_t>(step.scale));
      EXPECT_TRUE(
          std::equal(part.direction, part.direction + kElements, gradient.data() + id * kElements))
          << "round " << round << ", chunk " << id;
      EXPECT_TRUE(std::ranges::equal(part.new_state,
                                     std::span(expected).subspan(id * kElements, kElements)))
          << "round " << round << ", chunk " << id;
    }
    std::ranges::copy(expected, state.begin());
  }
}

}  // namespace key_steps_test
}  // namespace phub

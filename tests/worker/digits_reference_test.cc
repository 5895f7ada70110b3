#include "tests/worker/digits_reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <set>

#include "transport/error.h"

namespace phub::digits {
namespace digits_reference_test {

using ::testing::HasSubstr;
using Kind = LogRecord::Kind;

Training small_training() {
  return {.world = 3, .rounds = 12, .seed = 11, .hidden = 20, .batch = 4, .chunk_elements = 512};
}
// w1 has 1,280 elements (chunks 0 to 2), b1, w2 and b2 a chunk each (3 to 5).
constexpr uint32_t kChunks = 6;

LogRecord lost(uint32_t rank, std::vector<ChunkRange> last) {
  return {.kind = Kind::kLost, .rank = rank, .incarnation = 1, .last_rounds = std::move(last)};
}

uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }

size_t differing(const std::vector<float>& a, const std::vector<float>& b, size_t begin,
                 size_t end) {
  size_t count = 0;
  for (size_t i = begin; i < end; ++i) count += bits(a[i]) != bits(b[i]);
  return count;
}

class DigitsReference : public ::testing::Test {
 protected:
  const Dataset data_ = load(PHUB_DIGITS_CSV);
  const Training training_ = small_training();
};

TEST_F(DigitsReference, OneRankAloneIsPlainTraining) {
  Training training = training_;
  training.world = 1;
  const std::vector<float> actual = recompute(training, data_.train, quiet_log(1));

  // The same in a few lines: PyTorch's Nesterov momentum.
  Network network = digits::network(training);
  std::vector<float> p = network.initial(training.seed);
  std::vector<float> momentum(p.size());
  const auto offsets = key_offsets(network.keys());
  const auto lr = static_cast<float>(training.lr);
  const auto mu = static_cast<float>(training.momentum);
  for (uint64_t round = 1; round <= training.rounds; ++round) {
    const Samples samples = batch(data_.train, training.seed, 0, 1, round, training.batch);
    std::vector<float> g(p.size());
    auto key = [&](std::vector<float>& all, size_t k) {
      return std::span(all).subspan(offsets[k], offsets[k + 1] - offsets[k]);
    };
    network.start(samples.images);
    network.forward(0, key(p, 0), key(p, 1));
    network.forward(1, key(p, 2), key(p, 3));
    network.loss(samples.labels);
    network.backward(1, key(p, 2), key(g, 2), key(g, 3));
    network.backward(0, key(p, 0), key(g, 0), key(g, 1));
    for (size_t i = 0; i < p.size(); ++i) {
      momentum[i] = round == 1 ? g[i] : mu * momentum[i] + g[i];
      p[i] -= lr * (g[i] + mu * momentum[i]);
    }
  }
  EXPECT_EQ(differing(actual, p, 0, p.size()), 0u);
}

TEST_F(DigitsReference, ALossCountsPerChunk) {
  const std::vector<float> quiet = recompute(training_, data_.train, quiet_log(3));
  // In the last round, rank 1 is missing in chunk 1 only: nothing else changes.
  std::vector<LogRecord> log = quiet_log(3);
  log.push_back(lost(1, {{0, 0, 12}, {1, 1, 11}, {2, kChunks - 1, 12}}));
  const std::vector<float> one_chunk = recompute(training_, data_.train, log);
  EXPECT_EQ(differing(quiet, one_chunk, 0, 512), 0u);
  EXPECT_GT(differing(quiet, one_chunk, 512, 1024), 200u);
  EXPECT_EQ(differing(quiet, one_chunk, 1024, quiet.size()), 0u);
}

TEST_F(DigitsReference, ANewIncarnationGoesOnWhereTheOldOneEnded) {
  const std::vector<float> quiet = recompute(training_, data_.train, quiet_log(3));
  std::vector<LogRecord> log = quiet_log(3);
  log.push_back(lost(2, {{0, kChunks - 1, 5}}));
  std::vector<LogRecord> gap = log;
  log.push_back({.round = 6, .rank = 2, .incarnation = 2});
  gap.push_back({.round = 7, .rank = 2, .incarnation = 2});
  const std::vector<float> without_gap = recompute(training_, data_.train, log);
  const std::vector<float> with_gap = recompute(training_, data_.train, gap);
  EXPECT_EQ(differing(quiet, without_gap, 0, quiet.size()), 0u);
  EXPECT_GT(differing(quiet, with_gap, 0, quiet.size()), quiet.size() / 2);
}

TEST_F(DigitsReference, HyperparametersChangeFromTheirRoundOn) {
  const std::vector<float> quiet = recompute(training_, data_.train, quiet_log(3));
  std::vector<LogRecord> log = quiet_log(3);
  log.push_back({.kind = Kind::kHyper, .round = 13, .values = {{"lr", 0.5}}});
  EXPECT_EQ(differing(quiet, recompute(training_, data_.train, log), 0, quiet.size()), 0u);
  log.back().round = 12;
  EXPECT_GT(differing(quiet, recompute(training_, data_.train, log), 0, quiet.size()),
            quiet.size() / 2);
}

TEST_F(DigitsReference, ARoundWithoutAnyRankIsAnError) {
  std::vector<LogRecord> log = quiet_log(1);
  log.push_back(lost(0, {{0, 3, 12}, {4, 4, 7}, {5, 5, 12}}));
  try {
    recompute(training_, data_.train, log);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("nobody is in round 8 of chunk 4"));
  }
}

}  // namespace digits_reference_test
}  // namespace phub::digits

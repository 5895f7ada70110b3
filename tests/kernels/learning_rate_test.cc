// The rate of a round: the bits of the reference, and what PyTorch's schedulers set
// (golden_rates.txt, written by make_golden_rates.py), but for the last bits of the double.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/hyper.h"
#include "tests/oracle/reference.h"

namespace phub::kernels {
namespace learning_rate_test {

constexpr uint64_t kRounds = 400;
// Of lr: PyTorch multiplies 400 times where this takes a power.
constexpr double kTolerance = 1e-12;

struct Config {
  std::string name;
  Hyper hyper;
  std::map<uint64_t, double> rates;  // of some rounds
  double sum = 0, moment = 0;        // of all rounds: of their rates, and of round · rate
};

std::vector<Config> read_golden() {
  std::ifstream file(PHUB_GOLDEN_FILE);
  std::vector<Config> configs;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    if (line.starts_with('#')) continue;
    if (line.starts_with("sum ")) {
      std::string sum, moment;
      words >> word >> sum >> moment;
      configs.back().sum = std::stod(sum), configs.back().moment = std::stod(moment);
      continue;
    }
    if (!line.starts_with("config ")) {
      while (words >> word) {
        const size_t colon = word.find(':');
        configs.back().rates[std::stoull(word.substr(0, colon))] =
            std::stod(word.substr(colon + 1));
      }
      continue;
    }
    Config& config = configs.emplace_back();
    words >> word >> config.name;
    while (words >> word) {
      const size_t equals = word.find('=');
      EXPECT_EQ(set(config.hyper, word.substr(0, equals), std::stod(word.substr(equals + 1))), "");
    }
  }
  return configs;
}

TEST(LearningRate, IsWhatPyTorchsSchedulersSet) {
  const std::vector<Config> configs = read_golden();
  ASSERT_GE(configs.size(), 14u);
  for (const Config& config : configs) {
    SCOPED_TRACE(config.name);
    ASSERT_EQ(config.rates.size(), 21u);
    for (const auto& [round, rate] : config.rates) {
      ASSERT_NEAR(learning_rate(config.hyper, round), rate, kTolerance * config.hyper.lr)
          << "round " << round;
    }
    double sum = 0, moment = 0;
    for (uint64_t round = 1; round <= kRounds; ++round) {
      sum += learning_rate(config.hyper, round);
      moment += static_cast<double>(round) * learning_rate(config.hyper, round);
    }
    EXPECT_NEAR(sum, config.sum, kTolerance * config.hyper.lr * kRounds)
        << "some round's rate differs; not one of those above";
    EXPECT_NEAR(moment, config.moment, kTolerance * config.hyper.lr * kRounds * kRounds)
        << "some rounds' rates differ; none of those above, and their sum does not";
  }
}

// Each of the settings at random, or as it is.
Hyper some_hyper(std::mt19937_64& random) {
  const auto below = [&random](double most) {
    return std::uniform_real_distribution<double>(0, most)(random);
  };
  const auto rounds = [&] { return std::floor(below(300)) + 1; };
  Hyper h;
  h.lr = below(2);
  if (random() % 4 == 0) h.lr_rounds_before = rounds() - 150;
  if (random() % 2) h.lr_warmup = rounds();
  if (random() % 2) h.lr_warmup_from = below(1);
  if (random() % 2) h.lr_exponential = 0.9 + below(0.2);
  if (random() % 2) h.lr_inverse = below(0.5);
  if (random() % 2) h.lr_inverse_power = below(3);
  if (random() % 2) h.lr_polynomial = rounds();
  if (random() % 2) h.lr_polynomial_power = below(3);
  if (random() % 2) h.lr_cosine = rounds();
  if (random() % 2) h.lr_end = below(1);
  return h;
}

TEST(LearningRate, IsTheReferencesToTheBit) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937_64 random(seed);
  for (int run = 0; run < 500; ++run) {
    const Hyper hyper = some_hyper(random);
    for (uint64_t round = 1; round <= 700; ++round) {
      ASSERT_EQ(learning_rate(hyper, round), reference::learning_rate(hyper, round))
          << "run " << run << ", round " << round;
    }
  }
}

TEST(LearningRate, WithoutASchedulePlainLr) {
  Hyper hyper;
  hyper.lr = 0.1;
  hyper.lr_end = 0.5, hyper.lr_inverse_power = 7, hyper.lr_polynomial_power = 3;  // of nothing
  hyper.lr_warmup_from = 0.25;
  constexpr uint64_t kLast = std::numeric_limits<uint64_t>::max();
  for (const uint64_t round : {uint64_t{0}, uint64_t{1}, uint64_t{2}, kLast}) {
    EXPECT_EQ(learning_rate(hyper, round), 0.1) << "round " << round;
  }
}

// Where each begins and ends: no round is one too early or too late.
TEST(LearningRate, BeginsWithRoundOneAndEndsWhereItSays) {
  Hyper hyper;
  hyper.lr = 8;
  hyper.lr_warmup = 4;
  hyper.lr_polynomial = 8;
  hyper.lr_end = 0.5;
  const double want[] = {0, 2, 4, 6, 8, 7.5, 7, 6.5, 6, 5.5, 5, 4.5, 4, 4, 4};
  for (uint64_t round = 1; round <= std::size(want); ++round) {
    EXPECT_EQ(learning_rate(hyper, round), want[round - 1]) << "round " << round;
  }
  EXPECT_EQ(learning_rate(hyper, 0), 0) << "there is no round before the first";
  hyper.lr_polynomial = 0;
  hyper.lr_cosine = 2;
  EXPECT_EQ(learning_rate(hyper, 5), 8);
  EXPECT_EQ(learning_rate(hyper, 6), 6);
  EXPECT_EQ(learning_rate(hyper, 7), 4);
  EXPECT_EQ(learning_rate(hyper, 1000), 4) << "it stays there: PyTorch's wave rises again";
  hyper.lr_rounds_before = 5;  // as a training that goes on in a new job
  EXPECT_EQ(learning_rate(hyper, 1), 6);
  EXPECT_EQ(learning_rate(hyper, 2), 4);
  hyper.lr_rounds_before = -100;  // begins again
  EXPECT_EQ(learning_rate(hyper, 100), 0);
  EXPECT_EQ(learning_rate(hyper, 101), 0);
  EXPECT_EQ(learning_rate(hyper, 102), 2);
  hyper = {};
  hyper.lr = 4;
  hyper.lr_exponential = 0.5;
  hyper.lr_inverse = 1;
  EXPECT_EQ(learning_rate(hyper, 1), 4);
  EXPECT_EQ(learning_rate(hyper, 2), 1);      // 4 · 1/2 · 1/2
  EXPECT_EQ(learning_rate(hyper, 4), 0.125);  // 4 · 1/8 · 1/4
}

}  // namespace learning_rate_test
}  // namespace phub::kernels

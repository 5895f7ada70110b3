// Which way is cheapest for each matrix: the formulas by hand, and the choice by trying all of
// them.
#include "phub/plan/ways.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "phub/plan/models.h"
#include "tests/seeds.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace {

using ::testing::HasSubstr;

// VGG-16's fc6 with 8 ranks of 32 samples, at a box of four times a rank's link.
TEST(Ways, CostWhatCrossesTheLinks) {
  const WayInputs inputs{
      .ranks = 8, .samples = 32, .worker_gbit_s = 10, .box_gbit_s = 40, .product_gflop_s = 100};
  const WayCost whole = whole_way(uint64_t{4096} * 25088, inputs);
  EXPECT_EQ(whole.worker_out, 411041792.0);
  EXPECT_EQ(whole.worker_in, 411041792.0);
  EXPECT_EQ(whole.box_in, 8 * 411041792.0);
  EXPECT_EQ(whole.box_out, 8 * 411041792.0);
  EXPECT_EQ(whole.product_s, 0);
  EXPECT_NEAR(whole.seconds(inputs), 8 * 411041792.0 * 8 / 40e9, 1e-9);  // the box
  const WayCost factors = factors_way(4096, 25088, inputs);
  EXPECT_EQ(factors.worker_out, 32 * 29184 * 4.0);
  EXPECT_EQ(factors.worker_in, 8 * 32 * 29184 * 4.0);
  EXPECT_EQ(factors.box_in, 8 * 32 * 29184 * 4.0);
  EXPECT_EQ(factors.box_out, 64 * 32 * 29184 * 4.0);
  EXPECT_NEAR(factors.product_s, 2.0 * 8 * 32 * 4096 * 25088 / 100e9, 1e-9);
  EXPECT_NEAR(factors.seconds(inputs), 64 * 32 * 29184 * 4.0 * 8 / 40e9 + factors.product_s, 1e-9);
}

double seconds_of(const JobSpec& spec, const WayInputs& inputs, uint32_t factors) {
  WayCost all;
  for (const KeySpec& key : spec.keys) {
    const bool as_factors = key.shape.size() == 2 && (factors & 1) != 0;
    if (key.shape.size() == 2) factors >>= 1;
    all += as_factors ? factors_way(key.shape[0], key.shape[1], inputs)
                      : whole_way(key.elements, inputs);
  }
  return all.seconds(inputs);
}

TEST(Ways, NoOtherChoiceIsFaster) {
  const testing::Seeds seeds = testing::fresh_seeds(300);
  size_t mixed = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const auto any = [&random](uint64_t least, uint64_t most) {
      return least + random() % (most - least + 1);
    };
    JobSpec spec;
    size_t matrices = 0;
    for (uint64_t k = any(1, 12); k > 0; --k) {
      KeySpec key{.name = fmt::format("k{}", k)};
      if (random() % 4 == 0) {
        key.elements = any(1, 3'000'000);
      } else {
        key.shape = {any(1, 3000), any(1, 3000)};
        key.elements = key.shape[0] * key.shape[1];
        ++matrices;
      }
      spec.keys.push_back(key);
    }
    const WayInputs inputs{.ranks = static_cast<uint32_t>(any(1, 16)),
                           .samples = any(1, 300),
                           .worker_gbit_s = static_cast<double>(any(1, 40)),
                           .box_gbit_s = static_cast<double>(any(1, 160)),
                           .product_gflop_s = static_cast<double>(any(20, 2000))};
    const Ways ways = choose_ways(spec, inputs);
    double best = INFINITY;
    for (uint32_t choice = 0; choice < uint32_t{1} << matrices; ++choice) {
      best = std::min(best, seconds_of(spec, inputs, choice));
    }
    ASSERT_NEAR(ways.chosen.seconds(inputs), best, 1e-9 * best);
    ASSERT_NEAR(ways.all_whole.seconds(inputs), seconds_of(spec, inputs, 0), 1e-9);
    uint32_t chosen = 0;
    ASSERT_EQ(ways.matrices.size(), matrices);
    for (size_t i = 0; i < matrices; ++i) {
      chosen |= uint32_t{ways.matrices[i].as_factors} << i;
    }
    ASSERT_NEAR(seconds_of(spec, inputs, chosen), best, 1e-9 * best);
    mixed += chosen != 0 && chosen + 1 != uint32_t{1} << matrices ? 1 : 0;
  }
  EXPECT_GT(mixed, seeds.count / 10);
}

// Of very many, the largest are tried.
TEST(Ways, ManyMatrices) {
  JobSpec spec;
  for (uint64_t k = 0; k < 300; ++k) {
    spec.keys.push_back(
        {.name = fmt::format("k{}", k), .elements = (1000 + k) * 1000, .shape = {1000 + k, 1000}});
  }
  const Ways ways = choose_ways(spec, {.ranks = 2, .samples = 4, .product_gflop_s = 1e6});
  for (const MatrixWays& matrix : ways.matrices) {
    EXPECT_EQ(matrix.as_factors, matrix.key >= 300 - kMostUndecided) << matrix.key;
  }
  EXPECT_LT(ways.chosen.seconds({}), ways.all_whole.seconds({}));
}

// In the paper's examples (figure 5) the fully connected layers are what factors are for.
TEST(Ways, OfTheModels) {
  const WayInputs inputs{
      .ranks = 8, .samples = 32, .worker_gbit_s = 10, .box_gbit_s = 80, .product_gflop_s = 1000};
  for (const char* model : {"alexnet", "vgg16", "vgg19"}) {
    JobSpec spec;
    spec.keys = model_or_file(model).keys;
    const Ways ways = choose_ways(spec, inputs);
    ASSERT_EQ(ways.matrices.size(), 3u) << model;
    EXPECT_TRUE(ways.matrices[0].as_factors) << model;
    EXPECT_LT(ways.chosen.seconds(inputs), 0.6 * ways.all_whole.seconds(inputs)) << model;
    const std::string text = describe(ways, spec, inputs);
    EXPECT_THAT(text, HasSubstr("ranks: 8; samples of each: 32"));
    EXPECT_THAT(text, HasSubstr(spec.keys[ways.matrices[0].key].name));
    EXPECT_THAT(text, HasSubstr(" of 3 matrices as factors"));
  }
}

TEST(Ways, BadInputIsNamed) {
  JobSpec spec;
  spec.keys = {{.name = "a", .elements = 4, .shape = {2, 2}}};
  const auto refused = [&spec](const char* what, const WayInputs& inputs) {
    testing::expect_error(ErrorCode::kInvalid, what, [&] { choose_ways(spec, inputs); });
  };
  refused("the number of ranks is 0", {.ranks = 0});
  refused("--samples is 0", {.samples = 0});
  refused("--worker-link-gbps is 0", {.worker_gbit_s = 0});
  refused("--link-gbps of all NICs is -1", {.box_gbit_s = -1});
  refused("--product-gflops is inf", {.product_gflop_s = INFINITY});
}

}  // namespace
}  // namespace phub

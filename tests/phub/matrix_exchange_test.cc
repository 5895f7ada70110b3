// Which way is cheapest for each matrix: the formulas by hand, and the choice by trying all of
// them.
#include "transport/control/matrix_exchange.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "phub/plan/matrix_exchange_describe.h"
#include "phub/plan/models.h"
#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "transport/control/layer_computing.h"

namespace phub {
namespace matrix_exchange_test {

using ::testing::HasSubstr;

// VGG-16's fc6 with 8 ranks of 32 samples, at a box of four times a rank's link.
TEST(MatrixExchange, CostWhatCrossesTheLinks) {
  const ExchangeInputs inputs{
      .ranks = 8, .samples = 32, .worker_gbit_s = 10, .box_gbit_s = 40, .product_gflop_s = 100};
  const ExchangeCost whole = whole_cost(uint64_t{4096} * 25088, inputs);
  EXPECT_EQ(whole.worker_out, 411041792.0);
  EXPECT_EQ(whole.worker_in, 411041792.0);
  EXPECT_EQ(whole.box_in, 8 * 411041792.0);
  EXPECT_EQ(whole.box_out, 8 * 411041792.0);
  EXPECT_EQ(whole.product_s, 0);
  EXPECT_NEAR(whole.seconds(inputs), 8 * 411041792.0 * 8 / 40e9, 1e-9);  // the box
  const ExchangeCost factors = ranks_cost(4096, 25088, inputs);
  EXPECT_EQ(factors.worker_out, 32 * 29184 * 4.0);
  EXPECT_EQ(factors.worker_in, 8 * 32 * 29184 * 4.0);
  EXPECT_EQ(factors.box_in, 8 * 32 * 29184 * 4.0);
  EXPECT_EQ(factors.box_out, 64 * 32 * 29184 * 4.0);
  EXPECT_NEAR(factors.product_s, 2.0 * 8 * 32 * 4096 * 25088 / 100e9, 1e-9);
  EXPECT_NEAR(factors.seconds(inputs), 64 * 32 * 29184 * 4.0 * 8 / 40e9 + factors.product_s, 1e-9);
}

// A box of four cores gives the matrix seven chunks, as none may have more than 2^24 elements, and
// one of its cores multiplies two.
TEST(MatrixExchange, OfABoxThatMultiplies) {
  ExchangeInputs inputs{.ranks = 8,
                        .samples = 32,
                        .worker_gbit_s = 10,
                        .box_gbit_s = 40,
                        .box_cores = 4,
                        .box_product_gflop_s = 100};
  const ExchangeCost box = *box_cost(4096, 25088, inputs);
  const double sent = (32 * (4096 + 7 * 25088) + 7) * 4.0;
  EXPECT_EQ(box.worker_out, sent);
  EXPECT_EQ(box.worker_in, 411041792.0);
  EXPECT_EQ(box.box_in, 8 * sent);
  EXPECT_EQ(box.box_out, 8 * 411041792.0);
  EXPECT_EQ(box.product_s, 0);
  const double rows = 668;  // 2^24 / 25088, in whole rows
  EXPECT_NEAR(box.box_product_s, 2.0 * 8 * 32 * 25088 * 2 * rows / 100e9, 1e-9);
  EXPECT_NEAR(box.seconds(inputs), 8 * 411041792.0 * 8 / 40e9 + box.box_product_s, 1e-9);
  inputs.result_bytes = 2;
  EXPECT_EQ(box_cost(4096, 25088, inputs)->box_out, 4 * 411041792.0);
  const ExchangeCost small = *box_cost(100, 64, inputs);
  EXPECT_EQ(small.worker_out, (32 * (100 + 4 * 64) + 4) * 4.0);
  EXPECT_FALSE(box_cost(100, 1 << 20, inputs)) << "no key has so many columns";
  inputs.samples = 1 << 20;
  EXPECT_FALSE(box_cost(100, 64, inputs)) << "nor such a rank_limit";
  inputs.samples = 32;
  inputs.or_rows = true;
  EXPECT_FALSE(box_cost(uint64_t{1} << 20, 64, inputs)) << "nor such a rows_limit";
  const double chunks = 8;  // on any box
  inputs.box_cores = 64;
  EXPECT_EQ(box_cost(1024, 64, inputs)->worker_out, (32 * (1024 + chunks * 64) + chunks) * 4.0);
  inputs.box_cores = 0;
  EXPECT_FALSE(box_cost(100, 64, inputs));
}

// `choice`: of each matrix in base 3. Nothing: one of them cannot be.
std::optional<double> seconds_of(const JobSpec& spec, const ExchangeInputs& inputs,
                                 uint32_t choice) {
  ExchangeCost all;
  for (const KeySpec& key : spec.keys) {
    if (key.shape.size() != 2) {
      all += whole_cost(key.elements, inputs);
      continue;
    }
    const uint32_t exchange = choice % 3;
    choice /= 3;
    if (exchange == 0) all += whole_cost(key.elements, inputs);
    if (exchange == 1) {
      const auto box = box_cost(key.shape[0], key.shape[1], inputs);
      if (!box) return std::nullopt;
      all += *box;
    }
    if (exchange == 2 && !inputs.to_ranks) return std::nullopt;
    if (exchange == 2) all += ranks_cost(key.shape[0], key.shape[1], inputs);
  }
  return all.seconds(inputs);
}

TEST(MatrixExchange, NoOtherChoiceIsFaster) {
  const testing::Seeds seeds = testing::fresh_seeds(300);
  size_t mixed = 0;  // matrices in different ways
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const auto any = [&random](uint64_t least, uint64_t most) {
      return least + random() % (most - least + 1);
    };
    JobSpec spec;
    size_t matrices = 0;
    for (uint64_t k = any(1, 9); k > 0; --k) {
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
    const ExchangeInputs inputs{.ranks = static_cast<uint32_t>(any(1, 16)),
                                .samples = any(1, 300),
                                .worker_gbit_s = static_cast<double>(any(1, 40)),
                                .box_gbit_s = static_cast<double>(any(1, 160)),
                                .product_gflop_s = static_cast<double>(any(20, 2000)),
                                .box_cores = static_cast<uint32_t>(any(0, 8)),
                                .box_product_gflop_s = static_cast<double>(any(20, 2000)),
                                .gradient_bytes = static_cast<double>(any(1, 4)),
                                .result_bytes = static_cast<double>(any(1, 4)),
                                .to_ranks = random() % 4 != 0};
    const Exchanges exchanges = choose_exchanges(spec, inputs);
    uint32_t choices = 1, chosen = 0;
    for (size_t i = 0; i < matrices; ++i) choices *= 3;
    double best = INFINITY;
    for (uint32_t choice = 0; choice < choices; ++choice) {
      best = std::min(best, seconds_of(spec, inputs, choice).value_or(INFINITY));
    }
    ASSERT_NEAR(exchanges.chosen.seconds(inputs), best, 1e-9 * best);
    ASSERT_NEAR(exchanges.all_whole.seconds(inputs), *seconds_of(spec, inputs, 0), 1e-9);
    ASSERT_EQ(exchanges.matrices.size(), matrices);
    std::set<MatrixExchange> kinds;
    for (size_t i = matrices; i-- > 0;) {
      chosen = 3 * chosen + static_cast<uint32_t>(exchanges.matrices[i].exchange);
      kinds.insert(exchanges.matrices[i].exchange);
    }
    const auto seconds = seconds_of(spec, inputs, chosen);
    ASSERT_TRUE(seconds.has_value());
    ASSERT_NEAR(*seconds, best, 1e-9 * best);
    mixed += kinds.size() > 1 ? 1 : 0;
  }
  EXPECT_GT(mixed, 0u);
}

// Where a result is as large as a gradient, the way back takes as long as ever.
TEST(MatrixExchange, FactorsToTheBoxHelpWhereResultsAreSmall) {
  JobSpec spec;
  spec.keys = model_or_file("vgg16").keys;
  ExchangeInputs inputs{.ranks = 8,
                        .samples = 32,
                        .worker_gbit_s = 1,
                        .box_gbit_s = 4,
                        .box_cores = 8,
                        .box_product_gflop_s = 100,
                        .to_ranks = false};
  EXPECT_EQ(choose_exchanges(spec, inputs).matrices[0].exchange, MatrixExchange::kWhole);
  inputs.result_bytes = 1;
  const Exchanges exchanges = choose_exchanges(spec, inputs);
  EXPECT_EQ(exchanges.matrices[0].exchange, MatrixExchange::kBox);
  EXPECT_LT(exchanges.chosen.seconds(inputs), 0.7 * exchanges.all_whole.seconds(inputs));
}

// Of very many, the largest are tried.
TEST(MatrixExchange, ManyMatrices) {
  JobSpec spec;
  for (uint64_t k = 0; k < 300; ++k) {
    spec.keys.push_back(
        {.name = fmt::format("k{}", k), .elements = (1000 + k) * 1000, .shape = {1000 + k, 1000}});
  }
  const Exchanges exchanges =
      choose_exchanges(spec, {.ranks = 2, .samples = 4, .product_gflop_s = 1e6});
  for (const MatrixCosts& matrix : exchanges.matrices) {
    EXPECT_EQ(matrix.exchange, MatrixExchange::kRanks) << matrix.key;
  }
}

// Another way for a single one of many matrices takes no less, alone and with layers.
TEST(MatrixExchange, OfManyNoSingleOneIsBetterInAnotherWay) {
  const testing::Seeds seeds = testing::fresh_seeds(100);
  size_t mixed = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const auto any = [&random](uint64_t least, uint64_t most) {
      return least + random() % (most - least + 1);
    };
    JobSpec spec;
    std::vector<LayerComputing> layers;
    ExchangeInputs inputs{.ranks = static_cast<uint32_t>(any(2, 8)),
                          .worker_gbit_s = static_cast<double>(any(1, 10)),
                          .box_gbit_s = static_cast<double>(any(1, 40)),
                          .product_gflop_s = static_cast<double>(any(20, 2000))};
    for (uint32_t k = 0; k < 40; ++k) {
      const uint64_t rows = any(1, 3000), columns = any(1, 3000);
      spec.keys.push_back(
          {.name = fmt::format("k{}", k), .elements = rows * columns, .shape = {rows, columns}});
      inputs.samples_of.push_back(any(0, 300));
      layers.push_back({.keys = {k}, .backward_s = static_cast<double>(any(0, 5)) / 1e3});
    }
    if (random() % 2 == 0) layers.clear();
    const auto seconds = [&](const std::vector<ExchangeCost>& of_key) {
      if (!layers.empty()) return iteration_seconds(layers, of_key, inputs, true);
      ExchangeCost all;
      for (const ExchangeCost& cost : of_key) all += cost;
      return all.seconds(inputs);
    };
    const Exchanges exchanges = choose_exchanges(spec, inputs, layers);
    std::vector<ExchangeCost> chosen;
    for (const KeySpec& key : spec.keys) chosen.push_back(whole_cost(key.elements, inputs));
    ASSERT_GE(seconds(chosen), 0);
    const double whole = seconds(chosen);
    std::set<MatrixExchange> ways;
    for (const MatrixCosts& matrix : exchanges.matrices) {
      ASSERT_GT(inputs.samples_of[matrix.key], 0u);
      ExchangeInputs of = inputs;
      of.samples = inputs.samples_of[matrix.key];
      EXPECT_EQ(matrix.ranks.worker_out, ranks_cost(matrix.rows, matrix.columns, of).worker_out);
      chosen[matrix.key] = matrix.cost();
      ways.insert(matrix.exchange);
    }
    const double best = seconds(chosen);
    EXPECT_LE(best, whole * (1 + 1e-6));
    for (const MatrixCosts& matrix : exchanges.matrices) {
      std::vector<ExchangeCost> other = chosen;
      other[matrix.key] = matrix.exchange == MatrixExchange::kWhole ? matrix.ranks : matrix.whole;
      EXPECT_GE(seconds(other), best * (1 - 1e-6)) << matrix.key;
    }
    mixed += ways.size() > 1 ? 1 : 0;
  }
  EXPECT_GT(mixed, 0u);
}

// In the paper's examples (figure 5) the fully connected layers are what factors are for.
TEST(MatrixExchange, OfTheModels) {
  const ExchangeInputs inputs{
      .ranks = 8, .samples = 32, .worker_gbit_s = 10, .box_gbit_s = 80, .product_gflop_s = 1000};
  for (const char* model : {"alexnet", "vgg16", "vgg19"}) {
    JobSpec spec;
    spec.keys = model_or_file(model).keys;
    const Exchanges exchanges = choose_exchanges(spec, inputs);
    ASSERT_EQ(exchanges.matrices.size(), 3u) << model;
    EXPECT_EQ(exchanges.matrices[0].exchange, MatrixExchange::kRanks) << model;
    EXPECT_LT(exchanges.chosen.seconds(inputs), 0.6 * exchanges.all_whole.seconds(inputs)) << model;
    const std::string text = describe(exchanges, spec, inputs);
    EXPECT_THAT(text, HasSubstr("ranks: 8; samples of each: 32"));
    EXPECT_THAT(text, HasSubstr(spec.keys[exchanges.matrices[0].key].name));
    EXPECT_THAT(text, HasSubstr(" of 3 matrices as factors"));
  }
}

// Links and products so slow that no time is finite; of matrices that are tried in all ways, and of
// more.
TEST(MatrixExchange, AllAreWholeIfNothingEverComes) {
  for (const size_t count : {2, 40}) {
    JobSpec spec;
    for (size_t k = 0; k < count; ++k) {
      spec.keys.push_back({.name = fmt::format("{}", k), .elements = 1'000'000});
      spec.keys.back().shape = {1000, 1000};
    }
    ExchangeInputs slow_link{.ranks = 2, .samples = 4, .worker_gbit_s = 1e-320};
    ExchangeInputs slow_products{.ranks = 2, .samples = 4, .product_gflop_s = 1e-320};
    for (const ExchangeInputs& inputs : {slow_link, slow_products}) {
      const Exchanges exchanges = choose_exchanges(spec, inputs);
      ASSERT_EQ(exchanges.matrices.size(), count);
      for (const MatrixCosts& matrix : exchanges.matrices) {
        EXPECT_EQ(matrix.exchange, MatrixExchange::kWhole);
      }
    }
  }
}

TEST(MatrixExchange, BadInputIsNamed) {
  JobSpec spec;
  spec.keys = {{.name = "a", .elements = 4, .shape = {2, 2}}};
  const auto refused = [&spec](const char* what, const ExchangeInputs& inputs) {
    testing::expect_error(ErrorCode::kInvalid, what, [&] { choose_exchanges(spec, inputs); });
  };
  refused("the number of ranks is 0", {.ranks = 0});
  refused("--samples is 0", {.samples = 0});
  refused("--worker-link-gbps is 0", {.worker_gbit_s = 0});
  refused("--link-gbps of all NICs is -1", {.box_gbit_s = -1});
  refused("--product-gflops is inf", {.product_gflop_s = INFINITY});
  refused("--box-product-gflops is -2", {.box_product_gflop_s = -2});
}

}  // namespace matrix_exchange_test
}  // namespace phub

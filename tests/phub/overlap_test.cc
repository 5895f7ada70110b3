// How long an iteration takes whose exchange computing hides: by hand, against a simulation chunk
// by chunk, and against what bench/ladder has measured.
#include "phub/plan/overlap.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "phub/plan/models.h"
#include "tests/seeds.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace overlap_test {

using ::testing::ElementsAre;

JobSpec spec_of(const std::string& model) {
  JobSpec spec{.name = model};
  spec.keys = model_or_file(model).keys;
  return spec;
}

std::vector<ExchangeCost> whole_of(const JobSpec& spec, std::span<const LayerComputing> layers,
                                   const ExchangeInputs& inputs) {
  std::vector<ExchangeCost> costs(layers.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    for (const uint32_t key : layers[l].keys) {
      costs[l] += whole_cost(spec.keys[key].elements, inputs);
    }
  }
  return costs;
}

// Two layers. Each one's gradient takes a second on the way there and one back; the upper one's is
// ready after 2 s, the lower one's after 5.
TEST(Overlap, ByHand) {
  const ExchangeInputs inputs{.worker_gbit_s = 8, .box_gbit_s = 8};  // a byte in a nanosecond
  const std::vector<LayerComputing> layers = {
      {.name = "low", .keys = {0}, .forward_s = 1, .backward_s = 3},
      {.name = "high", .keys = {1}, .forward_s = 1, .backward_s = 2}};
  ExchangeCost second{.worker_out = 1e9, .worker_in = 1e9};
  std::vector<ExchangeCost> costs = {second, second};
  const auto iteration = [&](bool overlaps) {
    return iteration_seconds(layers, costs, inputs, overlaps);
  };
  EXPECT_DOUBLE_EQ(iteration(true), 5 + 1 + 2);  // of the lower one nothing is hidden
  EXPECT_DOUBLE_EQ(iteration(false), 5 + 2 + 2);
  costs[1].worker_out = costs[1].worker_in = 6e9;
  EXPECT_DOUBLE_EQ(iteration(true), 2 + 6 + 1 + 2);  // it waits for the upper one's
  EXPECT_DOUBLE_EQ(iteration(false), 5 + 7 + 2);
  costs[1].worker_in = 1e9;  // the way there alone is long
  EXPECT_DOUBLE_EQ(iteration(true), 2 + 6 + 1 + 2);
  costs = {second, second};
  costs[1].product_s = 4;  // ready at 2, there at 3, made at 7, while the lower one's forward ends
  EXPECT_DOUBLE_EQ(iteration(true), 7 + 1);
  costs[1].product_s = 1;
  costs[1].box_product_s =
      3;  // there at 3, made at 6, back at 7, made at 8: behind the lower one's
  EXPECT_DOUBLE_EQ(iteration(true), 9 + 1);
  costs = {ExchangeCost(), ExchangeCost()};
  EXPECT_DOUBLE_EQ(iteration(true), 7);
  EXPECT_DOUBLE_EQ(iteration(false), 7);
}

// Gradients and results of each layer in pieces, which follow each other on a link for either way.
double simulated(std::span<const LayerComputing> layers, std::span<const ExchangeCost> costs,
                 const ExchangeInputs& inputs, bool overlaps) {
  constexpr int kPieces = 400;
  const auto seconds = [](double bytes, double gbit_s) { return bytes * 8 / (gbit_s * 1e9); };
  double backward = 0;
  for (const LayerComputing& layer : layers) backward += layer.backward_s;
  double now = 0, out = 0, in = 0;
  std::vector<double> back(layers.size());
  for (size_t l = layers.size(); l-- > 0;) {
    now += layers[l].backward_s;
    const ExchangeCost& cost = costs[l];
    const double each_out = std::max(seconds(cost.worker_out, inputs.worker_gbit_s),
                                     seconds(cost.box_in, inputs.box_gbit_s)) /
                            kPieces;
    const double each_in = std::max(seconds(cost.worker_in, inputs.worker_gbit_s),
                                    seconds(cost.box_out, inputs.box_gbit_s)) /
                           kPieces;
    out = std::max(out, overlaps ? now : backward);
    for (int i = 0; i < kPieces; ++i) {
      out += each_out;
      in = std::max(in, out) + each_in;
    }
    back[l] = in;
  }
  double done = backward;
  for (size_t l = 0; l < layers.size() && !overlaps; ++l) done = std::max(done, back[l]);
  for (size_t l = 0; l < layers.size(); ++l) done = std::max(done, back[l]) + layers[l].forward_s;
  return done;
}

TEST(Overlap, IsThatOfASimulationInPieces) {
  const auto seeds = testing::fresh_seeds(200);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const auto any = [&random](double most) {
      return std::uniform_real_distribution<>(0, most)(random);
    };
    const ExchangeInputs inputs{.worker_gbit_s = 1 + any(20), .box_gbit_s = 1 + any(20)};
    std::vector<LayerComputing> layers(1 + random() % 12);
    std::vector<ExchangeCost> costs(layers.size());
    double transfers = 0;
    for (size_t l = 0; l < layers.size(); ++l) {
      layers[l] = {.name = "l", .keys = {0}, .forward_s = any(1), .backward_s = any(2)};
      costs[l] = {
          .worker_out = any(2e9), .worker_in = any(2e9), .box_in = any(2e9), .box_out = any(2e9)};
      transfers += costs[l].seconds(inputs);
    }
    const double without = iteration_seconds(layers, costs, inputs, false);
    const double with = iteration_seconds(layers, costs, inputs, true);
    // A piece of each layer's comes back after it has come there.
    EXPECT_NEAR(with, simulated(layers, costs, inputs, true), 2 * transfers / 400 + 1e-9);
    EXPECT_NEAR(without, simulated(layers, costs, inputs, false), 2 * transfers / 400 + 1e-9);
    EXPECT_LE(with, without + 1e-9);
    ExchangeCost all;
    for (const ExchangeCost& cost : costs) all += cost;
    EXPECT_GE(with, std::max(computing_seconds(layers), all.seconds(inputs)) - 1e-9);
  }
}

// bench/README.md, "ladder": the speed-up of so many nodes, one box with one link of 10 Gbit/s.
TEST(Overlap, IsNearWhatTheLadderHasMeasured) {
  struct Rung {
    const char *model, *compute_ms;
    uint32_t nodes;
    double without, with;
  };
  for (const Rung& rung : {Rung{"alexnet", "960", 4, 2.13, 3.32},
                           {"alexnet", "960", 8, 2.86, 3.84},
                           {"vgg16", "4060", 4, 2.73, 3.93},
                           {"googlenet", "422.2", 2, 1.76, 1.99},
                           {"googlenet", "422.2", 4, 3.16, 3.99},
                           {"googlenet", "422.2", 8, 5.36, 7.97}}) {
    const JobSpec spec = spec_of(rung.model);
    const ExchangeInputs inputs{.ranks = rung.nodes, .worker_gbit_s = 10, .box_gbit_s = 10};
    const auto layers = computing_of(spec, rung.compute_ms);
    const auto costs = whole_of(spec, layers, inputs);
    const auto speed_up = [&](bool overlaps) {
      return rung.nodes * computing_seconds(layers) /
             iteration_seconds(layers, costs, inputs, overlaps);
    };
    SCOPED_TRACE(fmt::format("{}, {} nodes", rung.model, rung.nodes));
    EXPECT_NEAR(speed_up(false) / rung.without, 1, 0.08);
    EXPECT_NEAR(speed_up(true) / rung.with, 1, 0.08);
  }
}

// With computing, a matrix is whole where that is hidden, though factors take less of the link.
TEST(Overlap, TheChoiceIsThatOfAnIteration) {
  const auto seeds = testing::fresh_seeds(60);
  size_t differs = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const auto any = [&random](uint64_t least, uint64_t most) {
      return least + random() % (most - least + 1);
    };
    JobSpec spec{.name = "some"};
    std::vector<LayerComputing> layers;
    for (uint32_t k = 0, keys = static_cast<uint32_t>(any(1, 5)); k < keys; ++k) {
      KeySpec key{.name = fmt::format("k{}", k), .shape = {any(100, 3000), any(100, 3000)}};
      key.elements = key.shape[0] * key.shape[1];
      spec.keys.push_back(key);
      layers.push_back({.name = key.name,
                        .keys = {k},
                        .forward_s = static_cast<double>(any(0, 20)) / 1e3,
                        .backward_s = static_cast<double>(any(0, 40)) / 1e3});
    }
    const ExchangeInputs inputs{.ranks = static_cast<uint32_t>(any(1, 8)),
                                .samples = any(1, 200),
                                .worker_gbit_s = static_cast<double>(any(1, 40)),
                                .box_gbit_s = static_cast<double>(any(1, 80)),
                                .product_gflop_s = static_cast<double>(any(20, 2000)),
                                .box_cores = static_cast<uint32_t>(any(0, 4)),
                                .box_product_gflop_s = static_cast<double>(any(20, 2000)),
                                .result_bytes = static_cast<double>(any(1, 4)),
                                .to_ranks = random() % 4 != 0};
    const Exchanges exchanges = choose_exchanges(spec, inputs, layers);
    const double chosen = iteration_seconds(layers, exchanges.chosen_of_layer, inputs, true);
    uint32_t choices = 1;
    for (size_t i = 0; i < layers.size(); ++i) choices *= 3;
    double best = INFINITY;
    for (uint32_t choice = 0; choice < choices; ++choice) {
      std::vector<ExchangeCost> costs;
      bool can_be = true;
      for (size_t i = 0, left = choice; i < layers.size(); ++i, left /= 3) {
        const MatrixCosts& matrix = exchanges.matrices[i];
        can_be = can_be && (left % 3 != 1 || matrix.box) && (left % 3 != 2 || inputs.to_ranks);
        costs.push_back(left % 3 == 1 && matrix.box ? *matrix.box
                        : left % 3 == 2             ? matrix.ranks
                                                    : matrix.whole);
      }
      if (can_be) best = std::min(best, iteration_seconds(layers, costs, inputs, true));
    }
    EXPECT_NEAR(chosen, best, 1e-9);
    const Exchanges alone = choose_exchanges(spec, inputs);
    for (size_t i = 0; i < layers.size(); ++i) {
      differs += alone.matrices[i].exchange != exchanges.matrices[i].exchange ? 1 : 0;
    }
  }
  if (seeds.count > 1) {
    EXPECT_GT(differs, 0u);
  }
}

TEST(Overlap, AnIterationIsSharedOutByMultiplications) {
  const JobSpec spec = spec_of("alexnet");
  const auto layers = computing_of(spec, "900");
  ASSERT_EQ(layers.size(), 8u);
  EXPECT_NEAR(computing_seconds(layers), 0.9, 1e-9);
  double forward = 0;
  for (const LayerComputing& layer : layers) forward += layer.forward_s;
  EXPECT_NEAR(forward, 0.3, 1e-9);
  EXPECT_EQ(layers[0].name, "features.0");
  EXPECT_THAT(layers[7].keys, ElementsAre(14, 15));
  const double of_fc6 = 4096.0 * 9216 / 714'188'480;
  EXPECT_NEAR(layers[5].forward_s + layers[5].backward_s, 0.9 * of_fc6, 1e-5);
}

TEST(Overlap, LayersOfAFile) {
  JobSpec spec{.name = "mine"};
  spec.keys = {{.name = "a.weight", .elements = 1},
               {.name = "a.bias", .elements = 1},
               {.name = "a.b.weight", .elements = 1},
               {.name = "ab", .elements = 1}};
  const auto parse = [&](const std::string& text) { return parse_computing(spec, text, "f"); };
  const auto layers = parse(R"({"layers": [{"name": "a", "forward_ms": 1, "backward_ms": 2.5},
    {"name": "a.b", "forward_ms": 0, "backward_ms": 3},
    {"name": "relu", "forward_ms": 0.5, "backward_ms": 0},
    {"name": "ab", "forward_ms": 0, "backward_ms": 0}]})");
  ASSERT_EQ(layers.size(), 4u);
  EXPECT_THAT(layers[0].keys, ElementsAre(0, 1));
  EXPECT_THAT(layers[1].keys, ElementsAre(2));
  EXPECT_THAT(layers[2].keys, ElementsAre());
  EXPECT_THAT(layers[3].keys, ElementsAre(3));
  EXPECT_DOUBLE_EQ(computing_seconds(layers), 7e-3);
  const auto refused = [&](const char* what, const std::string& text) {
    testing::expect_error(ErrorCode::kInvalid, what, [&] { parse(text); });
  };
  refused("f: key 'ab' is of no layer",
          R"({"layers": [{"name": "a", "forward_ms": 1, "backward_ms": 1}]})");
  refused("f: layer 'a': -1 ms",
          R"({"layers": [{"name": "a", "forward_ms": 1, "backward_ms": -1}]})");
  refused("f: layer 'a' is there twice",
          R"({"layers": [{"name": "a", "forward_ms": 1, "backward_ms": 1},
                         {"name": "a", "forward_ms": 1, "backward_ms": 1}]})");
  spec.keys.resize(1);
  refused("f: all layers compute for 0 ms",
          R"({"layers": [{"name": "a", "forward_ms": 0, "backward_ms": 0}]})");
  refused("backward_ms", R"({"layers": [{"name": "a", "forward_ms": 1}]})");
  const auto no = [&](const char* what, const char* argument) {
    testing::expect_error(ErrorCode::kInvalid, what, [&] { computing_of(spec, argument); });
  };
  no("'fast' is neither", "fast");
  no("'-3' is neither", "-3");
  no("of the layers of alexnet, vgg11, vgg16, googlenet, ", "100");
  no("alone, not of 'mine'", "100");
  no("/no/such.json: No such file", "/no/such.json");
}

}  // namespace overlap_test
}  // namespace phub

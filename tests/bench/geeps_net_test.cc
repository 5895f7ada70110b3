// Whether the nets of geeps_bench are those that they are named after, and demand what they say.
#include "bench/geeps_net.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>

#include "bench/geeps_run.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps_bench {
namespace geeps_net_test {

double connections(const Net& net) {
  double all = 0;
  for (const Layer& layer : net.layers) all += layer.connections;
  return all;
}

uint64_t bytes_of(const geeps::TableSpec& table) {
  return table.keys.size() * table.row_floats * sizeof(float);
}

TEST(GeepsNet, AdamLikeHasTheFiguresOfThePaper) {
  const Net net = adam_like();
  EXPECT_NEAR(connections(net), 2.4e9, 0.1e9);
  EXPECT_NEAR(net.weights() * 4, 470e6, 5e6);
  EXPECT_NEAR(net.inputs * net.images * 4, 123e6, 1e6);
}

TEST(GeepsNet, AlexNetHasItsWeightsAndConnections) {
  EXPECT_NEAR(alexnet().weights(), 60.95e6, 0.05e6);  // without biases
  EXPECT_NEAR(connections(alexnet()), 724e6, 1e6);
}

TEST(GeepsNet, VeryLargeLayersAre373Megabytes) {
  const Net net = very_large(56);
  EXPECT_NEAR(net.layers[0].weights * 4, 373e6, 1e6);
  EXPECT_NEAR(net.weights() * 4, 20.9e9, 0.1e9);
}

TEST(GeepsNet, TablesHoldTheNet) {
  const Net net = part_of(adam_like(), 8);
  const Training training(net, Machine());
  std::map<std::string, uint64_t> bytes;
  for (const geeps::TableSpec& table : training.tables()) bytes[table.name] = bytes_of(table);
  const uint64_t row = training.tables()[0].row_floats * sizeof(float);
  for (const Layer& layer : net.layers) {
    const auto is_about = [&](const std::string& name, double floats) {
      EXPECT_GE(bytes[name], static_cast<uint64_t>(floats) * 4) << name;
      EXPECT_LT(bytes[name], static_cast<uint64_t>(floats) * 4 + row + 4) << name;
    };
    if (layer.weights > 0) is_about(layer.name, layer.weights);
    is_about(layer.name + ".out", layer.outputs * net.images);
    is_about(layer.name + ".error", layer.outputs * net.images);
  }
}

// Arithmetic is 6 operations per connection and image; the time is more where memory is slower.
TEST(GeepsNet, ComputationTakesWhatItsOperationsDo) {
  const Net net = adam_like();
  const double operations = 6 * connections(net) * net.images;
  const auto seconds = [&](const Machine& machine) {
    return std::chrono::duration<double>(Training(net, machine).compute_time()).count();
  };
  EXPECT_NEAR(seconds({.memory_bytes_per_second = 1e30}), operations / 10e12, 1e-6);
  EXPECT_GT(seconds({}), operations / 10e12);
  EXPECT_NEAR(seconds(slower({}, 8)), 8 * seconds({}), 1e-6);
}

// All clocks of an iteration in one table or in one per layer, in device memory that holds
// everything and in a part of it; no call is outside of the recorded sequence.
TEST(GeepsNet, IterationsFollowTheirSequence) {
  const Net net = part_of(adam_like(), 400);
  for (const Style style : {Style{}, Style{.whole = true}, Style{.one_table = true},
                            Style{.one_table = true, .whole = true}}) {
    const Training training(net, Machine(), style);
    const size_t keys = geeps::keys_of(training.tables()).size();
    const size_t tables = style.one_table ? 1 : 8;
    EXPECT_EQ(keys == tables, style.whole) << keys << " keys";
    const uint64_t everything = training.everything_bytes();
    EXPECT_GE(everything, training.least_unmoved_bytes());
    for (const uint64_t budget : {everything, everything * 35 / 100}) {
      TrainingRun run(training, Machine(), budget);
      run.seconds_per_iteration(2);
      run.cache().wait_all();
      const geeps::CacheStats stats = run.cache().stats();
      EXPECT_EQ(stats.outside_sequence, 0u);
      EXPECT_EQ(run.bytes_copied_by_caller(), 0u);
      EXPECT_EQ(stats.pushes, 3 * keys);
      EXPECT_EQ(run.cache().placement().moved_bytes == 0, budget == everything);
    }
  }
}

// Gradients that stay on the device to the end take as much as the weights, once, and nothing else
// is there beside what both styles have: outputs and errors.
TEST(GeepsNet, WhatKeepsGradientsHasNoLogAndNoExchange) {
  const Net net = part_of(alexnet(), 8);
  const Training kept(net, Machine(), {.keep_gradients = true});
  Net without = net;
  for (Layer& layer : without.layers) layer.weights = 0;
  const uint64_t data = Training(without, Machine()).least_unmoved_bytes();
  uint64_t weights = 0;
  for (const geeps::TableSpec& table : kept.tables()) {
    EXPECT_TRUE(table.local) << table.name;
    if (table.name.ends_with(".gradient")) weights += bytes_of(table);
  }
  EXPECT_NEAR(static_cast<double>(weights), net.weights() * 4, 8 * 4096);
  EXPECT_EQ(kept.least_unmoved_bytes(), data + 2 * weights);
  EXPECT_TRUE(kept.keeps_local_data(kept.least_unmoved_bytes()));
  EXPECT_FALSE(kept.keeps_local_data(kept.least_unmoved_bytes() - 4096));
}

}  // namespace geeps_net_test
}  // namespace phub::geeps_bench

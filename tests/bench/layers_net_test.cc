// Whether the layers of bench/ladder are those of the networks that they are named after.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bench/layers/walk.h"
#include "phub/plan/layers.h"
#include "transport/error.h"

namespace phub::layers {
namespace layers_net_test {

size_t matrices(const Net& net) {
  return static_cast<size_t>(std::ranges::count_if(
      net.layers, [](const Layer& layer) { return layer.matrix.has_value(); }));
}

// Multiplications of an image, as torchvision's documentation has them in billions.
TEST(LayersNet, HaveTheArithmeticOfTheirNetworks) {
  EXPECT_NEAR(net("alexnet").connections(), 0.714e9, 0.001e9);
  EXPECT_NEAR(net("vgg16").connections(), 15.47e9, 0.01e9);
  EXPECT_NEAR(net("googlenet").connections(), 1.498e9, 0.005e9);
  EXPECT_NEAR(net("vgg11").connections(), 7.609e9, 0.005e9);
  EXPECT_NEAR(net("inception_v3").connections(), 5.713e9, 0.01e9);
  EXPECT_NEAR(net("resnet50").connections(), 4.089e9, 0.005e9);
  EXPECT_NEAR(net("resnet101").connections(), 7.801e9, 0.005e9);
  EXPECT_NEAR(net("resnext101_32x8d").connections(), 16.414e9, 0.01e9);
}

TEST(LayersNet, HaveEveryKeyOnce) {
  for (const std::string_view name : net_names()) {
    const Net of = net(name);
    std::vector<size_t> keys;
    for (const Layer& layer : of.layers)
      keys.insert(keys.end(), layer.keys.begin(), layer.keys.end());
    ASSERT_EQ(keys.size(), of.table.keys.size()) << name;
    for (size_t k = 0; k < keys.size(); ++k) EXPECT_EQ(keys[k], k) << name;
  }
}

// Krizhevsky's five convolutions and three fully connected layers; Simonyan's 13 and three; and
// three convolutions, nine modules of six, and a fully connected layer.
TEST(LayersNet, HaveTheirLayers) {
  EXPECT_EQ(net("alexnet").layers.size(), 8u);
  EXPECT_EQ(matrices(net("alexnet")), 3u);
  EXPECT_EQ(net("vgg16").layers.size(), 16u);
  EXPECT_EQ(matrices(net("vgg16")), 3u);
  EXPECT_EQ(net("googlenet").layers.size(), 3u + 9 * 6 + 1);
  EXPECT_EQ(matrices(net("googlenet")), 1u);
  EXPECT_EQ(net("vgg11").layers.size(), 11u);
  // And a projection in each of the four stages: normalisation is no layer of its own.
  EXPECT_EQ(net("resnet50").layers.size(), 50u + 4);
  EXPECT_EQ(net("resnet269").layers.size(), 269u + 4);
  EXPECT_EQ(net("resnext269_32x4d").layers.size(), 269u + 4);
}

TEST(LayersNet, RefusesOthers) {
  try {
    net("bert-base");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalid);
    EXPECT_NE(std::string(error.what()).find("alexnet, vgg11, vgg16, googlenet"),
              std::string::npos);
  }
}

TEST(LayersWalk, AJobHasWholeKeysOrFactors) {
  const Net of = net("googlenet");
  WalkOptions options;
  options.as_factors = {of.layers.size() - 1};
  options.samples = 32;
  JobSpec spec;
  spec.world_size = 3;
  spec = job_of(of, options, spec);
  EXPECT_EQ(spec.keys.size(), of.table.keys.size() - 1 + 3);
  EXPECT_EQ(spec.keys.back().name, "fc.weight/factors/2");
  EXPECT_EQ(spec.keys.back().elements, 32u * (1000 + 1024) + 1);
  EXPECT_EQ(product_flop(of, of.layers.size() - 1, 3, 32), 2.0 * 3 * 32 * 1000 * 1024);
}

TEST(LayersWalk, WhatIsNeededFirstGoesFirst) {
  const Net of = net("alexnet");
  WalkOptions options;
  for (const KeySpec& key : job_of(of, options, {}).keys) EXPECT_EQ(key.priority, 0);
  options.first_layers_first = true;
  const JobSpec spec = job_of(of, options, {});
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    EXPECT_EQ(spec.keys[k].priority, 8 - static_cast<int32_t>(k / 2));  // a weight and a bias each
  }
}

TEST(LayersWalk, ANodeAloneComputesForTheStatedTime) {
  WalkOptions options;
  options.compute_s = 0.05;
  options.iterations = 2;
  const WalkResult result = walk_alone(net("alexnet"), options);
  EXPECT_GE(result.iteration_s, 0.05);
  EXPECT_EQ(result.pushed_early, 0u);
}

}  // namespace layers_net_test
}  // namespace phub::layers

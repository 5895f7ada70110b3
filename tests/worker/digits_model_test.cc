#include "worker/examples/digits_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace phub::digits {
namespace digits_model_test {

Samples random_samples(int count, uint64_t seed) {
  Random random(seed);
  Samples samples;
  samples.images.resize(kPixels, count);
  for (Eigen::Index i = 0; i < samples.images.size(); ++i) {
    samples.images.data()[i] = random.uniform();
  }
  for (int n = 0; n < count; ++n) samples.labels.push_back(static_cast<int>(random.next() % 10));
  return samples;
}

std::span<const float> key_of(const Network& network, std::span<const float> all, size_t key) {
  return all.subspan(key_offsets(network.keys())[key], network.keys()[key].elements);
}

float forward(Network& network, std::span<const float> parameters, const Samples& samples) {
  network.start(samples.images);
  for (size_t l = 0; l < network.layers(); ++l) {
    network.forward(l, key_of(network, parameters, Network::weights_key(l)),
                    key_of(network, parameters, Network::bias_key(l)));
  }
  return network.loss(samples.labels);
}

// Gradient of all keys, one after another; `skew` floats before each array move its alignment.
std::vector<float> gradient(Network& network, std::span<const float> parameters,
                            const Samples& samples, size_t skew = 0) {
  forward(network, parameters, samples);
  std::vector<std::vector<float>> keys;
  for (const KeySpec& key : network.keys()) keys.emplace_back(key.elements + skew);
  for (size_t l = network.layers(); l-- > 0;) {
    const size_t weights = Network::weights_key(l);
    const size_t bias = Network::bias_key(l);
    network.backward(l, key_of(network, parameters, weights),
                     std::span(keys[weights]).subspan(skew), std::span(keys[bias]).subspan(skew));
  }
  std::vector<float> all;
  for (const auto& key : keys) all.insert(all.end(), key.begin() + skew, key.end());
  return all;
}

TEST(Network, KeysAreNamedAndSizedByLayer) {
  const Network network({64, 20, 10});
  ASSERT_EQ(network.keys().size(), 4u);
  EXPECT_EQ(network.keys()[0], (KeySpec{.name = "w1", .elements = 64 * 20, .shape = {64, 20}}));
  EXPECT_EQ(network.keys()[1], (KeySpec{.name = "b1", .elements = 20, .shape = {20}}));
  EXPECT_EQ(network.keys()[2], (KeySpec{.name = "w2", .elements = 20 * 10, .shape = {20, 10}}));
  EXPECT_EQ(network.keys()[3], (KeySpec{.name = "b2", .elements = 10, .shape = {10}}));
  EXPECT_EQ(network.parameters(), 64u * 20 + 20 + 20 * 10 + 10);
}

TEST(Network, GradientIsTheSlopeOfTheLoss) {
  const uint64_t seed = 5;
  SCOPED_TRACE(seed);
  Network network({64, 12, 7, 10});
  const Samples samples = random_samples(9, seed);
  std::vector<float> parameters = network.initial(seed);
  // Biases away from zero, so that no ReLU sits on its corner.
  Random random(seed + 1);
  for (float& p : parameters) p += 0.2f * (random.uniform() - 0.5f);
  const std::vector<float> slopes = gradient(network, parameters, samples);
  const float step = 1.0f / 1024;
  double worst = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const float original = parameters[i];
    parameters[i] = original + step;
    const double above = forward(network, parameters, samples);
    parameters[i] = original - step;
    const double below = forward(network, parameters, samples);
    parameters[i] = original;
    worst = std::max(worst, std::abs((above - below) / (2 * step) - slopes[i]));
  }
  const auto largest = std::ranges::max_element(slopes);
  EXPECT_GT(*largest, 0.05);
  EXPECT_LT(worst, 0.002);
}

TEST(Network, GradientIsTheSameBitsWhereverTheArraysLie) {
  Network network({64, 256, 10});
  const Samples samples = random_samples(16, 3);
  const std::vector<float> aligned = network.initial(3);
  const std::vector<float> expected = gradient(network, aligned, samples);
  for (size_t skew = 1; skew < 16; ++skew) {
    std::vector<float> moved(skew);
    moved.insert(moved.end(), aligned.begin(), aligned.end());
    const std::vector<float> actual =
        gradient(network, std::span<const float>(moved).subspan(skew), samples, skew);
    ASSERT_EQ(actual.size(), expected.size());
    EXPECT_EQ(std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(float)), 0)
        << "moved by " << skew << " floats";
  }
}

TEST(Network, LearnsTheDigits) {
  const Dataset data = load(PHUB_DIGITS_CSV);
  Network network({64, 64, 10});
  std::vector<float> parameters = network.initial(1);
  for (uint64_t round = 1; round <= 4000; ++round) {
    const Samples samples = batch(data.train, 1, 0, 1, round, 16);
    const std::vector<float> slopes = gradient(network, parameters, samples);
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i] -= 0.1f * slopes[i];
  }
  forward(network, parameters, data.test);
  EXPECT_GT(network.correct(data.test.labels), data.test.size() * 95 / 100);
}

}  // namespace digits_model_test
}  // namespace phub::digits

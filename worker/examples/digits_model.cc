#include "worker/examples/digits_model.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "transport/error.h"

namespace phub::digits {
namespace {

using Matrix = Eigen::Map<Eigen::MatrixXf>;
using ConstMatrix = Eigen::Map<const Eigen::MatrixXf>;

}  // namespace

Network::Network(std::vector<int> sizes) : sizes_(std::move(sizes)) {
  PHUB_CHECK(sizes_.size() >= 2);
  activations_.resize(sizes_.size());
  for (size_t l = 0; l < layers(); ++l) {
    const std::string number = std::to_string(l + 1);
    const auto outputs = static_cast<uint64_t>(sizes_[l + 1]);
    const auto inputs = static_cast<uint64_t>(sizes_[l]);
    keys_.push_back(
        {.name = "w" + number, .elements = outputs * inputs, .shape = {inputs, outputs}});
    keys_.push_back({.name = "b" + number, .elements = outputs, .shape = {outputs}});
  }
}

size_t Network::parameters() const { return key_offsets(keys_).back(); }

std::vector<float> Network::initial(uint64_t seed) const {
  std::vector<float> values(parameters(), 0.0f);
  const std::vector<size_t> offsets = key_offsets(keys_);
  Random random(seed);
  for (size_t l = 0; l < layers(); ++l) {
    const float limit = std::sqrt(6.0f / static_cast<float>(sizes_[l]));
    const size_t key = weights_key(l);
    for (size_t i = offsets[key]; i < offsets[key + 1]; ++i) {
      values[i] = limit * (2 * random.uniform() - 1);
    }
  }
  return values;
}

void Network::start(const Eigen::MatrixXf& images) {
  PHUB_CHECK(images.rows() == sizes_.front());
  activations_[0] = images;
}

void Network::forward(size_t layer, std::span<const float> weights, std::span<const float> bias) {
  PHUB_CHECK(weights.size() == keys_[weights_key(layer)].elements);
  PHUB_CHECK(bias.size() == keys_[bias_key(layer)].elements);
  const ConstMatrix w(weights.data(), sizes_[layer + 1], sizes_[layer]);
  const ConstMatrix b(bias.data(), sizes_[layer + 1], 1);
  Eigen::MatrixXf& out = activations_[layer + 1];
  out.noalias() = w * activations_[layer];
  out.colwise() += b.col(0);
  if (layer + 1 < layers()) out = out.cwiseMax(0.0f);
}

float Network::loss(const std::vector<int>& labels) {
  const Eigen::MatrixXf& logits = activations_.back();
  PHUB_CHECK(static_cast<Eigen::Index>(labels.size()) == logits.cols());
  delta_.resize(logits.rows(), logits.cols());
  const float scale = 1.0f / static_cast<float>(labels.size());
  float loss = 0;
  for (Eigen::Index n = 0; n < logits.cols(); ++n) {
    float highest = logits(0, n);
    for (Eigen::Index c = 1; c < logits.rows(); ++c) highest = std::max(highest, logits(c, n));
    float total = 0;
    for (Eigen::Index c = 0; c < logits.rows(); ++c) {
      delta_(c, n) = std::exp(logits(c, n) - highest);
      total += delta_(c, n);
    }
    const int label = labels[n];
    loss += std::log(total) + highest - logits(label, n);
    for (Eigen::Index c = 0; c < logits.rows(); ++c) {
      delta_(c, n) = (delta_(c, n) / total - (c == label ? 1.0f : 0.0f)) * scale;
    }
  }
  return loss * scale;
}

void Network::backward(size_t layer, std::span<const float> weights,
                       std::span<float> weight_gradient, std::span<float> bias_gradient) {
  PHUB_CHECK(weights.size() == weight_gradient.size());
  PHUB_CHECK(weights.size() == keys_[weights_key(layer)].elements);
  PHUB_CHECK(bias_gradient.size() == keys_[bias_key(layer)].elements);
  const Eigen::MatrixXf& input = activations_[layer];
  Matrix dw(weight_gradient.data(), sizes_[layer + 1], sizes_[layer]);
  dw.noalias() = delta_ * input.transpose();
  std::ranges::fill(bias_gradient, 0.0f);
  for (Eigen::Index n = 0; n < delta_.cols(); ++n) {
    for (Eigen::Index i = 0; i < delta_.rows(); ++i) bias_gradient[i] += delta_(i, n);
  }
  if (layer == 0) return;
  const ConstMatrix w(weights.data(), sizes_[layer + 1], sizes_[layer]);
  Eigen::MatrixXf below(sizes_[layer], delta_.cols());
  below.noalias() = w.transpose() * delta_;
  for (Eigen::Index i = 0; i < below.size(); ++i) {
    if (!(input.data()[i] > 0)) below.data()[i] = 0;
  }
  delta_ = std::move(below);
}

size_t Network::correct(const std::vector<int>& labels) const {
  const Eigen::MatrixXf& logits = activations_.back();
  PHUB_CHECK(static_cast<Eigen::Index>(labels.size()) == logits.cols());
  size_t correct = 0;
  for (Eigen::Index n = 0; n < logits.cols(); ++n) {
    Eigen::Index best = 0;
    logits.col(n).maxCoeff(&best);
    if (best == labels[n]) ++correct;
  }
  return correct;
}

std::vector<size_t> key_offsets(const std::vector<KeySpec>& keys) {
  std::vector<size_t> offsets = {0};
  for (const KeySpec& key : keys) offsets.push_back(offsets.back() + key.elements);
  return offsets;
}

}  // namespace phub::digits

// A small neural network: fully connected layers with ReLU between them, softmax and cross-entropy
// at the end. It holds activations only; parameters and gradients live with the caller, one key for
// the weights and one for the bias of every layer, so that they can be phub's memory.
//
//   network.start(images);
//   for l = 0 … L-1:  (wait for layer l)   network.forward(l, weights, bias)
//   loss = network.loss(labels)
//   for l = L-1 … 0:  network.backward(l, weights, weight_gradient, bias_gradient)   (push layer l)
//
// Gradients are those of the mean loss over the batch. The same inputs give the same bits wherever
// the arrays lie: matrix products (single-threaded Eigen) pack their operands, and the other sums
// are plain loops.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/job_spec.h"
#include "worker/examples/digits_data.h"

namespace phub::digits {

class Network {
 public:
  // Sizes of input, hidden layers and output: {64, 128, 10}.
  explicit Network(std::vector<int> sizes);

  size_t layers() const { return sizes_.size() - 1; }
  static size_t weights_key(size_t layer) { return 2 * layer; }
  static size_t bias_key(size_t layer) { return 2 * layer + 1; }
  // "w1", "b1", "w2", …; weights are column-major, outputs × inputs.
  const std::vector<KeySpec>& keys() const { return keys_; }
  size_t parameters() const;  // the number in all keys

  // All keys one after another: weights uniform with variance 2/inputs (He et al. 2015, equation
  // 10), biases zero.
  std::vector<float> initial(uint64_t seed) const;

  void start(const Eigen::MatrixXf& images);
  void forward(size_t layer, std::span<const float> weights, std::span<const float> bias);
  // Mean cross-entropy of the batch; begins the backward pass.
  float loss(const std::vector<int>& labels);
  // It also keeps everything that the layer below needs, so `weights` may change afterwards.
  void backward(size_t layer, std::span<const float> weights, std::span<float> weight_gradient,
                std::span<float> bias_gradient);

  // After the last forward(): how many images are given their own label.
  size_t correct(const std::vector<int>& labels) const;

 private:
  std::vector<int> sizes_;
  std::vector<KeySpec> keys_;
  std::vector<Eigen::MatrixXf> activations_;  // input of each layer, then the logits
  Eigen::MatrixXf delta_;                     // loss by the output of the layer that is next
};

// The beginning of each key when all keys lie one after another; the last entry is their total.
std::vector<size_t> key_offsets(const std::vector<KeySpec>& keys);

}  // namespace phub::digits

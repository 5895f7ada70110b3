// Layers one after another, with all their data in tables of a cache, as in GeePS's Algorithm 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "worker/examples/geeps/layers.h"
#include "worker/examples/geeps/model.h"

namespace phub::examples {

struct StackOptions {
  std::string name;  // its tables begin with it
  size_t samples;
  size_t parts = 1;          // parts of the activations, one for each time step
  bool input_error = false;  // is needed
};

// Errors and scratch are used by one time step at a time, so that they have one part. In all calls
// no `math` means virtual ones.
class Stack {
 public:
  // Adds the tables of parameters. `tables` outlives it.
  Stack(Tables& tables, Layers layers, StackOptions options);
  // REQUIRES: called once, after all tables of parameters and before all that follows.
  void add_local();

  size_t outputs() const { return layers_.back()->outputs(); }  // floats of a sample
  uint32_t input() const { return activations_.front(); }       // tables
  uint32_t output() const { return activations_.back(); }
  uint32_t input_error() const { return errors_.front(); }
  uint32_t output_error() const { return errors_.back(); }

  // Appends the first parameters, as tables have them.
  void initialize(Random& random, std::vector<float>& all) const;
  void forward(geeps::Cache& cache, Math* math, size_t part = 0) const;
  // `last`: of the clock.
  void backward(geeps::Cache& cache, Math* math, bool last, size_t part = 0) const;
  // Computes the output for so many samples. It runs on the host, without a cache.
  std::vector<float> compute(const Parameters& parameters, std::vector<float> in,
                             size_t samples) const;

 private:
  // They have all memory but that of the parameters, of their gradient, and scratch.
  void forward_layer(geeps::Cache& cache, Math* math, size_t layer, ForwardMemory memory) const;
  void backward_layer(geeps::Cache& cache, Math* math, size_t layer, BackwardMemory memory) const;

  Tables& tables_;
  Layers layers_;
  StackOptions options_;
  std::vector<uint32_t> parameters_;
  // For layer l: its input, the error of that, scratch. The last activation is the output.
  std::vector<uint32_t> activations_, errors_, scratch_;
};

// Softmax and cross-entropy of the output of a stack of one part.
class Loss {
 public:
  // `tables` and `stack`, whose local tables are there, outlive it.
  Loss(Tables& tables, const Stack& stack, size_t samples);

  void set_labels(geeps::Cache& cache, Math* math, const std::vector<float>& labels) const;
  // Writes the stack's error, scaled; the sum of the samples' losses.
  double run(geeps::Cache& cache, Math* math, float scale) const;

 private:
  const Tables& tables_;
  const Stack& stack_;
  size_t samples_;
  uint32_t labels_, losses_;
};

// The number of rows of logits that are highest at their label.
size_t count_correct(std::span<const float> logits, std::span<const int> labels);
// Describes the accuracy for people.
std::string held_out_accuracy(size_t correct, size_t samples);

}  // namespace phub::examples

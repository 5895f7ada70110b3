// A feed-forward network on the digits, trained as in GeePS's Algorithm 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "worker/examples/digits_data.h"
#include "worker/examples/geeps/layers.h"
#include "worker/examples/geeps/model.h"

namespace phub::examples {

class Network : public Model {
 public:
  // `data` outlives it.
  Network(Layers layers, const digits::Dataset& data, const Share& share);

  const Tables& tables() const override { return tables_; }
  std::vector<float> initial() const override;
  double train(geeps::Cache& cache, Math* math, uint64_t clock) override;
  std::string evaluate(const Parameters& parameters) const override;

  size_t correct(const Parameters& parameters, const digits::Samples& samples) const;

 private:
  // A mini-batch: `first` is its first sample in that of the clock; null: virtual.
  void train_mini_batch(geeps::Cache& cache, Math* math, const digits::Samples* batch, size_t first,
                        bool last);
  void set_input(geeps::Cache& cache, Math* math, const digits::Samples* batch, size_t first) const;
  void forward(geeps::Cache& cache, Math* math, size_t layer) const;
  void loss(geeps::Cache& cache, Math* math);
  void backward(geeps::Cache& cache, Math* math, size_t layer) const;

  Layers layers_;
  const digits::Dataset& data_;
  Share share_;
  Tables tables_;  // a layer's parameters have its number
  // Of layer l: its input, the error of that, scratch. The last activation is the logits.
  std::vector<uint32_t> activations_, errors_, scratch_;
  uint32_t labels_ = 0, losses_ = 0;
  double loss_ = 0;  // of the clock so far, summed
};

}  // namespace phub::examples

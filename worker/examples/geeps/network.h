// A feed-forward network on the digits, trained as in GeePS's Algorithm 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "worker/examples/digits_data.h"
#include "worker/examples/geeps/layers.h"
#include "worker/examples/geeps/model.h"
#include "worker/examples/geeps/stack.h"

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
  // `first` is the mini-batch's first sample in that of the clock; null: virtual.
  void set_input(geeps::Cache& cache, Math* math, const digits::Samples* batch, size_t first) const;

  const digits::Dataset& data_;
  Share share_;
  Tables tables_{share_};
  Stack stack_;
  std::optional<Loss> loss_;  // set by the constructor
};

}  // namespace phub::examples

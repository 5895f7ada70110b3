#include "transport/control/layer_computing.h"

#include <algorithm>

#include "transport/error.h"

namespace phub {
namespace {

// The rank's and the box's links share a direction's time.
double out_seconds(const ExchangeCost& cost, const ExchangeInputs& inputs) {
  return std::max(cost.worker_out / inputs.worker_gbit_s, cost.box_in / inputs.box_gbit_s) * 8e-9;
}
double in_seconds(const ExchangeCost& cost, const ExchangeInputs& inputs) {
  return std::max(cost.worker_in / inputs.worker_gbit_s, cost.box_out / inputs.box_gbit_s) * 8e-9;
}

// When each is free again.
class ExchangeOfLayers {
 public:
  explicit ExchangeOfLayers(const ExchangeInputs& inputs) : inputs_(inputs) {}

  // When the layer's results are there, whose gradients are ready then.
  double run(const ExchangeCost& cost, double ready) {
    const double began = std::max(ready, out_);
    out_ = began + out_seconds(cost, inputs_);
    double from = began;  // results follow gradients chunk by chunk
    if (cost.box_product_s > 0) from = box_ = std::max(out_, box_) + cost.box_product_s;
    in_ = std::max(std::max(from, in_) + in_seconds(cost, inputs_), out_);
    if (cost.product_s == 0) return in_;
    return rank_ = std::max(in_, rank_) + cost.product_s;
  }

 private:
  const ExchangeInputs& inputs_;
  double out_ = 0, box_ = 0, in_ = 0, rank_ = 0;
};

}  // namespace

double computing_seconds(std::span<const LayerComputing> layers) {
  double seconds = 0;
  for (const LayerComputing& layer : layers) seconds += layer.forward_s + layer.backward_s;
  return seconds;
}

double iteration_seconds(std::span<const LayerComputing> layers,
                         std::span<const ExchangeCost> costs, const ExchangeInputs& inputs,
                         bool overlaps) {
  PHUB_CHECK(layers.size() == costs.size());
  double backward = 0;
  for (const LayerComputing& layer : layers) backward += layer.backward_s;
  ExchangeOfLayers exchange(inputs);
  std::vector<double> back(layers.size());  // when the results are
  double now = 0;
  for (size_t l = layers.size(); l-- > 0;) {
    now += layers[l].backward_s;
    back[l] = exchange.run(costs[l], overlaps ? now : backward);
  }
  if (!overlaps) now = std::max(now, *std::ranges::max_element(back));
  for (size_t l = 0; l < layers.size(); ++l) {
    if (!layers[l].keys.empty()) now = std::max(now, back[l]);
    now += layers[l].forward_s;
  }
  return now;
}

}  // namespace phub

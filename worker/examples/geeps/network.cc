#include "worker/examples/geeps/network.h"

#include <optional>

namespace phub::examples {

using geeps::Cache;
using geeps::Fetch;
using geeps::LocalBuffer;

Network::Network(Layers layers, const digits::Dataset& data, const Share& share)
    : data_(data),
      share_(share),
      stack_(tables_, std::move(layers), {.name = "", .samples = share.samples}) {
  stack_.add_local();
  loss_.emplace(tables_, stack_, share.samples);
}

std::vector<float> Network::initial() const {
  std::vector<float> all;
  Random random(share_.seed);
  stack_.initialize(random, all);
  return all;
}

double Network::train(Cache& cache, Math* math, uint64_t clock) {
  const size_t samples = size_t{share_.samples} * share_.mini_batches;
  std::optional<digits::Samples> batch;
  if (math != nullptr) {
    batch = digits::batch(data_.train, share_.seed, share_.rank, share_.world, clock + 1, samples);
  }
  double loss = 0;
  for (size_t first = 0; first < samples; first += share_.samples) {
    set_input(cache, math, batch ? &*batch : nullptr, first);
    stack_.forward(cache, math);
    loss += loss_->run(cache, math, share_.scale());
    stack_.backward(cache, math, first + share_.samples == samples);
  }
  return loss / static_cast<double>(samples);
}

void Network::set_input(Cache& cache, Math* math, const digits::Samples* batch,
                        size_t first) const {
  {
    LocalBuffer images(cache, stack_.input(), tables_.rows(stack_.input()), Fetch::kNo);
    if (math != nullptr) {
      math->upload(batch->images.col(static_cast<Eigen::Index>(first)).data(), images.data(),
                   digits::kPixels * share_.samples);
    }
  }
  std::vector<float> labels;
  if (math != nullptr) {
    labels.assign(batch->labels.begin() + first, batch->labels.begin() + first + share_.samples);
  }
  loss_->set_labels(cache, math, labels);
}

size_t Network::correct(const Parameters& parameters, const digits::Samples& samples) const {
  const std::vector<float> in(samples.images.data(), samples.images.data() + samples.images.size());
  return count_correct(stack_.compute(parameters, in, samples.size()), samples.labels);
}

std::string Network::evaluate(const Parameters& parameters) const {
  return held_out_accuracy(correct(parameters, data_.test), data_.test.size());
}

}  // namespace phub::examples

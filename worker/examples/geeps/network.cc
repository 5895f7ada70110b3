#include "worker/examples/geeps/network.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "transport/error.h"

namespace phub::examples {

using geeps::Cache;
using geeps::Fetch;
using geeps::LocalBuffer;
using geeps::ReadBuffer;
using geeps::Save;
using geeps::UpdateBuffer;

namespace {
constexpr uint32_t kNone = UINT32_MAX;  // no such table
}

Network::Network(Layers layers, const digits::Dataset& data, const Share& share)
    : layers_(std::move(layers)), data_(data), share_(share) {
  const size_t samples = share_.samples;
  for (size_t l = 0; l < layers_.size(); ++l) {
    tables_.add_parameters(fmt::format("layer{}", l), layers_[l]->parameters());
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    PHUB_CHECK(l == 0 || layers_[l]->inputs() == layers_[l - 1]->outputs());
    activations_.push_back(
        tables_.add_local(fmt::format("in{}", l), layers_[l]->inputs() * samples));
  }
  activations_.push_back(tables_.add_local("logits", layers_.back()->outputs() * samples));
  for (size_t l = 0; l < layers_.size(); ++l) {
    errors_.push_back(
        l == 0 ? kNone
               : tables_.add_local(fmt::format("error{}", l), layers_[l]->inputs() * samples));
    const size_t scratch = layers_[l]->scratch(samples);
    scratch_.push_back(scratch == 0 ? kNone
                                    : tables_.add_local(fmt::format("scratch{}", l), scratch));
  }
  errors_.push_back(tables_.add_local("logits_error", layers_.back()->outputs() * samples));
  labels_ = tables_.add_local("labels", samples);
  losses_ = tables_.add_local("losses", samples);
}

std::vector<float> Network::initial() const {
  std::vector<float> all;
  Random random(share_.seed);
  for (uint32_t l = 0; l < layers_.size(); ++l) {
    const size_t at = all.size();
    all.resize(at + tables_.part_floats(l));
    layers_[l]->initialize(random, std::span(all).subspan(at, layers_[l]->parameters()));
  }
  return all;
}

double Network::train(Cache& cache, Math* math, uint64_t clock) {
  const size_t samples = size_t{share_.samples} * share_.mini_batches;
  std::optional<digits::Samples> batch;
  if (math != nullptr) {
    batch = digits::batch(data_.train, share_.seed, share_.rank, share_.world, clock + 1, samples);
  }
  loss_ = 0;
  for (size_t first = 0; first < samples; first += share_.samples) {
    train_mini_batch(cache, math, batch ? &*batch : nullptr, first,
                     first + share_.samples == samples);
  }
  return loss_ / static_cast<double>(samples);
}

void Network::train_mini_batch(Cache& cache, Math* math, const digits::Samples* batch, size_t first,
                               bool last) {
  set_input(cache, math, batch, first);
  for (size_t l = 0; l < layers_.size(); ++l) forward(cache, math, l);
  loss(cache, math);
  for (size_t l = layers_.size(); l-- > 0;) {
    backward(cache, math, l);
    if (last) cache.table_clock(static_cast<uint32_t>(l));
  }
}

void Network::set_input(Cache& cache, Math* math, const digits::Samples* batch,
                        size_t first) const {
  LocalBuffer images(cache, activations_[0], tables_.rows(activations_[0]), Fetch::kNo);
  LocalBuffer labels(cache, labels_, tables_.rows(labels_), Fetch::kNo);
  if (math == nullptr) return;
  const std::vector<float> named(batch->labels.begin() + first,
                                 batch->labels.begin() + first + share_.samples);
  math->upload(batch->images.col(first).data(), images.data(), digits::kPixels * named.size());
  math->upload(named.data(), labels.data(), named.size());
}

void Network::forward(Cache& cache, Math* math, size_t l) const {
  const auto table = static_cast<uint32_t>(l);
  ReadBuffer parameters(cache, table, tables_.rows(table));
  LocalBuffer in(cache, activations_[l], tables_.rows(activations_[l]), Fetch::kYes, Save::kNo);
  LocalBuffer out(cache, activations_[l + 1], tables_.rows(activations_[l + 1]), Fetch::kNo);
  std::optional<LocalBuffer> scratch;
  if (scratch_[l] != kNone) {
    scratch.emplace(cache, scratch_[l], tables_.rows(scratch_[l]), Fetch::kNo, Save::kNo);
  }
  if (math == nullptr) return;
  layers_[l]->forward(*math, {.samples = share_.samples,
                              .parameters = parameters.data(),
                              .in = in.data(),
                              .out = out.data(),
                              .scratch = scratch ? scratch->data() : nullptr});
}

void Network::loss(Cache& cache, Math* math) {
  const uint32_t top = activations_.back(), top_error = errors_.back();
  LocalBuffer logits(cache, top, tables_.rows(top), Fetch::kYes, Save::kNo);
  LocalBuffer labels(cache, labels_, tables_.rows(labels_), Fetch::kYes, Save::kNo);
  LocalBuffer error(cache, top_error, tables_.rows(top_error), Fetch::kNo);
  LocalBuffer losses(cache, losses_, tables_.rows(losses_), Fetch::kNo, Save::kNo);
  if (math == nullptr) return;
  std::vector<float> each(share_.samples);
  math->run(1, each.size(), Fill{0, losses.data()});
  math->run(each.size(), 1,
            SoftmaxLoss{layers_.back()->outputs(), share_.scale(), logits.data(), labels.data(),
                        error.data(), losses.data()});
  math->download(losses.data(), each.data(), each.size());
  loss_ = std::accumulate(each.begin(), each.end(), loss_);
}

void Network::backward(Cache& cache, Math* math, size_t l) const {
  const auto table = static_cast<uint32_t>(l);
  ReadBuffer parameters(cache, table, tables_.rows(table));
  UpdateBuffer update(cache, table, tables_.rows(table));
  LocalBuffer in(cache, activations_[l], tables_.rows(activations_[l]), Fetch::kYes, Save::kNo);
  LocalBuffer out(cache, activations_[l + 1], tables_.rows(activations_[l + 1]), Fetch::kYes,
                  Save::kNo);
  LocalBuffer error(cache, errors_[l + 1], tables_.rows(errors_[l + 1]), Fetch::kYes, Save::kNo);
  std::optional<LocalBuffer> below, scratch;
  if (l > 0) below.emplace(cache, errors_[l], tables_.rows(errors_[l]), Fetch::kNo);
  if (scratch_[l] != kNone) {
    scratch.emplace(cache, scratch_[l], tables_.rows(scratch_[l]), Fetch::kNo, Save::kNo);
  }
  if (math != nullptr) {
    layers_[l]->backward(*math, {.samples = share_.samples,
                                 .parameters = parameters.data(),
                                 .in = in.data(),
                                 .out = out.data(),
                                 .error = error.data(),
                                 .gradient = update.data(),
                                 .below = below ? below->data() : nullptr,
                                 .scratch = scratch ? scratch->data() : nullptr});
    const size_t parameters_end = layers_[l]->parameters();
    math->run(1, tables_.part_floats(table) - parameters_end,
              Fill{0, update.data() + parameters_end});
  }
  update.update();
}

size_t Network::correct(const Parameters& parameters, const digits::Samples& samples) const {
  const auto math = make_host_math();
  std::vector<float> in(samples.images.data(), samples.images.data() + samples.images.size());
  for (size_t l = 0; l < layers_.size(); ++l) {
    std::vector<float> out(samples.size() * layers_[l]->outputs());
    std::vector<float> scratch(layers_[l]->scratch(samples.size()));
    layers_[l]->forward(*math, {.samples = samples.size(),
                                .parameters = parameters[l].data(),
                                .in = in.data(),
                                .out = out.data(),
                                .scratch = scratch.data()});
    in = std::move(out);
  }
  const size_t classes = layers_.back()->outputs();
  size_t correct = 0;
  for (size_t n = 0; n < samples.size(); ++n) {
    const auto* logits = in.data() + n * classes;
    correct += std::max_element(logits, logits + classes) - logits == samples.labels[n] ? 1 : 0;
  }
  return correct;
}

std::string Network::evaluate(const Parameters& parameters) const {
  const double right = static_cast<double>(correct(parameters, data_.test));
  return fmt::format("held-out accuracy {:.1f}%",
                     100 * right / static_cast<double>(data_.test.size()));
}

}  // namespace phub::examples

#include "worker/examples/geeps/stack.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
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

Stack::Stack(Tables& tables, Layers layers, StackOptions options)
    : tables_(tables), layers_(std::move(layers)), options_(std::move(options)) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    PHUB_CHECK(l == 0 || layers_[l]->inputs() == layers_[l - 1]->outputs());
    parameters_.push_back(tables_.add_parameters(fmt::format("{}layer{}", options_.name, l),
                                                 layers_[l]->parameters()));
  }
}

void Stack::add_local() {
  const auto add = [&](const std::string& name, size_t floats, size_t parts) {
    return tables_.add_local(options_.name + name, floats, parts);
  };
  const size_t samples = options_.samples;
  for (size_t l = 0; l < layers_.size(); ++l) {
    activations_.push_back(
        add(fmt::format("in{}", l), layers_[l]->inputs() * samples, options_.parts));
  }
  activations_.push_back(add("out", outputs() * samples, options_.parts));
  for (size_t l = 0; l < layers_.size(); ++l) {
    const bool needed = l > 0 || options_.input_error;
    errors_.push_back(needed ? add(fmt::format("error{}", l), layers_[l]->inputs() * samples, 1)
                             : kNone);
    const size_t scratch = layers_[l]->scratch(samples);
    scratch_.push_back(scratch == 0 ? kNone : add(fmt::format("scratch{}", l), scratch, 1));
  }
  errors_.push_back(add("out_error", outputs() * samples, 1));
}

void Stack::initialize(Random& random, std::vector<float>& all) const {
  for (size_t l = 0; l < layers_.size(); ++l) {
    const size_t at = all.size();
    all.resize(at + tables_.part_floats(parameters_[l]));
    layers_[l]->initialize(random, std::span(all).subspan(at, layers_[l]->parameters()));
  }
}

// A layer's output stays acquired until the next layer has used it, and so do outputs and errors on
// the way back: errors between layers are never in host memory.
void Stack::forward(Cache& cache, Math* math, size_t part) const {
  std::array<std::optional<LocalBuffer>, 2> held;
  const uint32_t bottom = activations_.front();
  held[0].emplace(cache, bottom, tables_.rows(bottom, part), Fetch::kYes, Save::kNo);
  for (size_t l = 0; l < layers_.size(); ++l) {
    auto& in = held[l % 2];
    auto& out = held[(l + 1) % 2];
    const uint32_t above = activations_[l + 1];
    out.emplace(cache, above, tables_.rows(above, part), Fetch::kNo);
    forward_layer(cache, math, l,
                  {.samples = options_.samples, .in = in->data(), .out = out->data()});
    in.reset();
  }
}

void Stack::forward_layer(Cache& cache, Math* math, size_t l, ForwardMemory memory) const {
  const uint32_t table = parameters_[l];
  const ReadBuffer parameters = tables_.read(cache, table);
  std::optional<LocalBuffer> scratch;
  if (scratch_[l] != kNone) {
    scratch.emplace(cache, scratch_[l], tables_.rows(scratch_[l]), Fetch::kNo, Save::kNo);
  }
  if (math == nullptr) return;
  memory.parameters = parameters.data();
  memory.scratch = scratch ? scratch->data() : nullptr;
  layers_[l]->forward(*math, memory);
}

void Stack::backward(Cache& cache, Math* math, bool last, size_t part) const {
  std::array<std::optional<LocalBuffer>, 2> outputs, errors;
  const size_t top = layers_.size();
  const uint32_t out_table = activations_[top], error_table = errors_[top];
  outputs[top % 2].emplace(cache, out_table, tables_.rows(out_table, part), Fetch::kYes, Save::kNo);
  errors[top % 2].emplace(cache, error_table, tables_.rows(error_table), Fetch::kYes, Save::kNo);
  for (size_t l = top; l-- > 0;) {
    auto& in = outputs[l % 2];
    auto& out = outputs[(l + 1) % 2];
    auto& below = errors[l % 2];
    auto& error = errors[(l + 1) % 2];
    in.emplace(cache, activations_[l], tables_.rows(activations_[l], part), Fetch::kYes, Save::kNo);
    if (errors_[l] != kNone) {
      below.emplace(cache, errors_[l], tables_.rows(errors_[l]), Fetch::kNo,
                    l > 0 ? Save::kNo : Save::kYes);
    }
    backward_layer(cache, math, l,
                   {.samples = options_.samples,
                    .in = in->data(),
                    .out = out->data(),
                    .error = error->data(),
                    .below = below ? below->data() : nullptr});
    out.reset();
    error.reset();
    if (last) cache.table_clock(parameters_[l]);
  }
}

void Stack::backward_layer(Cache& cache, Math* math, size_t l, BackwardMemory memory) const {
  const uint32_t table = parameters_[l];
  const ReadBuffer parameters = tables_.read(cache, table);
  UpdateBuffer update(cache, table, tables_.rows(table));
  std::optional<LocalBuffer> scratch;
  if (scratch_[l] != kNone) {
    scratch.emplace(cache, scratch_[l], tables_.rows(scratch_[l]), Fetch::kNo, Save::kNo);
  }
  if (math != nullptr) {
    memory.parameters = parameters.data();
    memory.gradient = update.data();
    memory.scratch = scratch ? scratch->data() : nullptr;
    layers_[l]->backward(*math, memory);
    tables_.clear_padding(*math, table, update.data());
  }
  update.update();
}

std::vector<float> Stack::compute(const Parameters& parameters, std::vector<float> in,
                                  size_t samples) const {
  const auto math = make_host_math();
  for (size_t l = 0; l < layers_.size(); ++l) {
    std::vector<float> out(samples * layers_[l]->outputs());
    std::vector<float> scratch(layers_[l]->scratch(samples));
    layers_[l]->forward(*math, {.samples = samples,
                                .parameters = parameters[parameters_[l]].data(),
                                .in = in.data(),
                                .out = out.data(),
                                .scratch = scratch.data()});
    in = std::move(out);
  }
  return in;
}

Loss::Loss(Tables& tables, const Stack& stack, size_t samples)
    : tables_(tables),
      stack_(stack),
      samples_(samples),
      labels_(tables.add_local("labels", samples)),
      losses_(tables.add_local("losses", samples)) {}

void Loss::set_labels(Cache& cache, Math* math, const std::vector<float>& labels) const {
  LocalBuffer there(cache, labels_, tables_.rows(labels_), Fetch::kNo);
  if (math != nullptr) math->upload(labels.data(), there.data(), labels.size());
}

double Loss::run(Cache& cache, Math* math, float scale) const {
  const uint32_t top = stack_.output(), top_error = stack_.output_error();
  LocalBuffer logits(cache, top, tables_.rows(top), Fetch::kYes, Save::kNo);
  LocalBuffer labels(cache, labels_, tables_.rows(labels_), Fetch::kYes, Save::kNo);
  LocalBuffer error(cache, top_error, tables_.rows(top_error), Fetch::kNo);
  LocalBuffer losses(cache, losses_, tables_.rows(losses_), Fetch::kNo, Save::kNo);
  if (math == nullptr) return 0;
  std::vector<float> each(samples_);
  math->run(1, each.size(), Fill{0, losses.data()});
  math->run(each.size(), 1,
            SoftmaxLoss{stack_.outputs(), scale, logits.data(), labels.data(), error.data(),
                        losses.data()});
  math->download(losses.data(), each.data(), each.size());
  return std::accumulate(each.begin(), each.end(), 0.0);
}

size_t count_correct(std::span<const float> logits, std::span<const int> labels) {
  const size_t classes = logits.size() / labels.size();
  size_t correct = 0;
  for (size_t n = 0; n < labels.size(); ++n) {
    const float* const row = logits.data() + n * classes;
    correct += std::max_element(row, row + classes) - row == labels[n] ? 1 : 0;
  }
  return correct;
}

std::string held_out_accuracy(size_t correct, size_t samples) {
  return fmt::format("held-out accuracy {:.1f}%",
                     100 * static_cast<double>(correct) / static_cast<double>(samples));
}

}  // namespace phub::examples

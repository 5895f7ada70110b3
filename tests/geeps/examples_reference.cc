#include "tests/geeps/examples_reference.h"

#include <cmath>

#include "worker/examples/geeps/lstm.h"

namespace phub::examples {
namespace {

constexpr uint64_t kSeed = 1;  // the applications' default
using Arrays = std::vector<std::vector<float>>;

void add(const std::vector<float>& from, std::vector<float>& to) {
  for (size_t i = 0; i < from.size(); ++i) to[i] += from[i];
}
void descend(float lr, const std::vector<float>& gradient, std::vector<float>& parameters) {
  for (size_t i = 0; i < gradient.size(); ++i) parameters[i] -= lr * gradient[i];
}
void append_rows(const std::vector<float>& from, std::vector<float>& to) {
  to.insert(to.end(), from.begin(), from.end());
  to.resize((to.size() + 127) / 128 * 128);
}

// Of one rank, in one mini-batch, by layer.
Arrays gradients(const Layers& layers, const Arrays& parameters, const digits::Samples& batch,
                 float scale) {
  const auto math = make_host_math();
  const size_t samples = batch.size();
  Arrays activations = {{batch.images.data(), batch.images.data() + batch.images.size()}};
  for (size_t l = 0; l < layers.size(); ++l) {
    std::vector<float> scratch(layers[l]->scratch(samples));
    activations.emplace_back(samples * layers[l]->outputs());
    layers[l]->forward(*math, {samples, parameters[l].data(), activations[l].data(),
                               activations[l + 1].data(), scratch.data()});
  }
  const std::vector<float> labels(batch.labels.begin(), batch.labels.end());
  std::vector<float> losses(samples), error(activations.back().size());
  math->run(samples, 1,
            SoftmaxLoss{layers.back()->outputs(), scale, activations.back().data(), labels.data(),
                        error.data(), losses.data()});
  Arrays gradients(layers.size());
  for (size_t l = layers.size(); l-- > 0;) {
    std::vector<float> scratch(layers[l]->scratch(samples)), below(activations[l].size());
    gradients[l].resize(layers[l]->parameters());
    layers[l]->backward(
        *math, {samples, parameters[l].data(), activations[l].data(), activations[l + 1].data(),
                error.data(), gradients[l].data(), below.data(), scratch.data()});
    error = below;
  }
  return gradients;
}

}  // namespace

std::vector<float> reference_network(const Layers& layers, const digits::Samples& train,
                                     const Run& run) {
  Arrays parameters;
  Random random(kSeed);
  for (const auto& layer : layers) {
    parameters.emplace_back(layer->parameters());
    layer->initialize(random, parameters.back());
  }
  const float scale = 1.0f / static_cast<float>(run.samples * run.world);
  for (uint64_t clock = 0; clock < run.clocks; ++clock) {
    Arrays sums;
    for (uint32_t rank = 0; rank < run.world; ++rank) {
      const Arrays of_rank =
          gradients(layers, parameters,
                    digits::batch(train, kSeed, rank, run.world, clock + 1, run.samples), scale);
      if (rank == 0) sums = of_rank;
      for (size_t l = 0; rank > 0 && l < layers.size(); ++l) add(of_rank[l], sums[l]);
    }
    for (size_t l = 0; l < layers.size(); ++l) descend(run.lr, sums[l], parameters[l]);
  }
  std::vector<float> all;
  for (const auto& of_layer : parameters) append_rows(of_layer, all);
  return all;
}

std::vector<float> reference_lstm(const Text& text, size_t hidden, size_t steps, const Run& run) {
  const LstmSizes sizes{.symbols = text.symbols(), .hidden = hidden};
  const size_t streams = run.samples, units = streams * hidden;
  const Share share{.samples = run.samples, .seed = kSeed};
  const std::vector<float> initial = Lstm(text, hidden, steps, share).initial();
  const auto second =
      initial.end() - static_cast<std::ptrdiff_t>((sizes.output() + 127) / 128 * 128);
  std::vector<float> recurrent(initial.begin(),
                               initial.begin() + static_cast<std::ptrdiff_t>(sizes.recurrent()));
  std::vector<float> output(second, second + static_cast<std::ptrdiff_t>(sizes.output()));
  const auto math = make_host_math();
  Arrays cells(steps + 1, std::vector<float>(units)), outputs = cells;
  for (uint64_t clock = 0; clock < run.clocks; ++clock) {
    const Window now = window(text.train(), streams, 0, streams, steps, clock);
    if (now.at_start) cells[0] = outputs[0] = std::vector<float>(units);
    Arrays gates(steps, std::vector<float>(4 * units)),
        errors(steps, std::vector<float>(streams * sizes.symbols));
    const auto step = [&](size_t t) {
      return LstmStep{.sizes = sizes,
                      .streams = streams,
                      .recurrent = recurrent.data(),
                      .output = output.data(),
                      .inputs = &now.inputs[t * streams],
                      .labels = &now.labels[t * streams],
                      .cell_before = cells[t].data(),
                      .output_before = outputs[t].data(),
                      .cell = cells[t + 1].data(),
                      .hidden_output = outputs[t + 1].data(),
                      .gates = gates[t].data(),
                      .error = errors[t].data()};
    };
    std::vector<float> losses(streams), cell_error(units), hidden_error(units),
        recurrent_sum(recurrent.size()), output_sum(output.size());
    const float scale = 1.0f / static_cast<float>(streams) / static_cast<float>(steps);
    for (size_t t = 0; t < steps; ++t) lstm_forward(*math, step(t), scale, losses.data());
    for (size_t t = steps; t-- > 0;) {
      std::vector<float> of_recurrent(recurrent.size()), of_output(output.size());
      lstm_backward(*math, step(t), hidden_error.data(), cell_error.data(), of_recurrent.data(),
                    of_output.data());
      add(of_recurrent, recurrent_sum);
      add(of_output, output_sum);
    }
    descend(run.lr, recurrent_sum, recurrent);
    descend(run.lr, output_sum, output);
    cells[0] = cells[steps];
    outputs[0] = outputs[steps];
  }
  std::vector<float> all;
  append_rows(recurrent, all);
  append_rows(output, all);
  return all;
}

}  // namespace phub::examples

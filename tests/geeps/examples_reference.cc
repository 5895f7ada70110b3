#include "tests/geeps/examples_reference.h"

#include <cmath>
#include <numeric>

#include "worker/examples/geeps/lstm.h"
#include "worker/examples/geeps/video.h"

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

ReferenceVideo::ReferenceVideo(size_t filters, size_t hidden)
    : hidden_(hidden),
      frames_(video_frame_layers(filters, hidden)),
      classes_(video_class_layers(hidden)) {
  Random random(kSeed);
  const auto add_layers = [&](const Layers& layers) {
    for (const auto& layer : layers) {
      parameters.emplace_back(layer->parameters());
      layer->initialize(random, parameters.back());
    }
  };
  add_layers(frames_);
  parameters.emplace_back(LstmCell::parameters(hidden));
  initialize_lstm_cell(random, hidden, parameters.back());
  add_layers(classes_);
}

ReferenceVideo::Passed ReferenceVideo::forward(const Clips& clips) const {
  const auto math = make_host_math();
  const size_t samples = clips.size(), units = samples * hidden_, layers = frames_.size();
  Passed p;
  p.cells.assign(clips.frames + 1, std::vector<float>(units));
  p.outputs = p.cells;
  for (size_t f = 0; f < clips.frames; ++f) {
    Arrays& passed = p.activations.emplace_back();
    passed.emplace_back(clips.frame(f).begin(), clips.frame(f).end());
    for (size_t l = 0; l < layers; ++l) {
      std::vector<float> scratch(frames_[l]->scratch(samples));
      passed.emplace_back(samples * frames_[l]->outputs());
      frames_[l]->forward(*math, {samples, parameters[l].data(), passed[l].data(),
                                  passed[l + 1].data(), scratch.data()});
    }
    p.gates.push_back(passed.back());
    lstm_cell_forward(
        *math, {samples, hidden_, parameters[layers].data(), p.cells[f].data(), p.outputs[f].data(),
                p.cells[f + 1].data(), p.outputs[f + 1].data(), p.gates[f].data()});
  }
  p.logits.resize(samples * Videos::kClasses);
  classes_[0]->forward(*math, {samples, parameters[layers + 1].data(), p.outputs.back().data(),
                               p.logits.data(), nullptr});
  return p;
}

double ReferenceVideo::losses(const Passed& passed, const Clips& clips, float scale,
                              std::vector<float>& error) const {
  const std::vector<float> labels(clips.labels.begin(), clips.labels.end());
  std::vector<float> losses(clips.size());
  error.resize(passed.logits.size());
  make_host_math()->run(clips.size(), 1,
                        SoftmaxLoss{Videos::kClasses, scale, passed.logits.data(), labels.data(),
                                    error.data(), losses.data()});
  return std::accumulate(losses.begin(), losses.end(), 0.0);
}

double ReferenceVideo::loss(const Clips& clips) const {
  std::vector<float> error;
  return losses(forward(clips), clips, 1, error);
}

ReferenceVideo::Arrays ReferenceVideo::gradients(const Clips& clips, float scale) const {
  const auto math = make_host_math();
  const size_t samples = clips.size(), units = samples * hidden_, layers = frames_.size();
  Passed p = forward(clips);
  Arrays sums;
  for (const auto& of_layer : parameters) sums.emplace_back(of_layer.size());
  std::vector<float> error, cell_error(units), hidden_error(units);
  losses(p, clips, scale, error);
  classes_[0]->backward(
      *math, {samples, parameters[layers + 1].data(), p.outputs.back().data(), p.logits.data(),
              error.data(), sums[layers + 1].data(), hidden_error.data(), nullptr});
  for (size_t f = clips.frames; f-- > 0;) {
    std::vector<float> of_cell(parameters[layers].size());
    lstm_cell_backward(
        *math,
        {samples, hidden_, parameters[layers].data(), p.cells[f].data(), p.outputs[f].data(),
         p.cells[f + 1].data(), p.outputs[f + 1].data(), p.gates[f].data()},
        hidden_error.data(), cell_error.data(), of_cell.data());
    add(of_cell, sums[layers]);
    error = p.gates[f];
    for (size_t l = layers; l-- > 0;) {
      const std::vector<float>& in = p.activations[f][l];
      std::vector<float> scratch(frames_[l]->scratch(samples)), below(in.size()),
          gradient(parameters[l].size());
      frames_[l]->backward(
          *math, {samples, parameters[l].data(), in.data(), p.activations[f][l + 1].data(),
                  error.data(), gradient.data(), below.data(), scratch.data()});
      add(gradient, sums[l]);
      error = below;
    }
  }
  return sums;
}

void ReferenceVideo::train(const Videos& videos, const Run& run) {
  const float scale = 1.0f / static_cast<float>(run.samples * run.world);
  for (uint64_t clock = 0; clock < run.clocks; ++clock) {
    Arrays sums;
    for (uint32_t rank = 0; rank < run.world; ++rank) {
      const Arrays of_rank =
          gradients(videos.batch(kSeed, rank, run.world, clock, run.samples), scale);
      if (rank == 0) sums = of_rank;
      for (size_t i = 0; rank > 0 && i < sums.size(); ++i) add(of_rank[i], sums[i]);
    }
    for (size_t i = 0; i < sums.size(); ++i) descend(run.lr, sums[i], parameters[i]);
  }
}

std::vector<float> ReferenceVideo::padded() const {
  std::vector<float> all;
  for (const auto& of_layer : parameters) append_rows(of_layer, all);
  return all;
}

}  // namespace phub::examples

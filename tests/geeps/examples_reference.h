// The training of the GeePS applications, recomputed over plain arrays of this process: the same
// layers, no cache, no exchange.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/examples/geeps/layers.h"
#include "worker/examples/geeps/text.h"
#include "worker/examples/geeps/video_data.h"

namespace phub::examples {

struct Run {
  uint32_t samples, world = 1;
  uint64_t clocks;
  float lr;
};

// The parameters at the end, by layer, each padded with zeros to rows of 128. The gradients of all
// ranks are added in their order.
std::vector<float> reference_network(const Layers& layers, const digits::Samples& train,
                                     const Run& run);
// One rank. Of the recurrent layer, then of the output.
std::vector<float> reference_lstm(const Text& text, size_t hidden, size_t steps, const Run& run);

// The network for videos over plain arrays.
class ReferenceVideo {
 public:
  ReferenceVideo(size_t filters, size_t hidden);

  // Of the frames' layers, of the LSTM's cell, of the classes' layer, without padding.
  using Arrays = std::vector<std::vector<float>>;
  Arrays parameters;
  // The sum of the losses, and the gradients of it times `scale`.
  double loss(const Clips& clips) const;
  Arrays gradients(const Clips& clips, float scale) const;
  void train(const Videos& videos, const Run& run);
  std::vector<float> padded() const;  // all parameters, as the applications have them

 private:
  // Of the frames in turn, by layer (the first is the input); cells and outputs, from the one
  // before the first frame on; the logits.
  struct Passed {
    std::vector<Arrays> activations;
    Arrays gates, cells, outputs;
    std::vector<float> logits;
  };
  Passed forward(const Clips& clips) const;
  double losses(const Passed& passed, const Clips& clips, float scale,
                std::vector<float>& error) const;

  size_t hidden_;
  Layers frames_;
  Layers classes_;
};

}  // namespace phub::examples

// The training of the GeePS applications, recomputed over plain arrays of this process: the same
// layers, no cache, no exchange.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/examples/geeps/layers.h"
#include "worker/examples/geeps/text.h"

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

}  // namespace phub::examples

// The part of an exchange that computing hides. In wait-free backpropagation (Zhang et al.,
// Poseidon, 2015, section 4.2 and Algorithm 2) a layer's gradient is sent when its backward is
// done, while the layers below it compute, and its result is waited for before its next forward.
//
// The layers' exchanges follow each other in the order in which their gradients are ready. Links
// work both ways at once, and results travel while the same layer's gradients still do; the box's
// products wait for their factors, and results for these; a rank's products are made beside its
// computing, one matrix after another. Pure functions of their inputs.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/control/matrix_exchange.h"

namespace phub {

// The computing of a layer; layers are in the order of forward.
struct LayerComputing {
  std::string name;
  std::vector<uint32_t> keys;  // indices of keys in the job
  double forward_s = 0, backward_s = 0;
};

double computing_seconds(std::span<const LayerComputing> layers);

// The time from the beginning of a backward to that of the next. `costs` are those of each layer's
// keys. Without `overlaps` all layers are pushed when the last backward is done, and all are waited
// for.
double iteration_seconds(std::span<const LayerComputing> layers,
                         std::span<const ExchangeCost> costs, const ExchangeInputs& inputs,
                         bool overlaps);

}  // namespace phub

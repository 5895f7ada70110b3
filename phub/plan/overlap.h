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
#include <string_view>
#include <vector>

#include "phub/plan/matrix_exchange.h"
#include "transport/control/job_spec.h"

namespace phub {

// The computing of a layer; layers are in the order of forward.
struct LayerComputing {
  std::string name;
  std::vector<uint32_t> keys;  // indices of keys in the job
  double forward_s = 0, backward_s = 0;
};

// From "960", the milliseconds of an iteration of a model whose layers are known (layers.h), which
// are shared out by their multiplications, a third forward; or of a file of layers:
//
//   {"layers": [{"name": "conv1", "forward_ms": 3, "backward_ms": 6.5}, …]}
//
// A key belongs to the layer whose name it has, or whose name it begins with before a '.'; among
// several such layers the longest name counts. Throws Error(kInvalid), which names the argument or
// the file: it is neither; the model's layers are not known; a time is not a number of at least 0,
// or all are 0; a layer is there twice; a key is of no layer.
std::vector<LayerComputing> computing_of(const JobSpec& spec, const std::string& argument);
std::vector<LayerComputing> parse_computing(const JobSpec& spec, std::string_view json,
                                            std::string_view source);

double computing_seconds(std::span<const LayerComputing> layers);

// The time from the beginning of a backward to that of the next. `costs` are those of each layer's
// keys. Without `overlaps` all layers are pushed when the last backward is done, and all are waited
// for.
double iteration_seconds(std::span<const LayerComputing> layers,
                         std::span<const ExchangeCost> costs, const ExchangeInputs& inputs,
                         bool overlaps);

}  // namespace phub

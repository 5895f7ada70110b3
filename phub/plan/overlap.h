// How long the layers of a model compute: what hides their exchange (layer_computing.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/control/job_spec.h"
#include "transport/control/layer_computing.h"

namespace phub {

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

}  // namespace phub

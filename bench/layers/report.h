// What a rank of `layers` and of its peers prints for the scripts beside them.
#pragma once

#include <nlohmann/json.hpp>

#include "bench/layers/walk.h"

namespace phub::layers {

inline nlohmann::json json_of(const WalkResult& result) {
  return {{"iteration_s", result.iteration_s},
          {"pushed_early", result.pushed_early},
          {"back_early", result.back_early},
          {"layers", result.layers},
          {"wrong", result.wrong}};
}

}  // namespace phub::layers

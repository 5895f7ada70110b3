// One round of a scene: every worker sends its gradient chunk by chunk, the core of a chunk sums it
// when the last rank's is in, and sends the result to all ranks; below a parent the sum goes up
// first, and its answer down.
#pragma once

#include <cstdint>
#include <string>

#include "bench/rack_model/scene.h"

namespace phub::rack_model {

struct Outcome {
  double seconds = 0;   // from the start to the last result at the last worker
  uint64_t flows = 0;   // flows that were simulated
  std::string busiest;  // the link that was used most of the time
  double busy = 0;      // the fraction of the time for which it was used
};

// Simulates in a process of its own, as SimGrid has one simulation in a process. Throws
// Error(kInternal) if that fails.
Outcome simulate(const Scene& scene);

}  // namespace phub::rack_model

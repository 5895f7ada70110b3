// The processes of a job agree here on things that the job itself does not compare.
#pragma once

#include <span>
#include <string>

#include "worker/worker.h"

namespace phub::examples {

// Waits for all ranks, each of which says the same: "seed 5". Throws Error: kMismatch if this one
// says something else than those that were here before, with both; otherwise as a worker does.
void agree(const WorkerOptions& worker, std::span<const std::string> settings);

// A process that is alone is rank 0, if nothing names its rank; but not if its environment has half
// of a launcher's variables: there may be others.
void take_rank_if_alone(WorkerOptions& worker);

}  // namespace phub::examples

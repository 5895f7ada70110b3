// One worker process of a measurement on one machine.
#pragma once

#include "bench/zerocompute_rank.h"
#include "bench/zerocompute_shared.h"

namespace phub {

// Runs in the child: joins as `rank` and follows the coordinator's orders. Returns the exit status;
// what went wrong is in the rank's slot.
int run_worker(const CaseSpec& spec, SharedCase& shared, uint32_t rank);

}  // namespace phub

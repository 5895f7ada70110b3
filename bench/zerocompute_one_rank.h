// One rank in this process, the others wherever a launcher started them: no memory is shared, the
// ranks meet at the job's barrier before each round.
#pragma once

#include "bench/zerocompute_run.h"

namespace phub {

// Joins as spec.worker.rank and runs the schedule's rounds, which must be the same number on all
// ranks. The times are of this rank's own rounds; it checks every element that it gets, against a
// reference of its own. Throws Error.
CaseResult run_one_rank(const CaseSpec& spec, const Schedule& schedule, Progress& progress);

}  // namespace phub

// The fragments of a job with a quorum (KeySpec::fragment), as its cores have chunks of them.
#pragma once

#include <cstdint>
#include <memory>

#include "phub/core/quorum.h"
#include "phub/plan/plan.h"
#include "transport/control/job_spec.h"

namespace phub {

// REQUIRES: the job has a quorum, and max_ranks. `first_round`: the first to be decided.
std::unique_ptr<QuorumGates> make_quorum_gates(const JobSpec& spec, const Plan& plan,
                                               uint64_t first_round);

// The way of the chunks that this core of the plan has.
std::unique_ptr<Way> make_quorum(const Stages& stages, QuorumGates& gates, const JobSpec& spec,
                                 const Plan& plan, uint32_t core);

}  // namespace phub

// The fragments of a job with a quorum (KeySpec::fragment), as its cores have chunks of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "phub/core/chunk_table.h"
#include "phub/core/quorum_gate.h"
#include "phub/plan/plan.h"
#include "transport/control/job_spec.h"

namespace phub {

// REQUIRES: the job has a quorum, and max_ranks. `first_round`: the first to be decided;
// `together`: see QuorumGates.
std::unique_ptr<QuorumGates> make_quorum_gates(const JobSpec& spec, const Plan& plan,
                                               uint64_t first_round, bool together);

// The fragment of each of a core's chunks.
std::vector<uint32_t> fragments_of(const ChunkTable& table, const JobSpec& spec, const Plan& plan);

}  // namespace phub

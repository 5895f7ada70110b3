// The log of a job that goes on from a checkpoint. No threads.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/checkpoint/manifest.h"
#include "phub/job/decisions.h"
#include "phub/job/membership_log.h"

namespace phub {

// Writes the checkpoint's log into the job's, without what is void, and notes its decisions.
void restore_log(const Manifest& saved, const SavedClocks& clocks, uint32_t chunks,
                 MembershipLog& log, Decisions& decisions);

// By rank, the last round that any chunk has; empty in lock-step.
std::vector<uint64_t> latest_of_all(const SavedClocks& clocks, uint32_t chunks);

}  // namespace phub

// The processes of a store talk to each other, outside of their rows, by jobs of one round: every
// rank sends values, and all get the sums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "worker/iterstore/row_plan.h"
#include "worker/worker.h"

namespace phub::iterstore {

// The options of a job of the store: those of the store with this name and these keys. The box does
// not save it.
// check_is_new() throws Error(kTaken) if a job of this name has gone on from an earlier run.
WorkerOptions options_of_job(const WorkerOptions& store, const std::string& name,
                             std::vector<KeySpec> keys);
void check_is_new(const Worker& worker);

// Gathers what all ranks recorded, in a job of this name.
struct AllRecorded {
  AllUse use;
  uint32_t clocks = 0;          // the largest number of clocks of a thread
  std::vector<uint64_t> hosts;  // the machine of each rank
};
AllRecorded use_of_all(const WorkerOptions& store, const std::string& name,
                       std::span<const Table> tables, const Use& mine, uint64_t host);

// Each rank has the same number of arrays of the same sizes. REQUIRES: no two ranks have a byte
// other than zero in the same place. Afterwards each rank's arrays have the bytes of all ranks.
void unite(const WorkerOptions& store, const std::string& name,
           std::span<const std::span<std::byte>> arrays);

}  // namespace phub::iterstore

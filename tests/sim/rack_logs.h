// The log of a job over racks, as one box with the same ranks would have it: each rack's box has
// that of its own ranks, and the box above says which of their rounds counted.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tests/oracle/participation.h"
#include "transport/control/job_spec.h"
#include "transport/control/messages.h"

namespace phub::sim {

// The box's, or the job's where it went on without a box, and the job's epoch in it; both grow.
using JobLife = std::pair<uint64_t, uint64_t>;

// Of one life of the job at one box.
struct BoxLog {
  uint32_t level = 0;  // 0: its ranks are those of the job; 1: they are boxes of level 0; …
  JobLife life;        // of the root's job, in which it was
  std::vector<LogRecord> records;
};

// As the log of the highest box names a rank of the job.
Member at_root(JobSpec spec, uint32_t levels, Member who);

// `levels`: of boxes below the root. `below`: those of a box in their order. Throws Error(kInvalid)
// where the logs contradict each other.
// Where the root went on from a checkpoint, what was behind that is void. `root` is of `life`.
std::vector<LogRecord> join_logs(const JobSpec& spec, uint32_t levels,
                                 const std::vector<LogRecord>& root, uint64_t life,
                                 const std::vector<BoxLog>& below);

}  // namespace phub::sim

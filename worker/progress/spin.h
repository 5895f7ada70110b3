// Decides how long a wait spins before it sleeps.
#pragma once

#include <cstdint>
#include <string_view>

namespace phub {

struct SpinFacts {
  int32_t asked_us = -1;       // the application's option; -1: decided here
  uint32_t cpus = 1;           // on which this process may run
  std::string_view transport;  // the job's
  uint32_t world_size = 1;
  uint32_t local_world_size = 0;  // ranks of the job on this host; 0: unknown
};

// 50 µs if there are more CPUs than ranks on this host (over shared memory plus one for the
// server); otherwise 0, since a spinning thread would keep another from working.
int spin_us_of(const SpinFacts& facts);

// The number of CPUs on which the calling thread may run.
uint32_t usable_cpus();

}  // namespace phub

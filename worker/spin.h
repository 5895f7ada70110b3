// How long a wait spins before it sleeps.
#pragma once

#include <cstdint>
#include <string_view>

namespace phub {

struct SpinFacts {
  int32_t asked_us = -1;       // by the application; -1: as decided here
  uint32_t cpus = 1;           // that this process may run on
  std::string_view transport;  // of the job
  uint32_t world_size = 1;
  uint32_t local_world_size = 0;  // ranks of the job on this host; 0: nobody said
};

// 50 us where a CPU is left over when each rank on this host, and over shared memory the server,
// has one; otherwise 0, since whoever spins keeps another from working.
int spin_us_of(const SpinFacts& facts);

// CPUs that the calling thread may run on.
uint32_t usable_cpus();

}  // namespace phub

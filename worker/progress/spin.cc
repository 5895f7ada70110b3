#include "worker/progress/spin.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

namespace phub {

int spin_us_of(const SpinFacts& facts) {
  constexpr int kSpinUs = 50;
  if (facts.asked_us >= 0) return facts.asked_us;
  // Over shared memory all ranks and the server are on this host.
  const uint32_t busy =
      facts.transport == "shm" ? facts.world_size + 1 : std::max(facts.local_world_size, 1u);
  return facts.cpus > busy ? kSpinUs : 0;
}

uint32_t usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // It fails if the kernel has more CPUs than the set: then there are enough.
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    return static_cast<uint32_t>(std::max(1l, sysconf(_SC_NPROCESSORS_ONLN)));
  }
  return static_cast<uint32_t>(std::max(1, CPU_COUNT(&set)));
}

}  // namespace phub

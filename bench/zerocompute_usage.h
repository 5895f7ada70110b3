// What processes and wake-ups cost on this machine, from the kernel's own accounts.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace phub {

struct ThreadTimes {
  int64_t run_ns = 0;
  int64_t waited_ns = 0;  // for a processor
};

// Of the threads of the server `pid` on this machine, so far: one entry per core, in their order.
// Empty if there is no such process, or another user's.
std::vector<ThreadTimes> core_times(pid_t pid);

// For how long all threads of this process have run.
int64_t own_run_ns();

// The median time from waking a thread that sleeps (epoll on an eventfd, as both sides of an
// exchange do) until it runs. Takes some milliseconds; no thread is left behind.
double measure_wakeup_us();

}  // namespace phub

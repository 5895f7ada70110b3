// Order statistics of measured times, the processor time of threads, and the time of a wake-up.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <vector>

namespace phub {

// The value below which the fraction `q` (0 … 1) of the values lies, interpolated linearly between
// neighbours; NaN without values.
double quantile(std::span<const double> values, double q);
double median(std::span<const double> values);

// The mean of all but the largest tenth, so that rare outliers do not count. NaN without values.
double usual_mean(std::span<const double> values);

struct Summary {
  double min = 0, p50 = 0, p99 = 0, max = 0, total = 0;
};
Summary summarize(std::span<const double> values);

struct ThreadTimes {
  int64_t run_ns = 0;
  int64_t waited_ns = 0;  // ready, without a processor
};

// The times so far of the core threads of the server `pid` on this machine, one entry per core, in
// order. Empty if there is no such process, or it is another user's.
std::vector<ThreadTimes> core_times(pid_t pid);

// The processor time of this process.
int64_t own_run_ns();

// The load of all processors of this machine, from any process: the kernel's own work, too, which
// belongs to no process. The kernel counts in steps of 10 ms.
class MachineUse {
 public:
  void start() { started_ = now(); }
  void stop();
  // From 0 to 1, over all times between start() and stop(). NaN if they took no time.
  double busy() const;

 private:
  struct Ticks {
    uint64_t all = 0, idle = 0;
  };
  static Ticks now();

  Ticks started_, used_;
};

// The median time from waking a thread that sleeps (epoll on an eventfd, as both sides of an
// exchange do) until it runs. Takes some milliseconds; no thread is left behind.
double measure_wakeup_us();

}  // namespace phub

// Runs cases: one or more jobs at the same time with forked worker processes on this machine, or
// one rank of a job whose other ranks a launcher starts.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/zerocompute/measures.h"
#include "bench/zerocompute/rank.h"
#include "bench/zerocompute/shared.h"
#include "bench/zerocompute/verdict.h"

namespace phub {

struct Schedule {
  uint64_t warmup = 3;
  uint64_t rounds = 0;  // 0: by seconds
  double seconds = 5;
  uint32_t limit_threads = 0;  // 0: do not measure the limit
  pid_t server_pid = 0;        // 0: on another machine
  double wakeup_us = 0;        // the time of one; 0: not measured
  double link_gbps = 0;        // a worker's; 0: not known
};

struct CaseResult : CaseSizes {
  uint64_t rounds = 0;
  Summary us;
  double exchanges_per_s = 0;
  uint64_t wrong = 0, checked = 0;  // elements, warm-up included
  std::string wrong_text;           // the first wrong element
  WorkerStats stats;                // those of all workers, all rounds
  double limit_us = 0;              // 0: not measured
  double limit_gigabytes_per_s = 0;
  uint32_t limit_threads = 0;
  uint64_t memory_bytes_moved = 0;  // per exchange, as the limit counts them
  Measured measured;                // for the verdict; with several jobs only the round
};

// A progress line on stderr: rewritten on a terminal, otherwise repeated now and then.
class Progress {
 public:
  explicit Progress(bool enabled);
  ~Progress() { clear(); }

  // Begins a piece of work, which is shown when it has taken a second.
  void begin(std::string_view what);
  // Sets its progress. Cheap; shown at most five times a second on a terminal, else every five
  // seconds.
  void update(std::string_view how_far);
  // Removes the line, before something else is printed.
  void clear();

 private:
  bool enabled_, terminal_;
  bool shown_ = false;
  std::string what_;
  double begun_s_ = 0, last_s_ = 0;
};

// The case in numbers. `keys` are those of the job. For rows these are the most that they can be.
CaseSizes sizes_of(const CaseSpec& spec, std::span<const KeySpec> keys);

// The time of a round on a worker's link at this rate: both directions at once.
double network_us(const CaseSizes& sizes, double link_gbps);

// Runs the jobs at the same time, each at its own pace, and returns a result for each. The limit is
// measured only for a single job. Throws Error if a worker fails or dies, with its rank and
// message, and kTimeout when `interrupted` becomes true; no worker is left running then. REQUIRES:
// the calling process has one thread.
std::vector<CaseResult> run_jobs(std::span<const CaseSpec> jobs, const Schedule& schedule,
                                 Progress& progress, const volatile std::sig_atomic_t& interrupted);

// Runs in the child: joins as `rank` and follows the coordinator's orders. Returns the exit status;
// the rank's slot has the error.
int run_worker(const CaseSpec& spec, SharedCase& shared, uint32_t rank);

// Joins as spec.worker.rank and runs the schedule's rounds, which must be the same number on all
// ranks. The times are of this rank's own rounds; it checks every element that it gets, against a
// reference of its own. Throws Error.
CaseResult run_one_rank(const CaseSpec& spec, const Schedule& schedule, Progress& progress);

}  // namespace phub

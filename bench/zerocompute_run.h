// Runs one case, or several jobs of it beside each other: forks the worker processes, gives them
// their orders, and measures the memory's limit while they are parked.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <span>
#include <string>
#include <vector>

#include "bench/zerocompute_progress.h"
#include "bench/zerocompute_statistics.h"
#include "bench/zerocompute_verdict.h"
#include "bench/zerocompute_worker.h"

namespace phub {

struct Schedule {
  uint64_t warmup = 3;
  uint64_t rounds = 0;  // 0: by seconds
  double seconds = 5;
  uint32_t limit_threads = 0;  // 0: do not measure the limit
  pid_t server_pid = 0;        // on this machine; 0: it is elsewhere
  double wakeup_us = 0;        // of one; 0: not measured
  double link_gbps = 0;        // of a worker; 0: not known
};

struct CaseResult {
  uint64_t elements = 0, bytes = 0, keys = 0, chunks = 0;  // bytes: of one worker's gradient
  uint64_t rounds = 0;
  Summary us;
  double exchanges_per_s = 0;
  uint64_t wrong = 0, checked = 0;  // elements, warm-up included
  std::string wrong_text;           // where the first wrong one was
  WorkerStats stats;                // of all workers, all rounds
  double limit_us = 0;              // 0: not measured
  double limit_gigabytes_per_s = 0;
  uint32_t limit_threads = 0;
  uint64_t memory_bytes_moved = 0;  // per exchange, what the limit is about
  Measured measured;                // for the verdict; with several jobs only the round
};

// One result per job; the jobs run their rounds at the same time, each at its own pace. The limit
// is measured only for a single job. REQUIRES: the calling process has one thread. Throws Error
// when a worker fails or dies, with its rank and its words; no worker is left behind then. kTimeout
// when `interrupted` becomes true.
std::vector<CaseResult> run_jobs(std::span<const CaseSpec> jobs, const Schedule& schedule,
                                 Progress& progress, const volatile std::sig_atomic_t& interrupted);

}  // namespace phub

// A training of several processes through a server, each with its own device and cache.
#pragma once

#include <cstdint>
#include <string>

#include "bench/geeps_net.h"

namespace phub::geeps_bench {

struct Workers {
  std::string server;
  std::string transport;
  std::string job;
  uint32_t workers = 4;
  uint32_t warmup = 2, iterations = 10;
  bool cached = true;  // false: parameters in host memory (HostParameters)
};

// Times are the mean over the workers, bytes their sum.
struct WorkersResult {
  double seconds = 0;  // per iteration
  double stalled = 0;  // the fraction in which a device computes nothing
  uint64_t bytes_copied_by_caller = 0;
};

// Everything fits the devices' memory; every worker has a link to the server as `machine` says.
// Throws Error(kInternal) if a worker fails, which writes the reason to stderr. REQUIRES: the
// calling process has one thread.
WorkersResult train(const Workers& workers, const Net& net, const Machine& machine, Style style);

}  // namespace phub::geeps_bench

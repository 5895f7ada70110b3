// How tests' workers join: over shared memory, or what PHUB_TRANSPORT says.
#pragma once

#include <cstdlib>
#include <string>
#include <utility>

#include "worker/worker.h"

namespace phub::testing {

inline WorkerOptions options_of(const std::string& server, JobSpec spec) {
  WorkerOptions options;
  options.server = server;
  if (const char* transport = std::getenv("PHUB_TRANSPORT")) options.transport = transport;
  options.spec = std::move(spec);
  options.connect_timeout_ms = 30'000;  // for a machine with other things to do
  return options;
}

}  // namespace phub::testing

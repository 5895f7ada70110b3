// What the operating system says about this process.
#pragma once

#include <cstdint>
#include <string>

namespace phub {

struct ProcessUsage {
  double cpu_s = 0;
  double start_s = 0;  // since the epoch
  uint64_t resident_bytes = 0, virtual_bytes = 0;
  uint64_t threads = 0;
  uint64_t open_fds = 0, max_fds = 0;
};

// Zeros where /proc does not say.
ProcessUsage process_usage(const std::string& proc = "/proc");

}  // namespace phub

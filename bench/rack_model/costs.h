// The costs of software on a machine, as a calibration file says them: measured by bench/believe
// with tools that are not the exchange, and never fitted to it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace phub::rack_model {

// The default is a machine without any cost, as the limits (phub/plan/limits.h) assume.
struct Costs {
  // The time of a thread, per chunk and per byte: to send one and to receive one, and to sum one
  // apart from the memory that this reads and writes.
  double send_chunk_ns = 0, send_byte_ns = 0;
  double receive_chunk_ns = 0, receive_byte_ns = 0;
  double sum_chunk_ns = 0;
  double wakeup_us = 0;       // to wake a thread: a core at the start, a worker at the end
  double latency_us = 0;      // the network's, one way
  double framing = 1;         // bytes on a wire per byte of a chunk, at least 1
  double window_bytes = 0;    // in flight on a connection and not yet received; 0: no limit
  uint32_t shared_cores = 0;  // all threads of all hosts share so many; 0: each has its own core
};

// TOML: `name = value` of the above. Throws Error(kInvalid), which names the place
// ("costs.toml:3:9") and the problem.
Costs parse_costs(std::string_view text, std::string_view path);
Costs load_costs(const std::string& path);

}  // namespace phub::rack_model

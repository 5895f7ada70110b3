// GET /metrics: the status of the server in the text format of Prometheus (0.0.4).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "transport/control/messages.h"
#include "transport/tls/counters.h"

namespace phub {

// Counters of the control port. Control thread only.
struct HttpCounters {
  uint64_t connections = 0;  // open now
  uint64_t accepted = 0;
  uint64_t refused = 0;                            // there were too many
  uint64_t evicted = 0;                            // idle, closed to make room
  uint64_t timed_out = 0;                          // idle, or slow to send a request
  uint64_t request_bytes = 0, response_bytes = 0;  // bytes of bodies
  const TlsCounters* tls = nullptr;                // null: plain HTTP
  // By the status of the answer and the pattern of the path; "" if it was refused before that.
  std::map<std::pair<std::string_view, unsigned>, uint64_t> answers;
};

// Resources of this process.
struct ProcessUsage {
  double cpu_s = 0;
  double start_s = 0;  // since the epoch
  uint64_t resident_bytes = 0, virtual_bytes = 0;
  uint64_t threads = 0;
  uint64_t open_fds = 0, max_fds = 0;
};

// Reads /proc; numbers that it does not tell are 0.
ProcessUsage process_usage(const std::string& proc = "/proc");

inline constexpr std::string_view kMetricsType = "text/plain; version=0.0.4; charset=utf-8";

std::string metrics_text(const ServerStatus& status, const HttpCounters& http,
                         const ProcessUsage& process);

// Documentation and its test use these.
struct MetricInfo {
  std::string_view name;
  std::string_view type;  // "counter", "gauge"
  std::string_view help;
};
std::span<const MetricInfo> metric_infos();

}  // namespace phub

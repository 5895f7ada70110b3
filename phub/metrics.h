// GET /metrics: the status of the server in the text format of Prometheus (0.0.4).
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "phub/http_counters.h"
#include "phub/metrics_process.h"
#include "transport/messages.h"

namespace phub {

inline constexpr std::string_view kMetricsType = "text/plain; version=0.0.4; charset=utf-8";

std::string metrics_text(const ServerStatus& status, const HttpCounters& http,
                         const ProcessUsage& process);

// For documentation and its test.
struct MetricInfo {
  std::string_view name;
  std::string_view type;  // "counter", "gauge"
  std::string_view help;
};
std::span<const MetricInfo> metric_infos();

}  // namespace phub

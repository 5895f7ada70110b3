// The results, for people and for programs.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "bench/zerocompute_run.h"

namespace phub {

// One row: what was measured and what came out.
struct ReportRow {
  std::string model, transport, optimizer, dtype;
  std::string work;  // "all", "sum" (not optimized) or "none" (neither)
  bool copy = false;
  uint32_t workers = 0;
  uint32_t job = 0, jobs = 1;  // which of how many beside each other
  uint64_t warmup = 0;
  CaseResult result;
};

// Gb/s in one direction at the median: a worker's gradients (as much comes back), and all workers'.
double worker_gbps(const ReportRow& row);
double server_gbps(const ReportRow& row);
// The memory's limit over the median round, in percent; 0 if the limit was not measured.
double percent_of_limit(const ReportRow& row);

std::string table_header();
std::string table_row(const ReportRow& row);

// {"rows": [{"model", "workers", "transport", "optimizer", "dtype", "bytes", "rounds",
// "exchanges_per_s", "p50_us", "p99_us", "wrong", …}]}; README.md describes the fields.
nlohmann::json to_json(std::span<const ReportRow> rows);

}  // namespace phub

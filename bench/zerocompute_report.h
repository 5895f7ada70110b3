// The results, for people and for programs.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>

#include "bench/zerocompute_run.h"
#include "bench/zerocompute_verdict.h"
#include "transport/messages.h"

namespace phub {

// One row: what was measured and what came out.
struct ReportRow {
  std::string model, transport, optimizer, dtype;
  std::string work;  // "all", "sum" (not optimized) or "none" (neither)
  bool copy = false;
  uint32_t workers = 0;
  uint32_t job = 0, jobs = 1;  // which of how many beside each other
  uint32_t chunk_elements = 0;
  uint64_t warmup = 0;
  CaseResult result;
};

// Gb/s in one direction at the median: a worker's gradients (as much comes back), and all workers'.
double worker_gbps(const ReportRow& row);
double server_gbps(const ReportRow& row);
// The memory's limit over the median round, in percent; 0 if the limit was not measured.
double percent_of_limit(const ReportRow& row);

// Which limit bound this row's rounds. Rows of jobs beside each other have none.
std::optional<Verdict> verdict_of(const ReportRow& row);

std::string table_header();
std::string table_row(const ReportRow& row);

// The verdict of each row on a line of its own, and what to change about every limit that binds.
// Empty if no row has any.
std::string verdict_text(std::span<const ReportRow> rows);

// {"rows": [{"model", "workers", "transport", "optimizer", "dtype", "bytes", "rounds",
// "exchanges_per_s", "p50_us", "p99_us", "wrong", …}]}; README.md describes the fields.
nlohmann::json to_json(std::span<const ReportRow> rows);

// Where it was measured: {"cpus", "cpu", "topology"} of this machine, and {"transports", "nics",
// "cores", "topology"} of the server.
nlohmann::json machine_json();
nlohmann::json server_json(const ServerStatus& status);

}  // namespace phub

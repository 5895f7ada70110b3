// The results as text and as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>

#include "bench/zerocompute/run.h"
#include "bench/zerocompute/verdict.h"
#include "transport/control/messages.h"

namespace phub {

// A row: a measurement and its result.
struct ReportRow {
  std::string model, transport, optimizer, groups;
  std::string dtype;          // the format of the parameters that come back
  std::string format;         // the format of the gradients
  std::string factors, rows;  // the keys that are sent as these, as it was asked for
  std::string work;           // "all", "sum" (not optimized) or "none" (neither)
  std::string copy;
  uint32_t workers = 0;
  uint32_t job = 0, jobs = 1;  // one of so many jobs at the same time
  uint32_t chunk_elements = 0;
  uint64_t warmup = 0;
  CaseResult result;
};

// Gb/s in one direction at the median, of gradients or of the parameters that come back, whichever
// are more. One function is for a worker, one for all.
double worker_gbps(const ReportRow& row);
double server_gbps(const ReportRow& row);
// The memory's limit over the median round, in percent; 0 if the limit was not measured.
double percent_of_limit(const ReportRow& row);

// The limit that bound this row's rounds; nullopt for rows with several jobs.
std::optional<Verdict> verdict_of(const ReportRow& row);

std::string table_header();
std::string table_row(const ReportRow& row);

// The verdict of each row on a line, and advice for every limit that binds. Empty if no row has a
// verdict.
std::string verdict_text(std::span<const ReportRow> rows);

// {"rows": [{"model", "workers", "transport", "optimizer", "dtype", "format", "bytes", "rounds",
// "exchanges_per_s", "p50_us", "p99_us", "wrong", …}]}; README.md describes the fields.
nlohmann::json to_json(std::span<const ReportRow> rows);

// {"cpus", "cpu", "topology"} of this machine, and {"transports", "nics", "cores", "topology"} of
// the server.
nlohmann::json machine_json();
nlohmann::json server_json(const ServerStatus& status);

}  // namespace phub

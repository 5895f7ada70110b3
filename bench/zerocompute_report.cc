#include "bench/zerocompute_report.h"

#include <fmt/format.h>

#include "bench/zerocompute_options.h"

namespace phub {
namespace {

constexpr const char* kFormat =
    "{:<14} {:>3} {:<5} {:<9} {:<5} {:>10} {:>6} {:>7} {:>6} {:>10} {:>10} {:>10} {:>10} {:>9} "
    "{:>8} {:>8} {:>6} {:>6}";

// Times from microseconds to minutes, in a column of ten.
std::string time_text(double us) {
  return us < 1000 ? fmt::format("{:.1f}", us) : fmt::format("{:.0f}", us);
}

std::string optimizer_text(const ReportRow& row) {
  if (row.work == "none") return "(no sum)";
  return row.work == "sum" ? "(sum)" : row.optimizer;
}

std::string model_text(const ReportRow& row) {
  return row.jobs == 1 ? row.model : fmt::format("{} #{}", row.model, row.job);
}

}  // namespace

double worker_gbps(const ReportRow& row) {
  return static_cast<double>(row.result.bytes) * 8 / (row.result.us.p50 * 1e3);
}

double server_gbps(const ReportRow& row) { return worker_gbps(row) * row.workers; }

double percent_of_limit(const ReportRow& row) {
  return 100 * row.result.limit_us / row.result.us.p50;
}

std::string table_header() {
  return fmt::format(fmt::runtime(kFormat), "model", "W", "via", "optimizer", "type", "bytes",
                     "keys", "chunks", "rounds", "min µs", "p50 µs", "p99 µs", "max µs", "rounds/s",
                     "worker", "server", "limit", "wrong") +
         "\n" +
         fmt::format(fmt::runtime(kFormat), "", "", "", "", "", "", "", "", "", "", "", "", "", "",
                     "Gb/s", "Gb/s", "%", "");
}

std::string table_row(const ReportRow& row) {
  const CaseResult& r = row.result;
  return fmt::format(
      fmt::runtime(kFormat), model_text(row), row.workers, row.transport, optimizer_text(row),
      row.dtype, r.bytes, r.keys, r.chunks, r.rounds, time_text(r.us.min), time_text(r.us.p50),
      time_text(r.us.p99), time_text(r.us.max), fmt::format("{:.1f}", r.exchanges_per_s),
      fmt::format("{:.1f}", worker_gbps(row)), fmt::format("{:.1f}", server_gbps(row)),
      r.limit_us > 0 ? fmt::format("{:.1f}", percent_of_limit(row)) : "-", r.wrong);
}

nlohmann::json to_json(std::span<const ReportRow> rows) {
  nlohmann::json list = nlohmann::json::array();
  for (const ReportRow& row : rows) {
    const CaseResult& r = row.result;
    nlohmann::json out = {{"model", row.model},
                          {"workers", row.workers},
                          {"job", row.job},
                          {"jobs", row.jobs},
                          {"transport", row.transport},
                          {"optimizer", row.optimizer},
                          {"dtype", row.dtype},
                          {"work", row.work},
                          {"copy", row.copy},
                          {"bytes", r.bytes},
                          {"elements", r.elements},
                          {"keys", r.keys},
                          {"chunks", r.chunks},
                          {"warmup", row.warmup},
                          {"rounds", r.rounds},
                          {"exchanges_per_s", r.exchanges_per_s},
                          {"min_us", r.us.min},
                          {"p50_us", r.us.p50},
                          {"p99_us", r.us.p99},
                          {"max_us", r.us.max},
                          {"worker_gbps", worker_gbps(row)},
                          {"server_gbps", server_gbps(row)},
                          {"wrong", r.wrong},
                          {"checked", r.checked},
                          {"bytes_copied", r.stats.bytes_copied},
                          {"sleeps", r.stats.sleeps}};
    if (r.limit_us > 0) {
      out["limit_us"] = r.limit_us;
      out["limit_gigabytes_per_s"] = r.limit_gigabytes_per_s;
      out["limit_threads"] = r.limit_threads;
      out["memory_bytes_moved"] = r.memory_bytes_moved;
      out["percent_of_limit"] = percent_of_limit(row);
    }
    list.push_back(std::move(out));
  }
  return {{"rows", std::move(list)}};
}

}  // namespace phub

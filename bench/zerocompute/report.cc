#include "bench/zerocompute/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <string_view>
#include <thread>

#include "bench/zerocompute/options.h"
#include "numa/topology.h"

namespace phub {
namespace {

constexpr const char* kFormat =
    "{:<16} {:>3} {:<5} {:<9} {:<8} {:>10} {:>6} {:>8} {:>7} {:>6} {:>10} {:>10} {:>10} {:>10} "
    "{:>9} "
    "{:>8} {:>8} {:>6} {:>6}";

// Times from microseconds to minutes, in a column of ten.
std::string time_text(double us) {
  return us < 1000 ? fmt::format("{:.1f}", us) : fmt::format("{:.0f}", us);
}

std::string optimizer_text(const ReportRow& row) {
  if (row.work == "none") return "(no sum)";
  return row.work == "sum" ? "(sum)" : row.optimizer;
}

uint64_t chunk_bytes(const ReportRow& row) {
  const std::optional<kernels::DType> format = kernels::parse_format(row.format);
  return format ? kernels::slot_bytes(*format, row.chunk_elements) : 0;
}

std::string model_text(const ReportRow& row) {
  return row.jobs == 1 ? row.model : fmt::format("{} #{}", row.model, row.job);
}

std::string cpu_model() {
  constexpr std::string_view kField = "model name";
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with(kField) && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

// The figures that the verdict comes from, as far as they were measured.
void add_measured(const ReportRow& row, nlohmann::json& out) {
  const Measured& m = row.result.measured;
  const std::optional<Verdict> verdict = verdict_of(row);
  if (!verdict) return;
  if (m.network_us) out["network_us"] = *m.network_us;
  if (!m.core_busy.empty()) {
    out["core_busy"] = m.core_busy;
    out["core_waited"] = m.core_waited;
  }
  if (m.machine_busy) out["machine_busy"] = *m.machine_busy;
  if (m.wakeups) {
    out["wakeups"] = *m.wakeups;
    out["wakeup_us"] = m.wakeup_us;
  }
  if (!m.done_us.empty()) {
    out["done_us"] = m.done_us;
    out["pushed_us"] = m.pushed_us;
  }
  nlohmann::json shares = nlohmann::json::object();
  for (const Share& s : verdict->shares) shares[std::string(word_of(s.bound))] = s.share;
  out["verdict"] = {{"bound", word_of(verdict->bound)},
                    {"because", verdict->because},
                    {"advice", advice(verdict->bound)},
                    {"shares", std::move(shares)}};
}

}  // namespace

double worker_gbps(const ReportRow& row) {
  const uint64_t bytes = std::max(row.result.bytes, row.result.result_bytes);
  return static_cast<double>(bytes) * 8 / (row.result.us.p50 * 1e3);
}

double server_gbps(const ReportRow& row) { return worker_gbps(row) * row.workers; }

double percent_of_limit(const ReportRow& row) {
  return 100 * row.result.limit_us / row.result.us.p50;
}

std::optional<Verdict> verdict_of(const ReportRow& row) {
  if (row.jobs != 1 || !(row.result.measured.round_us > 0)) return std::nullopt;
  return judge(row.result.measured);
}

std::string verdict_text(std::span<const ReportRow> rows) {
  std::string text;
  std::vector<Bound> bounds;
  for (const ReportRow& row : rows) {
    const std::optional<Verdict> verdict = verdict_of(row);
    if (!verdict) continue;
    text += fmt::format("  {:<16} {:>3} {:>8}  {:<18} {}", row.model, row.workers,
                        size_text(chunk_bytes(row)), name_of(verdict->bound), verdict->because);
    for (size_t i = 0; i < verdict->shares.size(); ++i) {
      const Share& s = verdict->shares[i];
      text += fmt::format("{}{} {:.0f}%", i == 0 ? "; " : ", ", name_of(s.bound), 100 * s.share);
    }
    text += "\n";
    if (std::find(bounds.begin(), bounds.end(), verdict->bound) == bounds.end()) {
      bounds.push_back(verdict->bound);
    }
  }
  if (text.empty()) return text;
  text.insert(0, "What binds, by model, workers and size of a chunk:\n");
  for (const Bound bound : bounds) {
    text += fmt::format("  {}: {}\n", name_of(bound), advice(bound));
  }
  return text;
}

std::string table_header() {
  return fmt::format(fmt::runtime(kFormat), "model", "W", "via", "optimizer", "type", "bytes",
                     "keys", "chunk", "chunks", "rounds", "min µs", "p50 µs", "p99 µs", "max µs",
                     "rounds/s", "worker", "server", "limit", "wrong") +
         "\n" +
         fmt::format(fmt::runtime(kFormat), "", "", "", "", "", "", "", "", "", "", "", "", "", "",
                     "", "Gb/s", "Gb/s", "%", "");
}

std::string table_row(const ReportRow& row) {
  const CaseResult& r = row.result;
  return fmt::format(
      fmt::runtime(kFormat), model_text(row), row.workers, row.transport, optimizer_text(row),
      row.format, r.bytes, r.keys, size_text(chunk_bytes(row)), r.chunks, r.rounds,
      time_text(r.us.min), time_text(r.us.p50), time_text(r.us.p99), time_text(r.us.max),
      fmt::format("{:.1f}", r.exchanges_per_s), fmt::format("{:.1f}", worker_gbps(row)),
      fmt::format("{:.1f}", server_gbps(row)),
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
                          {"format", row.format},
                          {"factors", row.factors},
                          {"rows", row.rows},
                          {"groups", row.groups},
                          {"work", row.work},
                          {"copy", row.copy},
                          {"bytes", r.bytes},
                          {"result_bytes", r.result_bytes},
                          {"elements", r.elements},
                          {"keys", r.keys},
                          {"chunk_elements", row.chunk_elements},
                          {"chunk_bytes", chunk_bytes(row)},
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
    add_measured(row, out);
    list.push_back(std::move(out));
  }
  return {{"rows", std::move(list)}};
}

nlohmann::json machine_json() {
  return {{"cpus", std::thread::hardware_concurrency()},
          {"cpu", cpu_model()},
          {"topology", numa::this_machine().source}};
}

nlohmann::json server_json(const ServerStatus& status) {
  return {{"topology", status.topology},
          {"transports", status.transports},
          {"nics", status.nics},
          {"cores", status.cores}};
}

}  // namespace phub

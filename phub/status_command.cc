#include "phub/status_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <vector>

#include "transport/control_client.h"
#include "transport/messages_json.h"

namespace phub {
namespace {

using Row = std::vector<std::string>;

// Columns as wide as their widest cell; the first to the left, numbers to the right.
std::string table(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const bool left = i <= 1;
      line += left ? fmt::format("{:<{}}  ", row[i], widths[i])
                   : fmt::format("{:>{}}  ", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + '\n';
  }
  return out;
}

std::string bytes(uint64_t n) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(n);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", n) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::string duration(double seconds) {
  const auto s = static_cast<uint64_t>(std::max(0.0, seconds));
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {} s", s / 60, s % 60);
  return fmt::format("{} h {} min", s / 3600, s / 60 % 60);
}

Row job_row(const JobStatus& job) {
  const auto live = std::count_if(job.ranks.begin(), job.ranks.end(),
                                  [](const RankStatus& rank) { return rank.state == "live"; });
  return {job.name,
          job.state,
          fmt::format("{} of {}", live, job.ranks.size()),
          fmt::format("{}", job.completed_round),
          fmt::format("{:.1f}", job.rounds_per_s),
          fmt::format("{}", job.keys),
          fmt::format("{}", job.chunks),
          bytes(job.memory_bytes),
          job.optimizer};
}

// What a person has to know beyond the table.
std::string job_notes(const JobStatus& job) {
  std::string out;
  if (!job.error.empty()) out += fmt::format("{}: failed: {}\n", job.name, job.error);
  for (const RankStatus& rank : job.ranks) {
    if (rank.state == "live") continue;
    out += fmt::format("{}: rank {} is {}", job.name, rank.rank, rank.state);
    if (rank.incarnation != 0) out += fmt::format(" (incarnation {})", rank.incarnation);
    if (!rank.reason.empty()) out += ": " + rank.reason;
    out += '\n';
  }
  if (!job.waiting_for.empty()) {
    out += fmt::format("{}: round {} waits for rank {}\n", job.name, job.completed_round + 1,
                       fmt::join(job.waiting_for, ", "));
  }
  return out;
}

}  // namespace

std::string describe(const ServerStatus& status) {
  std::string out =
      fmt::format("{}\n{} cores, {} of {} in use, transports: {}, up {}\n", status.topology,
                  status.cores, bytes(status.memory_bytes), bytes(status.memory_limit_bytes),
                  fmt::join(status.transports, ", "), duration(status.uptime_s));
  for (const std::string& nic : status.nics) out += nic + '\n';
  if (status.jobs.empty()) return out + "no jobs\n";
  std::vector<Row> rows = {
      {"JOB", "STATE", "RANKS", "ROUND", "ROUNDS/S", "KEYS", "CHUNKS", "MEMORY", "OPTIMIZER"}};
  std::string notes;
  for (const JobStatus& job : status.jobs) {
    rows.push_back(job_row(job));
    notes += job_notes(job);
  }
  return out + '\n' + table(rows) + (notes.empty() ? "" : '\n' + notes);
}

void add_status_command(CLI::App& app) {
  struct Arguments {
    std::string server = "127.0.0.1:7717";
    bool json = false;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("status", "Shows a running server: jobs, ranks, rounds, who is missing");
  command->add_option("--server", arguments->server, "Its control port (env PHUB_SERVER)")
      ->type_name("HOST:PORT")
      ->envname("PHUB_SERVER")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "The server's answer as it is, for programs");
  command->footer(
      "Examples:\n"
      "  phub status\n"
      "  phub status --server box:7717 --json");
  command->callback([arguments] {
    ControlClient client(arguments->server);
    const ServerStatus status = client.status();
    fmt::print("{}", arguments->json ? to_json(status) + "\n" : describe(status));
  });
}

}  // namespace phub

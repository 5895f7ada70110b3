// zerocompute: how fast a server exchanges real models' gradients for parameters, with workers that
// compute nothing (PHub, section 4).
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <iostream>
#include <optional>
#include <utility>
#include <vector>

#include "bench/zerocompute/measures.h"
#include "bench/zerocompute/options.h"
#include "bench/zerocompute/rank.h"
#include "bench/zerocompute/report.h"
#include "numa/topology.h"
#include "transport/control/control_client.h"
#include "transport/control/token.h"
#include "worker/examples/processes.h"

namespace phub {
namespace {

// The distance in the pattern between jobs that run at the same time.
constexpr uint64_t kJobStride = 1'000'003;

// On a busy or emulated machine a process may get no CPU for seconds.
constexpr uint32_t kLeaseMs = 10000;

// A launcher starts the server and the ranks in any order.
constexpr uint32_t kOneRankConnectMs = 30000;

volatile std::sig_atomic_t interrupted = 0;

void interrupt(int) { interrupted = 1; }

std::string work_of(const ZerocomputeOptions& options) {
  if (!options.sum) return "none";
  return options.optimize ? "all" : "sum";
}

CaseSpec case_of(const ZerocomputeOptions& options, const KeyTable& table, uint32_t workers,
                 uint32_t chunk_elements, const std::string& server, const std::string& job_name) {
  const kernels::Optimizer optimizer =
      options.optimize ? options.optimizer : kernels::Optimizer::kNone;
  CaseSpec spec{.table = table,
                .workers = workers,
                .dtype = options.dtype,
                .format = options.format,
                .results = options.results,
                .copy = options.copy};
  spec.checker = {.ranks = workers,
                  .elements = total_elements(table),
                  .optimizer = optimizer,
                  .hyper = kernels::default_hyper(optimizer),
                  .result_dtype = options.dtype,
                  .computes = options.sum,
                  .format = options.format,
                  .groups = options.groups,
                  .difference = options.results,
                  .keys = table.keys,
                  .chunk_elements = chunk_elements};
  spec.worker.server = server;
  spec.worker.transport = options.transport;
  spec.worker.nic_budget = options.budget;
  spec.worker.send_order = options.send_order;
  JobSpec& job = spec.worker.spec;
  job.name = job_name;
  job.keys = table.keys;
  job.world_size = workers;
  job.chunk_elements = chunk_elements;
  job.optimizer = kernels::name_of(optimizer);
  job.lease_ms = kLeaseMs;
  job.work = options.sum ? "all" : "none";
  job.gradient_dtype = kernels::name_of(options.format);
  job.parameter_dtype = kernels::name_of(options.results);
  job.on_loss = "fail";
  job.groups = options.groups;
  validate(job);
  return spec;
}

void write_json(const std::string& path, std::span<const ReportRow> rows,
                const nlohmann::json& server) {
  nlohmann::json out = to_json(rows);
  out["machine"] = machine_json();
  if (!server.is_null()) out["server"] = server;
  std::ofstream file(path);
  file << out.dump(2) << "\n";
  if (!file.flush()) fail(ErrorCode::kInvalid, "--json: cannot write '{}'", path);
}

// The rows of one case: one, or one per job.
std::vector<ReportRow> rows_of(const ZerocomputeOptions& options, const CaseSpec& spec,
                               std::vector<CaseResult> results) {
  std::vector<ReportRow> rows;
  for (CaseResult& result : results) {
    rows.push_back({.model = spec.table.name,
                    .transport = options.transport,
                    .optimizer = std::string(kernels::name_of(options.optimizer)),
                    .groups = options.groups,
                    .dtype = std::string(kernels::name_of(options.results)),
                    .format = std::string(kernels::name_of(options.format)),
                    .factors = options.factors,
                    .rows = options.rows,
                    .work = work_of(options),
                    .copy = options.copy,
                    .workers = spec.workers,
                    .job = static_cast<uint32_t>(rows.size()),
                    .jobs = options.jobs,
                    .chunk_elements = spec.worker.spec.chunk_elements,
                    .warmup = options.warmup,
                    .result = std::move(result)});
  }
  return rows;
}

// Prints and writes the results, row by row.
class Report {
 public:
  explicit Report(const ZerocomputeOptions& options) : options_(options) {
    if (!options.json.empty()) write_json(options.json, {}, {});  // fails early if it cannot
  }

  void about(const ServerStatus& status) { server_ = server_json(status); }

  void add(std::vector<ReportRow> rows) {
    for (ReportRow& row : rows) {
      if (rows_.empty()) std::cout << table_header() << "\n";
      std::cout << table_row(row) << std::endl;
      note_wrong(row.result);
      rows_.push_back(std::move(row));
    }
    if (!options_.json.empty()) write_json(options_.json, rows_, server_);
  }

  // Prints the verdict and the wrong results.
  void conclude() const {
    const std::string text = verdict_text(rows_);
    if (!text.empty()) std::cout << "\n" << text << std::flush;
  }

  void note_wrong(const CaseResult& result) {
    wrong_ += result.wrong;
    if (result.wrong == 0) return;
    std::cerr << "zerocompute: wrong results, the first in " << result.wrong_text << "\n";
  }

  int status() const { return wrong_ == 0 ? 0 : 1; }

 private:
  const ZerocomputeOptions& options_;
  std::vector<ReportRow> rows_;
  nlohmann::json server_;
  uint64_t wrong_ = 0;
};

// Forks the workers of every case and returns the exit status: 0 if every result was right.
int measure(const ZerocomputeOptions& options) {
  Report report(options);
  std::optional<OwnServer> own;
  if (options.server.empty()) {
    std::vector<std::string> arguments = options.serve_arguments;
    if (!options.budget.empty())
      arguments.insert(arguments.end(), {"--nic-budget", options.budget});
    own.emplace(beside_this_program("phub"), options.transport, arguments);
  }
  const std::string server = own ? own->address() : options.server;
  Schedule schedule{.warmup = options.warmup,
                    .rounds = options.rounds,
                    .seconds = options.seconds,
                    .server_pid = own ? own->pid() : 0,
                    .wakeup_us = measure_wakeup_us(),
                    .link_gbps = options.link_gbps};
  const ServerStatus status = ControlClient(server, token_from_environment()).status();
  report.about(status);
  if (options.limit) {
    const size_t here = numa::this_machine().cores.size();
    schedule.limit_threads = std::clamp<uint32_t>(status.cores, 1, static_cast<uint32_t>(here));
  }
  std::vector<std::pair<uint32_t, uint32_t>> sizes;  // workers, elements of a chunk
  for (const uint32_t workers : options.workers) {
    for (const uint32_t elements : options.chunk_elements) sizes.emplace_back(workers, elements);
  }
  Progress progress(!options.quiet);
  size_t number = 0;
  for (const KeyTable& table : options.models) {
    for (const auto& [workers, chunk_elements] : sizes) {
      progress.begin(fmt::format("{}, {} workers", table.name, workers));
      std::vector<CaseSpec> jobs;
      for (uint32_t j = 0; j < options.jobs; ++j) {
        jobs.push_back(case_of(options, table, workers, chunk_elements, server,
                               fmt::format("zerocompute-{}-{}", getpid(), number++)));
        jobs[j].checker.pattern_first = j * kJobStride;
      }
      report.add(rows_of(options, jobs[0], run_jobs(jobs, schedule, progress, interrupted)));
    }
  }
  report.conclude();
  return report.status();
}

// Runs one rank of every case in this process. Only rank 0 reports times; every rank reports its
// wrong results.
int measure_one_rank(const ZerocomputeOptions& options) {
  ZerocomputeOptions own = options;
  if (options.rank != 0) own.json.clear();
  Report report(own);
  const Schedule schedule{
      .warmup = options.warmup, .rounds = options.rounds, .link_gbps = options.link_gbps};
  Progress progress(!options.quiet && options.rank == 0);
  size_t number = 0;
  for (const KeyTable& table : options.models) {
    progress.begin(fmt::format("{}, {} workers", table.name, options.workers[0]));
    for (const uint32_t chunk_elements : options.chunk_elements) {
      CaseSpec spec = case_of(options, table, options.workers[0], chunk_elements, options.server,
                              fmt::format("{}-{}", options.job, number++));
      spec.worker.rank = static_cast<int32_t>(options.rank);
      spec.worker.connect_timeout_ms = kOneRankConnectMs;
      CaseResult result = run_one_rank(spec, schedule, progress);
      if (options.rank == 0) {
        report.add(rows_of(options, spec, {std::move(result)}));
      } else {
        report.note_wrong(result);
      }
    }
  }
  if (options.rank == 0) report.conclude();
  return report.status();
}

int run(int argc, char** argv) {
  std::optional<ZerocomputeOptions> options;
  try {
    options = parse_zerocompute_options(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "zerocompute: " << error.what() << "\n";
    return 2;
  }
  if (!options) return 0;
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error, as a full disk is
  if (!options->one_rank) {
    std::signal(SIGINT, interrupt);
    std::signal(SIGTERM, interrupt);
  }
  try {
    return options->one_rank ? measure_one_rank(*options) : measure(*options);
  } catch (const std::exception& error) {
    std::cerr << "zerocompute: " << error.what() << "\n";
    return interrupted ? 130 : 1;
  }
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) { return phub::run(argc, argv); }

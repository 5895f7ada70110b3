// zerocompute: how fast a server exchanges real models' gradients for parameters, with workers that
// compute nothing (PHub, section 4).
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <iostream>

#include "bench/zerocompute_options.h"
#include "bench/zerocompute_report.h"
#include "bench/zerocompute_server.h"
#include "numa/topology.h"
#include "transport/control_client.h"

namespace phub {
namespace {

volatile std::sig_atomic_t interrupted = 0;

void interrupt(int) { interrupted = 1; }

std::string work_of(const ZerocomputeOptions& options) {
  if (!options.sum) return "none";
  return options.optimize ? "all" : "sum";
}

CaseSpec case_of(const ZerocomputeOptions& options, const KeyTable& table, uint32_t workers,
                 const std::string& server, size_t number) {
  const kernels::Optimizer optimizer =
      options.optimize ? options.optimizer : kernels::Optimizer::kNone;
  CaseSpec spec{.table = table, .workers = workers, .dtype = options.dtype, .copy = options.copy};
  spec.checker = {.ranks = workers,
                  .elements = total_elements(table),
                  .optimizer = optimizer,
                  .hyper = kernels::default_hyper(optimizer),
                  .result_dtype = options.dtype,
                  .computes = options.sum};
  spec.worker.server = server;
  spec.worker.transport = options.transport;
  JobSpec& job = spec.worker.spec;
  job.name = fmt::format("zerocompute-{}-{}", getpid(), number);
  job.keys = table.keys;
  job.world_size = workers;
  job.chunk_elements = options.chunk_elements;
  job.optimizer = kernels::name_of(optimizer);
  job.work = options.sum ? "all" : "none";
  job.gradient_dtype = job.parameter_dtype = kernels::name_of(options.dtype);
  job.on_loss = "fail";
  validate(job);
  return spec;
}

void write_json(const std::string& path, std::span<const ReportRow> rows) {
  std::ofstream file(path);
  file << to_json(rows).dump(2) << "\n";
  if (!file.flush()) fail(ErrorCode::kInvalid, "--json: cannot write '{}'", path);
}

// The exit status: 0 if every result was right.
int measure(const ZerocomputeOptions& options) {
  if (!options.json.empty()) write_json(options.json, {});  // whether it can be written
  std::optional<OwnServer> own;
  if (options.server.empty()) own.emplace(beside_this_program("phub"), options.serve_arguments);
  const std::string server = own ? own->address() : options.server;
  ControlClient control(server);
  const uint32_t server_cores = control.status().cores;
  Schedule schedule{.warmup = options.warmup, .rounds = options.rounds, .seconds = options.seconds};
  if (options.limit) {
    const size_t here = numa::this_machine().cores.size();
    schedule.limit_threads = std::clamp<uint32_t>(server_cores, 1, static_cast<uint32_t>(here));
  }
  Progress progress(!options.quiet);
  std::vector<ReportRow> rows;
  uint64_t wrong = 0;
  for (const KeyTable& table : options.models) {
    for (uint32_t workers : options.workers) {
      progress.begin(fmt::format("{}, {} workers", table.name, workers));
      const CaseSpec spec = case_of(options, table, workers, server, rows.size());
      ReportRow row{.model = table.name,
                    .transport = options.transport,
                    .optimizer = std::string(kernels::name_of(options.optimizer)),
                    .dtype = std::string(kernels::name_of(options.dtype)),
                    .work = work_of(options),
                    .copy = options.copy,
                    .workers = workers,
                    .warmup = options.warmup,
                    .result = run_case(spec, schedule, progress, interrupted)};
      if (rows.empty()) std::cout << table_header() << "\n";
      std::cout << table_row(row) << std::endl;
      if (row.result.wrong > 0) {
        std::cerr << "zerocompute: wrong results, the first in " << row.result.wrong_text << "\n";
      }
      wrong += row.result.wrong;
      rows.push_back(std::move(row));
      if (!options.json.empty()) write_json(options.json, rows);
    }
  }
  return wrong == 0 ? 0 : 1;
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
  std::signal(SIGINT, interrupt);
  std::signal(SIGTERM, interrupt);
  try {
    return measure(*options);
  } catch (const std::exception& error) {
    std::cerr << "zerocompute: " << error.what() << "\n";
    return interrupted ? 130 : 1;
  }
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) { return phub::run(argc, argv); }

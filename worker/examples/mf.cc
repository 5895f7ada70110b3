// Factorises a matrix of which some cells are known, in several processes of several threads:
//
//   apt-cache dumpavail >packages
//   bin/phub serve --listen 127.0.0.1:7717 &
//   for rank in 0 1; do bin/mf --world 2 --rank $rank --packages packages & done; wait
//
// Rows are packages and columns their tags; or users and films, of a file of ratings: --cells.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "transport/error.h"
#include "worker/examples/readers/cells.h"
#include "worker/examples/factorization.h"
#include "worker/examples/numbers.h"
#include "worker/examples/program.h"
#include "worker/examples/store_program.h"

namespace phub::examples {
namespace {

struct Options {
  StoreProgram program;
  FactorizationOptions factorization;
  std::string packages = "packages", cells, method = "als";
  uint32_t zeros = 3;
};

Options parse(int argc, char** argv) {
  Options options;
  options.program.iterations = 20;
  options.program.store.worker = options_from_environment();
  if (auto& name = options.program.store.worker.spec.name; name.empty()) name = "mf";
  FactorizationOptions& how = options.factorization;
  CLI::App app("Factorises a matrix of which some cells are known, one process per rank.");
  add_store_options(app, options.program);
  app.add_option("--packages", options.packages, "What `apt-cache dumpavail` prints: their tags")
      ->capture_default_str();
  app.add_option("--zeros", options.zeros, "Tags that it has not, for each that a package has")
      ->check(CLI::Range(0u, 100u))
      ->capture_default_str();
  app.add_option("--cells", options.cells, "A file of lines \"row column value\" instead");
  app.add_option("--method", options.method)
      ->check(CLI::IsMember({"als", "sgd"}))
      ->capture_default_str();
  app.add_option("--width", how.width, "Of the vectors")
      ->check(CLI::Range(1u, 256u))
      ->capture_default_str();
  app.add_option("--lambda", how.lambda, "Of the vectors' squares")
      ->check(between(1e-9, 1e9))
      ->capture_default_str();
  app.add_option("--rate", how.rate, "sgd")->check(between(0, 1e3))->capture_default_str();
  app.add_option("--clocks", how.clocks, "sgd: of an iteration")
      ->check(CLI::Range(1u, 1'000'000u))
      ->capture_default_str();
  app.add_option("--seed", how.seed)->check(not_negative())->capture_default_str();
  parse_or_exit(app, argc, argv);
  how.als = options.method == "als";
  how.iterations = options.program.iterations;
  return options;
}

std::vector<double> table_of(iterstore::Store& store, uint32_t table) {
  const std::vector<std::byte> bytes = store.table(table);
  std::vector<double> values(bytes.size() / sizeof(double));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

double error_of(std::span<const double> errors, uint32_t row) {
  return std::sqrt(errors[2 * row] / errors[2 * row + 1]);
}

std::vector<std::string> settings_of(const Options& options, const Cells& cells) {
  const FactorizationOptions& how = options.factorization;
  return {fmt::format("method {}", options.method), fmt::format("seed {}", how.seed),
          fmt::format("lambda {}", how.lambda),     fmt::format("rate {}", how.rate),
          fmt::format("clocks {}", how.clocks),     fmt::format("cells {}", cells.cells.size())};
}

void report(const Cells& cells, size_t held_out, std::span<const double> errors,
            std::span<const double> seconds) {
  fmt::print("{} rows, {} columns, {} cells, {} held out\n", cells.rows.size(),
             cells.columns.size(), cells.cells.size(), held_out);
  for (uint32_t i = 0; i < seconds.size(); ++i) {
    fmt::print("iteration {}: error {:.6f}, {:.3f} s\n", i + 1, error_of(errors, i), seconds[i]);
  }
  fmt::print("held out: error {:.6f}\n", error_of(errors, static_cast<uint32_t>(seconds.size())));
}

void run(Options options) {
  StoreProgram& program = options.program;
  const uint32_t iterations = program.iterations, threads = program.store.threads;
  const uint64_t seed = options.factorization.seed;
  Cells cells = options.cells.empty() ? read_tags(options.packages, options.zeros, seed)
                                      : read_cells(options.cells);
  const std::vector<Cell> held_out = take_held_out(cells, 0.1, seed);
  if (cells.cells.empty() || held_out.empty()) {
    fail(ErrorCode::kInvalid, "{} cells are too few: one in ten is held out",
         cells.cells.size() + held_out.size());
  }
  program.store.tables = Factorization::tables(cells, options.factorization);
  iterstore::Store store(program.store);
  agree(program, "mf", settings_of(options, cells));
  std::vector<std::unique_ptr<Factorization>> parts(threads);
  std::vector<double> seconds(iterations);  // until the first thread has made them
  const uint32_t first = static_cast<uint32_t>(program.store.worker.rank) * threads;
  run_threads(store, program, [&](iterstore::StoreThread& mine, uint32_t part) {
    auto& own = parts[part - first];
    own = std::make_unique<Factorization>(cells, options.factorization, part, parts_of(program));
    own->begin(mine);
    const auto began = std::chrono::steady_clock::now();
    run_iterations(mine, program, [&](uint32_t iteration) {
      own->iterate(mine, iteration);
      const std::chrono::duration<double> since = std::chrono::steady_clock::now() - began;
      if (part == first) seconds[iteration] = since.count();
    });
  });
  const std::vector<double> columns = table_of(store, 0);
  run_threads(store, program, [&](iterstore::StoreThread& mine, uint32_t part) {
    parts[part - first]->judge(mine, held_out, columns);
  });
  const std::vector<double> errors = table_of(store, 1);
  if (program.store.worker.rank == 0) report(cells, held_out.size(), errors, seconds);
  if (!std::isfinite(error_of(errors, iterations))) {
    fail(ErrorCode::kNonFinite, "the error is not finite: {}",
         options.factorization.als ? "the cells' values are too large"
                                   : "it diverges, try a smaller --rate");
  }
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  using namespace phub::examples;  // NOLINT
  return status_of("mf", [&] { run(parse(argc, argv)); });
}

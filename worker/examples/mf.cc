// Factorises a matrix of which some cells are known, in one process or in several, each of several
// threads:
//
//   bin/mf --in ratings.csv --out model.txt --predict pairs.txt --predictions predictions.txt
//
//   apt-cache dumpavail >packages
//   bin/phub serve --listen 127.0.0.1:7717 &
//   for rank in 0 1; do bin/mf --world 2 --rank $rank --packages packages & done; wait
//
// Rows are users and columns what they rate; or packages and their tags.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "transport/error.h"
#include "worker/examples/factor_model.h"
#include "worker/examples/factorization.h"
#include "worker/examples/files.h"
#include "worker/examples/numbers.h"
#include "worker/examples/program.h"
#include "worker/examples/readers/cells.h"
#include "worker/examples/store_program.h"

namespace phub::examples {
namespace {

using Parts = std::vector<std::unique_ptr<Factorization>>;  // of the threads of this process

struct Options {
  StoreProgram program;
  FactorizationOptions factorization;
  std::string packages = "packages", cells, method = "als";
  uint32_t zeros = 3;
  double test_share = 0.1;
  std::string out, model, pairs, predictions;

  bool keeps_model() const { return !out.empty() || !pairs.empty(); }
};

void add_files(CLI::App& app, Options& options) {
  auto* cells =
      app.add_option("--in,--cells", options.cells,
                     "A file of lines \"row column value\" (user, item, rating), or an .mtx");
  auto* packages = app.add_option("--packages", options.packages,
                                  "Instead: what `apt-cache dumpavail` prints, packages and tags")
                       ->excludes(cells)
                       ->capture_default_str();
  app.add_option("--zeros", options.zeros, "Tags that it has not, for each that a package has")
      ->check(CLI::Range(0u, 100u))
      ->excludes(cells)
      ->capture_default_str();
  auto* out = app.add_option("--out", options.out, "Write the model to this file");
  auto* pairs = app.add_option("--predict", options.pairs, "A file of lines \"row column\"");
  auto* predictions = app.add_option("--predictions", options.predictions,
                                     "Write \"row column prediction\" of these to this file");
  pairs->needs(predictions);
  predictions->needs(pairs);
  app.add_option("--model", options.model, "Predict with what --out wrote, without --in")
      ->needs(pairs)
      ->excludes(cells)
      ->excludes(packages)
      ->excludes(out);
}

Options parse(int argc, char** argv) {
  Options options;
  options.program.iterations = 20;
  options.program.store.worker = options_from_environment();
  if (auto& name = options.program.store.worker.spec.name; name.empty()) name = "mf";
  FactorizationOptions& how = options.factorization;
  CLI::App app("Factorises a matrix of which some cells are known, one process per rank.");
  add_store_options(app, options.program);
  add_files(app, options);
  app.add_option("--test-share", options.test_share,
                 "Part of the cells that is held out, and whose error is stated")
      ->check(between(0, 0.9))
      ->capture_default_str();
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
  return {fmt::format("method {}", options.method),
          fmt::format("seed {}", how.seed),
          fmt::format("lambda {}", how.lambda),
          fmt::format("rate {}", how.rate),
          fmt::format("clocks {}", how.clocks),
          fmt::format("cells {}", cells.cells.size()),
          fmt::format("file {:016x}", cells.digest),
          fmt::format("model {}", options.keeps_model() ? "kept" : "dropped")};
}

void report(const Cells& cells, size_t held_out, std::span<const double> errors,
            std::span<const double> seconds) {
  fmt::print("{} rows, {} columns, {} cells, {} held out\n", cells.rows.size(),
             cells.columns.size(), cells.cells.size(), held_out);
  for (uint32_t i = 0; i < seconds.size(); ++i) {
    fmt::print("iteration {}: error {:.6f}, {:.3f} s\n", i + 1, error_of(errors, i), seconds[i]);
  }
  if (held_out == 0) return;
  fmt::print("held out: error {:.6f}\n", error_of(errors, static_cast<uint32_t>(seconds.size())));
}

// The rows' vectors, of all threads of all ranks: a store of their own, as the one of the training
// would send them in each of its clocks. All ranks call it.
std::vector<double> vectors_of_rows(const Options& options, const Cells& cells,
                                    const Parts& parts) {
  StoreProgram program = options.program;
  const uint32_t width = options.factorization.width;
  const uint32_t first = static_cast<uint32_t>(program.store.worker.rank) * program.store.threads;
  program.store.worker.spec.name += ".vectors";
  program.store.worker.spec.consistency = "bsp";
  program.store.worker.spec.slack = 0;
  program.store.tables = {{.name = "rows",
                           .rows = cells.rows.size(),
                           .columns = width,
                           .type = "f64",
                           .operation = "add"}};
  iterstore::Store store(program.store);
  run_threads(store, program, [&](iterstore::StoreThread& mine, uint32_t part) {
    const Factorization& own = *parts[part - first];
    std::vector<uint64_t> rows(own.row_vectors().size() / width);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = own.first_row() + i;
    mine.update_batch<double>(0, rows, own.row_vectors());
    mine.clock();
  });
  return table_of(store, 0);
}

void write_predictions(const FactorModel& model, const Options& options) {
  if (options.pairs.empty()) return;
  const auto pairs = read_pairs(options.pairs);
  const Predictions found = predict(model, pairs);
  write_file(options.predictions, found.lines);
  fmt::print("{} predictions\n", pairs.size());
  if (found.unknown == 0) return;
  fmt::print("{} of them have a name that the model does not have: they are the mean, {:.6g}\n",
             found.unknown, model.mean);
}

void check_is_finite(double error, const Options& options) {
  if (std::isfinite(error)) return;
  fail(ErrorCode::kNonFinite, "the error is not finite: {}",
       options.factorization.als ? "the cells' values are too large"
                                 : "it diverges, try a smaller --rate");
}

void train(const Options& given) {
  Options options = given;
  StoreProgram& program = options.program;
  const uint32_t iterations = program.iterations, threads = program.store.threads;
  const uint64_t seed = options.factorization.seed;
  Cells cells = options.cells.empty() ? read_tags(options.packages, options.zeros, seed)
                                      : read_cells(options.cells);
  const std::vector<Cell> held_out = take_held_out(cells, options.test_share, seed);
  if (cells.cells.empty() || (held_out.empty() && options.test_share > 0)) {
    fail(ErrorCode::kInvalid, "{} cells are too few to hold out a part of {}: try --test-share 0",
         cells.cells.size() + held_out.size(), options.test_share);
  }
  program.store.tables = Factorization::tables(cells, options.factorization);
  const auto box = own_box(program);
  iterstore::Store store(program.store);
  agree(program, "mf", settings_of(options, cells));
  Parts parts(threads);
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
  FactorModel model{.mean = parts.front()->mean(),
                    .width = options.factorization.width,
                    .of_columns = table_of(store, 0)};
  run_threads(store, program, [&](iterstore::StoreThread& mine, uint32_t part) {
    parts[part - first]->judge(mine, held_out, model.of_columns);
  });
  const std::vector<double> errors = table_of(store, 1);
  if (options.keeps_model()) model.of_rows = vectors_of_rows(options, cells, parts);
  if (program.store.worker.rank == 0) report(cells, held_out.size(), errors, seconds);
  check_is_finite(error_of(errors, held_out.empty() ? iterations - 1 : iterations), options);
  if (program.store.worker.rank != 0) return;
  model.rows = std::move(cells.rows);
  model.columns = std::move(cells.columns);
  write_model(model, options.out);
  write_predictions(model, options);
}

void run(const Options& options) {
  check_can_write(options.out);
  check_can_write(options.predictions);
  if (!options.pairs.empty()) read_pairs(options.pairs);  // its mistakes come before the work
  if (options.model.empty()) return train(options);
  write_predictions(read_factor_model(options.model), options);
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  using namespace phub::examples;  // NOLINT
  return status_of("mf", [&] { run(parse(argc, argv)); });
}

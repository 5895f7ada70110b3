// layers: one rank of a training in which computing takes a stated time, for bench/ladder.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/layers/report.h"
#include "bench/layers/walk.h"
#include "phub/plan/layers.h"
#include "phub/plan/overlap.h"
#include "transport/control/matrix_exchange.h"
#include "worker/examples/program.h"
#include "worker/worker.h"

namespace phub::layers {
namespace {

// On a busy machine a process may get no processor for seconds.
constexpr uint32_t kLeaseMs = 20'000, kConnectMs = 30'000, kJoinMs = 120'000;

struct Options {
  std::string model = "alexnet";
  WalkOptions walk;
  bool no_overlap = false;
  bool alone = false;
  bool choose = false;
  bool timed = false;
  std::optional<uint32_t> slack;
  ExchangeInputs exchanges;
};

void add_walk_options(CLI::App& app, Options& options) {
  const auto positive = CLI::PositiveNumber;
  app.add_option("--model", options.model, fmt::format("One of {}", fmt::join(net_names(), ", ")))
      ->capture_default_str();
  app.add_option("--compute-s", options.walk.compute_s, "An iteration computes for so long")
      ->check(positive)
      ->capture_default_str();
  app.add_flag("--no-overlap", options.no_overlap,
               "Push all layers when the last backward is done, and wait for all");
  app.add_flag("--first-layers-first", options.walk.first_layers_first,
               "What the next iteration needs first goes first");
  app.add_option("--slack", options.slack, "Out of lock-step: rounds ahead of the slowest rank");
  app.add_option("--warmup", options.walk.warmup, "Iterations before the measured ones")
      ->capture_default_str();
  app.add_option("-n", options.walk.iterations, "Measured iterations")
      ->check(positive)
      ->capture_default_str();
  app.add_flag("--alone", options.alone, "A single node, without a server");
}

void add_way_options(CLI::App& app, Options& options) {
  const auto positive = CLI::PositiveNumber;
  app.add_flag("--choose", options.choose,
               "Matrices go as factors where an iteration then takes less time, by the options "
               "that follow (phub plan --samples --compute)");
  app.add_option("--samples", options.exchanges.samples, "Of a rank, in an iteration")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--worker-link-gbps", options.exchanges.worker_gbit_s, "Of a rank, each way")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--link-gbps", options.exchanges.box_gbit_s,
                 "Of the server's NICs together, each way")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--product-gflops", options.exchanges.product_gflop_s,
                 "Of a rank's products of factors")
      ->check(positive)
      ->capture_default_str();
  app.add_flag("--timed-products", options.timed,
               "Products take their time on the device that computes the layers, and are not made");
}

WorkerOptions worker_options(const Options& options) {
  WorkerOptions worker = options_from_environment();
  worker.connect_timeout_ms = kConnectMs;
  worker.spec.lease_ms = kLeaseMs;
  worker.spec.join_limit_ms = kJoinMs;
  if (worker.spec.name.empty()) worker.spec.name = "layers";
  if (options.slack) {
    worker.spec.consistency = "ssp";
    worker.spec.slack = *options.slack;
  }
  return worker;
}

// The layers whose matrices go as factors, by the same function as phub plan --compute. Without
// overlap computing hides nothing.
Exchanges choose(const Net& net, const Options& options, uint32_t ranks) {
  ExchangeInputs inputs = options.exchanges;
  inputs.ranks = ranks;
  const JobSpec spec{.name = net.table.name, .keys = net.table.keys};
  std::vector<LayerComputing> layers;
  if (options.walk.overlap) {
    layers = computing_of(spec, fmt::format("{}", options.walk.compute_s * 1e3));
  }
  return choose_exchanges(spec, inputs, layers);
}

std::vector<size_t> layers_of(const Net& net, const Exchanges& exchanges) {
  std::vector<size_t> layers;
  for (const MatrixCosts& matrix : exchanges.matrices) {
    if (matrix.exchange != MatrixExchange::kRanks) continue;
    const auto has = [&](const Layer& layer) { return layer.matrix == matrix.key; };
    const auto at = std::ranges::find_if(net.layers, has);
    layers.push_back(static_cast<size_t>(std::distance(net.layers.begin(), at)));
  }
  return layers;
}

nlohmann::json run_rank(const Net& net, Options& options) {
  WorkerOptions worker_of = worker_options(options);
  const Exchanges exchanges = choose(net, options, worker_of.spec.world_size);
  if (options.choose) options.walk.as_factors = layers_of(net, exchanges);
  worker_of.spec = job_of(net, options.walk, worker_of.spec);
  Worker worker(worker_of);
  worker.broadcast({});
  worker.barrier();
  const WalkResult result = walk(net, options.walk, worker);
  nlohmann::json row = json_of(result);
  const ExchangeCost& cost = options.choose ? exchanges.chosen : exchanges.all_whole;
  row["rank"] = worker.rank();
  row["bytes"] = {{"worker_sent", cost.worker_out},
                  {"worker_received", cost.worker_in},
                  {"box_received", cost.box_in},
                  {"box_sent", cost.box_out}};
  row["factors"] = nlohmann::json::array();
  for (const size_t l : options.walk.as_factors) row["factors"].push_back(net.layers[l].name);
  uint64_t elements = 0;
  for (const KeySpec& key : worker.spec().keys) elements += key.elements;
  row["job_bytes"] = elements * sizeof(float);
  worker.barrier();
  worker.leave();
  return row;
}

void run(int argc, char** argv) {
  Options options;
  CLI::App app("One rank of a training whose computing takes a stated time (bench/ladder).");
  add_walk_options(app, options);
  add_way_options(app, options);
  examples::parse_or_exit(app, argc, argv);
  options.walk.overlap = !options.no_overlap;
  options.walk.samples = static_cast<uint32_t>(options.exchanges.samples);
  options.walk.product_flops = options.timed ? options.exchanges.product_gflop_s * 1e9 : 0;
  const Net of = net(options.model);
  const nlohmann::json row =
      options.alone ? json_of(walk_alone(of, options.walk)) : run_rank(of, options);
  fmt::print("{}\n", row.dump());
}

}  // namespace
}  // namespace phub::layers

int main(int argc, char** argv) {
  return phub::examples::status_of("layers", [&] { phub::layers::run(argc, argv); });
}

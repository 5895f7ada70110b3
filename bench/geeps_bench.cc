// What a cache in device memory costs and saves: GeePS's figures (000, section 5), each as a ratio
// of times of this run, beside the goal.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/geeps_net.h"
#include "bench/geeps_run.h"
#include "bench/geeps_workers.h"
#include "bench/zerocompute_server.h"
#include "transport/error.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps_bench {
namespace {

struct Options {
  double tflops = 10;  // of the device
  double slower = 8;   // everything, than the stated device
  double parts = 8;    // of the net that is trained
  uint32_t turns = 5;  // alternated runs, of which the median counts
  uint32_t iterations = 5;
  std::string transport = "shm";
  std::string only;  // a figure; empty: all
  std::string json;
  bool tiny = false;
};

Machine machine_of(const Options& options) {
  return slower({.flops_per_second = options.tflops * 1e12}, options.slower);
}

struct Figure {
  std::string name;
  std::string unit;
  double goal = 0;
  bool at_least = true;  // otherwise at most
  double value = 0;
  std::string note;

  bool met() const { return at_least ? value >= goal : value <= goal; }
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), machine_(machine_of(options)) {}

  // The one with processes is the first: it forks.
  void measure() {
    if (wanted("stall")) stalls();
    if (wanted("budget")) small_budget();
    if (wanted("large")) large_model();
    if (wanted("call")) calls();
    if (wanted("gradients")) gradients();
    if (trained_) {
      add({"bytes copied by the application's thread", "B", 0, false,
           static_cast<double>(copied_by_caller_), "in all runs above"});
    }
  }

  const std::vector<Figure>& figures() const { return figures_; }

 private:
  bool wanted(const char* figure) const { return options_.only.empty() || options_.only == figure; }
  void add(Figure figure);
  void count(const TrainingRun& run) {
    trained_ = true;
    copied_by_caller_ += run.cache().stats().bytes_copied_by_caller;
  }

  void stalls();
  void small_budget();
  void large_model();
  void calls();
  void gradients();

  Options options_;
  Machine machine_;
  std::vector<Figure> figures_;
  uint64_t copied_by_caller_ = 0;
  bool trained_ = false;
};

void Bench::add(Figure figure) {
  if (figures_.empty()) {
    fmt::print("{:<52} {:>9} {:>10} {:<6}\n", "figure", "goal", "here", "");
  }
  fmt::print("{:<52} {:>9} {:>10} {:<6}  {}\n", figure.name,
             fmt::format("{}{:g} {}", figure.at_least ? "≥" : "≤", figure.goal, figure.unit),
             fmt::format("{:.4g} {}", figure.value, figure.unit), figure.met() ? "met" : "MISSED",
             figure.note);
  std::cout << std::flush;
  figures_.push_back(std::move(figure));
}

// Four workers and a server: all layers in tables of their own, and in a single one.
void Bench::stalls() {
  const OwnServer server(beside_this_program("phub"), options_.transport, "");
  constexpr double kMachines = 4;  // whose processors' work those of this one do
  const Net net = part_of(adam_like(), options_.parts * kMachines);
  const Machine machine = slower(machine_, kMachines);
  std::vector<double> layers, single;
  for (uint32_t turn = 0; turn < options_.turns; ++turn) {
    for (const bool one_table : {false, true}) {
      const Workers workers{.server = server.address(),
                            .transport = options_.transport,
                            .job = fmt::format("geeps-{}-{}", turn, one_table),
                            .iterations = options_.iterations};
      const WorkersResult result = train(workers, net, machine, {.one_table = one_table});
      (one_table ? single : layers).push_back(100 * result.stalled);
      copied_by_caller_ += result.bytes_copied_by_caller;
    }
  }
  trained_ = true;
  add({"stall, 4 workers, a table per layer", "%", 8, false, median(layers),
       fmt::format("{:.1f}% with all layers in one table", median(single))});
}

// GeePS's figure 12: a part of the memory that holds everything.
void Bench::small_budget() {
  const Training training(part_of(adam_like(), options_.parts), machine_);
  const auto everything = training.everything_bytes();
  TrainingRun fits(training, machine_, everything);
  TrainingRun small(training, machine_, everything * 35 / 100);
  TrainingRun* const runs[] = {&fits, &small};
  const auto seconds = alternate(runs, options_.iterations, options_.turns);
  const geeps::Placement& placement = small.cache().placement();
  add({"throughput with 35% of the budget that fits all", "%", 73, true,
       100 * seconds[0] / seconds[1],
       fmt::format("{:.0f} of {:.0f} MB; {:.0f} MB pinned, {:.0f} MB moved per iteration; busy "
                   "{:.1f}%, with all {:.1f}%",
                   everything * 0.35 / 1e6, everything / 1e6, placement.pinned_bytes / 1e6,
                   placement.moved_bytes / 1e6, 100 * small.busy(seconds[1]),
                   100 * fits.busy(seconds[0]))});
  count(fits);
  count(small);
}

// GeePS's figure 13: connections per second of a model that is many times larger than the device.
void Bench::large_model() {
  const double parts = options_.parts * 8;
  const uint32_t layers = options_.tiny ? 24 : 48;
  const Training few(part_of(very_large(layers / 2), parts), machine_);
  const Training many(part_of(very_large(layers), parts), machine_);
  uint64_t data = 0;
  for (const geeps::TableSpec& table : many.tables()) {
    data += table.keys.size() * table.row_floats * sizeof(float) * (table.local ? 1 : 2);
  }
  const uint64_t budget = data / (options_.tiny ? 10 : 20);
  TrainingRun fits(few, machine_, few.everything_bytes());
  TrainingRun large(many, machine_, budget);
  TrainingRun* const runs[] = {&fits, &large};
  const auto seconds = alternate(runs, options_.tiny ? 1 : 2, options_.turns);
  const double ratio = (many.weights() / seconds[1]) / (few.weights() / seconds[0]);
  add({fmt::format("throughput per connection, model {}× the budget", options_.tiny ? 10 : 20), "%",
       85, true, 100 * ratio,
       fmt::format("{} layers, {:.0f} MB of data on {:.0f} MB; busy {:.1f}%, {} layers that fit "
                   "{:.1f}%",
                   layers, data / 1e6, budget / 1e6, 100 * large.busy(seconds[1]), layers / 2,
                   100 * fits.busy(seconds[0]))});
  count(fits);
  count(large);
}

std::chrono::duration<double> own_processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// What the application's thread pays for a call where everything fits and layers are empty.
void Bench::calls() {
  Net net{.name = "tiny", .inputs = 1, .layers = {}, .images = 1};
  for (int l = 0; l < 8; ++l) {
    net.layers.push_back({.name = std::to_string(l), .weights = 1, .outputs = 1});
  }
  const Machine empty{.copy_bytes_per_second = 0, .copy_latency = {}};
  TrainingRun run(Training(net, empty), empty, 1 << 22);
  const uint32_t iterations = options_.tiny ? 20 : 400;
  std::vector<double> processor_us, us;
  for (uint32_t turn = 0; turn < options_.turns; ++turn) {
    const uint64_t calls = run.cache().stats().calls;
    const auto begin = own_processor_time();
    const double seconds = run.seconds_per_iteration(iterations) * iterations;
    const auto took = own_processor_time() - begin;
    const auto made = static_cast<double>(run.cache().stats().calls - calls);
    processor_us.push_back(took.count() * 1e6 / made);
    us.push_back(seconds * 1e6 / made);
  }
  add({"a call, everything fits, empty layers", "µs", 2, false, median(processor_us),
       fmt::format("processor time of the application's thread; {:.2f} µs with what it waits for",
                   median(us))});
  count(run);
}

// The images of an iteration for which the device has memory, if gradients stay there or go out in
// update buffers.
void Bench::gradients() {
  const Net net = alexnet();
  const Training kept(net, machine_, {.keep_gradients = true});
  const uint64_t memory = kept.least_unmoved_bytes();
  double images = net.images, too_many = 2 * net.images;
  while (too_many - images > 1) {
    Net more = net;
    more.images = std::floor((images + too_many) / 2);
    const bool fit = Training(more, machine_).least_unmoved_bytes() <= memory;
    (fit ? images : too_many) = more.images;
  }
  const Net part = part_of(net, options_.parts);
  uint64_t peak[2];
  for (const bool keep : {false, true}) {
    const Training training(part, machine_, {.keep_gradients = keep});
    TrainingRun run(training, machine_, training.least_unmoved_bytes());
    peak[keep ? 1 : 0] = run.device().peak_bytes;
    count(run);
  }
  add({"more images where gradients do not stay on the device", "%", 10, true,
       100 * (images / net.images - 1),
       fmt::format(
           "AlexNet, {:.0f} instead of {:.0f} in {:.0f} MB; peak {:.0f} MB instead of {:.0f}",
           images, net.images, memory / 1e6, peak[0] * options_.parts / 1e6,
           peak[1] * options_.parts / 1e6)});
}

nlohmann::json json_of(const Options& options, const std::vector<Figure>& figures) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Figure& figure : figures) {
    rows.push_back({{"figure", figure.name},
                    {"unit", figure.unit},
                    {"goal", figure.goal},
                    {"at_least", figure.at_least},
                    {"value", figure.value},
                    {"met", figure.met()},
                    {"note", figure.note}});
  }
  const Machine machine = machine_of(options);
  return {{"rows", rows},
          {"turns", options.turns},
          {"iterations", options.iterations},
          {"parts", options.parts},
          {"slower", options.slower},
          {"transport", options.transport},
          {"machine",
           {{"flops_per_second", machine.flops_per_second},
            {"memory_bytes_per_second", machine.memory_bytes_per_second},
            {"copy_bytes_per_second", machine.copy_bytes_per_second},
            {"copy_latency_ns", machine.copy_latency.count()}}}};
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("GeePS's figures, on devices of host memory and timed computation");
  app.add_option("--tflops", options.tflops, "of the device")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--slower", options.slower,
                 "everything takes so many times as long as on the stated device")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--parts", options.parts, "a part of the nets' images and weights")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--turns", options.turns, "alternated runs, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--iterations", options.iterations, "of a run")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--transport", options.transport, "of the workers")
      ->check(CLI::IsMember({"shm", "tcp"}))
      ->capture_default_str();
  app.add_option("--only", options.only, "one of the figures")
      ->check(CLI::IsMember({"stall", "budget", "large", "call", "gradients"}));
  app.add_option("--json", options.json, "a file for the figures");
  app.add_flag("--tiny", options.tiny, "a smoke test: figures mean nothing");
  CLI11_PARSE(app, argc, argv);
  if (options.tiny) {
    options.parts = 400;
    options.slower = 1;
    options.turns = options.iterations = 1;
  }
  Bench bench(options);
  bench.measure();
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << json_of(options, bench.figures()).dump(2) << "\n";
    if (!file.flush()) fail(ErrorCode::kInvalid, "--json: cannot write '{}'", options.json);
  }
  return 0;
}

}  // namespace
}  // namespace phub::geeps_bench

int main(int argc, char** argv) {
  try {
    return phub::geeps_bench::run(argc, argv);
  } catch (const phub::Error& error) {
    fmt::print(stderr, "geeps_bench: {}\n", error.what());
    return 1;
  }
}

// The costs and savings of a cache in device memory: GeePS's figures (000, section 5), each as a
// ratio of times of this run, beside its goal.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/geeps_calls.h"
#include "bench/geeps_devices.h"
#include "bench/geeps_net.h"
#include "bench/geeps_pictures.h"
#include "bench/geeps_run.h"
#include "bench/geeps_workers.h"
#include "worker/examples/files.h"
#include "worker/examples/processes.h"
#include "worker/examples/program.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps_bench {
namespace {

struct Options {
  double tflops = 10;  // of the device
  double slower = 8;   // everything, than the stated device
  double parts = 8;    // of the net that is trained
  double link_gbps = 12;
  uint32_t turns = 5;  // alternated runs, of which the median counts
  uint32_t iterations = 5;
  std::string transport = "shm";
  int cuda = -1;     // the number of a GPU; negative: devices of host memory
  std::string only;  // a figure; empty: all
  std::string json;
  bool tiny = false;
};

double link_of(const Options& options) { return options.link_gbps * 1e9 / 8; }

Machine stated(const Options& options) {
  return {.flops_per_second = options.tflops * 1e12,
          .link_bytes_per_second = link_of(options),
          .cuda = options.cuda};
}

Machine machine_of(const Options& options) { return slower(stated(options), options.slower); }

Pictures pictures_of(const Options& options) {
  return {.machine = stated(options),
          .slower = options.slower,
          .parts = options.parts,
          .turns = options.turns,
          .iterations = options.iterations,
          .transport = options.transport,
          .tiny = options.tiny};
}

struct Figure {
  std::string name;
  std::string unit;
  double goal = 0;
  bool at_least = true;  // false: at most
  double value = 0;
  std::string note;

  bool met() const { return at_least ? value >= goal : value <= goal; }
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), machine_(machine_of(options)) {}

  // Those with processes are the first: they fork.
  void measure() {
    if (wanted("stall")) stalls();
    if (wanted("forms")) append(forms(pictures_of(options_)));
    if (wanted("scaling")) scaling();
    if (wanted("budget")) small_budget();
    if (wanted("large")) large_model();
    if (wanted("call")) calls();
    if (wanted("gradients")) gradients();
    if (wanted("placement")) placements();
    if (trained_) {
      add({"bytes copied by the application's thread", "B", 0, false,
           static_cast<double>(copied_by_caller_), "in all iterations of the runs above"});
    }
    if (wanted("batches")) append(batches(pictures_of(options_)));
    if (wanted("sizes")) append(sizes(pictures_of(options_)));
    if (wanted("minibatches")) append(minibatches(pictures_of(options_)));
    if (wanted("largest")) append(largest(pictures_of(options_)));
    if (wanted("frames")) append(frames(pictures_of(options_)));
    if (wanted("partitions")) append(partitions(pictures_of(options_)));
  }

  const std::vector<Figure>& figures() const { return figures_; }
  const Points& points() const { return points_; }

 private:
  bool wanted(const char* figure) const { return options_.only.empty() || options_.only == figure; }
  void add(Figure figure);
  void count(const TrainingRun& run) {
    trained_ = true;
    copied_by_caller_ += run.bytes_copied_by_caller();
  }

  void append(const Points& points) { points_.insert(points_.end(), points.begin(), points.end()); }

  void stalls();
  void stalls(const std::string& name, const Machine& machine);
  void scaling();
  void small_budget();
  void large_model();
  void calls();
  void gradients();
  void placements();

  Options options_;
  Machine machine_;
  std::vector<Figure> figures_;
  Points points_;
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

// On the stated device, and on that of the paper, each behind the paper's link.
void Bench::stalls() {
  stalls("stall, 4 workers, a table per layer", machine_);
  Machine paper = geeps_machine();
  paper.link_bytes_per_second = link_of(options_);
  paper.cuda = options_.cuda;
  stalls("the same on GPUs of GeePS's machines", slower(paper, options_.slower));
}

// Four workers and a server: all layers in tables of their own, in pieces and whole, and in a
// single one.
void Bench::stalls(const std::string& name, const Machine& stated) {
  const OwnServer server(beside_this_program("phub"), options_.transport, {});
  constexpr double kMachines = 4;  // this machine's processors work for so many
  const Net net = part_of(adam_like(), options_.parts * kMachines);
  const Machine machine = slower(stated, kMachines);
  const std::chrono::duration<double> computing = Training(net, machine).compute_time();
  const double sending = 4 * net.weights() / machine.link_bytes_per_second;
  const Style styles[] = {{}, {.whole = true}, {.one_table = true, .whole = true}};
  std::vector<double> stalled[std::size(styles)];
  for (uint32_t turn = 0; turn < options_.turns; ++turn) {
    for (size_t i = 0; i < std::size(styles); ++i) {
      const Workers workers{.server = server.address(),
                            .transport = options_.transport,
                            .job = fmt::format("geeps-{}-{}", turn, i),
                            .iterations = options_.iterations};
      const WorkersResult result = train(workers, net, machine, styles[i]);
      stalled[i].push_back(100 * result.stalled);
      copied_by_caller_ += result.bytes_copied_by_caller;
    }
  }
  trained_ = true;
  add({name, "%", 8, false, median(stalled[0]),
       fmt::format(
           "{:.1f}% with tables that are not in pieces, {:.1f}% with all layers in one such "
           "table; a direction of the link needs {:.0f}% of the computing's time",
           median(stalled[1]), median(stalled[2]), 100 * sending / computing.count())});
}

// Weak scaling on the devices of one machine: figure 4 and table 3 of 003. Compared with a device
// alone that never waits. The optimizer's time, 5.1 ms there, is the CPUs' here.
void Bench::scaling() {
  constexpr double kMachines = 4;  // this machine's processors work for so many devices
  const Net net = part_of(alexnet(), options_.parts * kMachines);
  Machine machine = p100_machine();
  machine.cuda = options_.cuda;
  machine = slower(machine, options_.slower * kMachines);
  const double to_ms = 1e3 * options_.parts / options_.slower;
  const double alone_ms = 1e-9 * to_ms * Training(net, machine).compute_time().count();
  const struct {
    uint32_t devices;
    Style style;
  } runs[] = {{1, {}}, {2, {}}, {4, {}}, {4, {.one_table = true, .whole = true}}};
  std::vector<double> ms[std::size(runs)];
  for (uint32_t turn = 0; turn < options_.turns; ++turn) {
    for (size_t i = 0; i < std::size(runs); ++i) {
      const DevicesResult result =
          train({.devices = runs[i].devices, .iterations = options_.iterations}, net, machine,
                runs[i].style);
      ms[i].push_back(to_ms * result.seconds);
      copied_by_caller_ += result.bytes_copied_by_caller;
    }
  }
  trained_ = true;
  const double one = median(ms[0]), two = median(ms[1]), four = median(ms[2]);
  add({"weak scaling, AlexNet on 4 devices of a process", "%", 90, true, 100 * alone_ms / four,
       fmt::format("of a device that never waits: {:.1f} ms. With one {:.1f}%, with two {:.1f}%",
                   alone_ms, 100 * alone_ms / one, 100 * alone_ms / two)});
  add({"an iteration on 4 devices", "ms", 167.1, false, four,
       fmt::format("with all layers in one table, exchanged after backward, {:.1f} ms (003: 202.7)",
                   median(ms[3]))});
}

// GeePS's figure 12: a fraction of the memory that holds everything. It is compared with a device
// that never waits. A device that holds everything would be a worse reference: it makes most copies
// of pinned rows, which take longer in host memory than in a GPU's.
void Bench::small_budget() {
  const Training training(part_of(adam_like(), options_.parts), machine_);
  const auto everything = training.everything_bytes();
  TrainingRun fits(training, machine_, everything);
  TrainingRun small(training, machine_, everything * 35 / 100);
  TrainingRun* const runs[] = {&fits, &small};
  const auto seconds = alternate(runs, options_.iterations, options_.turns);
  const geeps::Placement& placement = small.cache().placement();
  add({"throughput with 35% of the budget that fits all", "%", 73, true,
       100 * small.busy(seconds[1]),
       fmt::format("of a device that never waits; with all {:.1f}%. {:.0f} of {:.0f} MB; {:.0f} MB "
                   "pinned, {:.0f} MB moved per iteration",
                   100 * fits.busy(seconds[0]), everything * 0.35 / 1e6, everything / 1e6,
                   placement.pinned_bytes / 1e6, placement.moved_bytes / 1e6)});
  count(fits);
  count(small);
}

// GeePS's figure 13: a model that is many times larger than the device, against the same on a
// device that holds it all.
void Bench::large_model() {
  const double parts = options_.parts * 8;
  const uint32_t layers = options_.tiny ? 24 : 48;
  const Training training(part_of(very_large(layers), parts), machine_);
  const uint64_t data = data_bytes(training.tables());
  const uint64_t budget = data / (options_.tiny ? 10 : 20);
  TrainingRun fits(training, machine_, training.everything_bytes());
  TrainingRun large(training, machine_, budget);
  TrainingRun* const runs[] = {&fits, &large};
  const auto seconds = alternate(runs, options_.tiny ? 1 : 2, options_.turns);
  add({fmt::format("throughput per connection, model {}× the budget", options_.tiny ? 10 : 20), "%",
       85, true, 100 * large.busy(seconds[1]),
       fmt::format(
           "of a device that never waits; with all {:.1f}%. {} layers, {:.0f} MB of data on "
           "{:.0f} MB",
           100 * fits.busy(seconds[0]), layers, data / 1e6, budget / 1e6)});
  count(fits);
  count(large);
}

// The cost of a call for the application's thread, if everything fits and layers are empty.
void Bench::calls() {
  Net net{.name = "tiny", .inputs = 1, .layers = {}, .images = 1};
  for (int l = 0; l < 8; ++l) {
    net.layers.push_back({.name = std::to_string(l), .weights = 1, .outputs = 1});
  }
  const Machine empty{.copy_bytes_per_second = 0, .copy_latency = {}, .cuda = options_.cuda};
  TrainingRun run(Training(net, empty), empty, 1 << 22);
  const uint32_t iterations = options_.tiny ? 20 : 400;
  std::vector<double> processor_us, us;
  for (uint32_t turn = 0; turn < options_.turns; ++turn) {
    const uint64_t calls = run.cache().stats().calls;
    const double begin = own_processor_us();
    const double seconds = run.seconds_per_iteration(iterations) * iterations;
    const double took = own_processor_us() - begin;
    const auto made = static_cast<double>(run.cache().stats().calls - calls);
    processor_us.push_back(took / made);
    us.push_back(seconds * 1e6 / made);
  }
  add({"a call, everything fits, empty layers", "µs", 2, false, median(processor_us),
       fmt::format("processor time of the application's thread; {:.2f} µs with its waits",
                   median(us))});
  count(run);
  const CallDevices devices{
      .make = [&] { return make_device(empty, CallDevices::kBudget, 1); },
      .open =
          [&](phub_device** device) {
            return options_.cuda < 0
                       ? phub_device_open_host(CallDevices::kBudget, 0, 0, device)
                       : phub_device_open_cuda(options_.cuda, CallDevices::kBudget, device);
          }};
  std::vector<double> thread, stream, in_c, round;
  for (uint32_t turn = 0; turn < options_.turns; ++turn) {
    const CallTimes times = time_calls(iterations, devices);
    thread.push_back(times.in_thread);
    stream.push_back(times.in_stream);
    in_c.push_back(times.in_stream_c);
    round.push_back(times.round_stream_c);
  }
  add({"a read or its release, in a stream", "µs", 2, false, median(stream),
       fmt::format("{:.3f} µs where the caller computes in its thread", median(thread))});
  add({"the same in C", "µs", 2, false, median(in_c),
       fmt::format("{:.3f} µs with updates and clocks", median(round))});
}

// How many images of an iteration fit the device's memory: with weights and gradients that stay
// there until the end, and with gradients that leave (and weights that may come) through buffers.
void Bench::gradients() {
  const Net net = alexnet();
  const Style kept{.keep_gradients = true};
  const uint64_t memory = Training(net, machine_, kept).least_unmoved_bytes();
  double images = net.images / 2, too_many = 2 * net.images;
  while (too_many - images > 1) {
    Net more = net;
    more.images = std::floor((images + too_many) / 2);
    (Training(more, machine_).keeps_local_data(memory) ? images : too_many) = more.images;
  }
  Net part = part_of(net, options_.parts);
  const uint64_t part_memory = Training(part, machine_, kept).least_unmoved_bytes();
  part.images *= images / net.images;
  TrainingRun run(Training(part, machine_), machine_, part_memory);
  TrainingRun* const runs[] = {&run};
  const double seconds = alternate(runs, options_.iterations, options_.turns)[0];
  add({"more images where gradients do not stay on the device", "%", 10, true,
       100 * (images / net.images - 1),
       fmt::format(
           "AlexNet, {:.0f} instead of {:.0f} in {:.0f} MB, where the device computes {:.1f}% "
           "of the time; {:.0f} MB of weights and gradients moved per iteration",
           images, net.images, memory / 1e6, 100 * run.busy(seconds),
           static_cast<double>(run.cache().placement().moved_bytes) * options_.parts / 1e6)});
  count(run);
}

// The bytes that an iteration moves when rows are pinned in the order of the paper's Algorithm 2,
// and in that of the bytes saved: plans alone, nothing runs.
void Bench::placements() {
  const Training training(part_of(adam_like(), options_.parts), machine_);
  const geeps::Demand demand = training.demand();
  const uint64_t everything = training.everything_bytes();
  for (const uint64_t percent : {25, 35, 50, 65, 80}) {
    const uint64_t budget = everything * percent / 100;
    const geeps::Placement papers =
        geeps::place(demand, {.budget_bytes = budget, .peak_first = true});
    const geeps::Placement own = geeps::place(demand, {.budget_bytes = budget});
    const auto listing = static_cast<double>(papers.moved_bytes);
    const auto ours = static_cast<double>(own.moved_bytes);
    add({fmt::format("fewer bytes moved than by Algorithm 2, {}% of the budget", percent), "%", 0,
         true, listing == 0 ? 0 : 100 * (1 - ours / listing),
         fmt::format("{:.1f} instead of {:.1f} MB per iteration, ahead by {} instead of {} phases",
                     ours / 1e6, listing / 1e6, own.lead, papers.lead)});
  }
}

nlohmann::json json_of(const Options& options, const Bench& bench) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Figure& figure : bench.figures()) {
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
          {"points", bench.points()},
          {"turns", options.turns},
          {"iterations", options.iterations},
          {"parts", options.parts},
          {"slower", options.slower},
          {"transport", options.transport},
          {"device", options.cuda < 0 ? "host" : fmt::format("cuda:{}", options.cuda)},
          {"machine",
           {{"flops_per_second", machine.flops_per_second},
            {"memory_bytes_per_second", machine.memory_bytes_per_second},
            {"copy_bytes_per_second", machine.copy_bytes_per_second},
            {"copy_latency_ns", machine.copy_latency.count()},
            {"link_bytes_per_second", machine.link_bytes_per_second}}}};
}

void run(int argc, char** argv) {
  Options options;
  CLI::App app("GeePS's figures, on devices of host memory or a GPU, with timed computation");
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
  app.add_option("--link-gbps", options.link_gbps,
                 "of each worker's link to the box, where there is one")
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
  app.add_option("--cuda", options.cuda,
                 "the number of a GPU, whose memory and copies are used instead of the host's")
      ->check(CLI::Range(0, 1023));
  app.add_option("--only", options.only, "one of the figures")
      ->check(CLI::IsMember({"stall", "forms", "scaling", "budget", "large", "call", "gradients",
                             "placement", "batches", "sizes", "minibatches", "largest", "frames",
                             "partitions"}));
  app.add_option("--json", options.json, "a file for the figures");
  app.add_flag("--tiny", options.tiny, "a smoke test: figures mean nothing");
  examples::parse_or_exit(app, argc, argv);
  if (options.tiny) {
    options.parts = 400;
    options.slower = 1;
    options.turns = options.iterations = 1;
  }
  examples::check_can_write(options.json);
  Bench bench(options);
  bench.measure();
  examples::write_file(options.json, json_of(options, bench).dump(2) + '\n');
}

}  // namespace
}  // namespace phub::geeps_bench

int main(int argc, char** argv) {
  return phub::examples::status_of("geeps_bench", [&] { phub::geeps_bench::run(argc, argv); });
}

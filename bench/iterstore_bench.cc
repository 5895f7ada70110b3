// What the specialisations of a store (worker/iterstore) bring: PageRank with all of them, without
// each one that can be switched off, and with nothing recorded; and what learning the accesses
// costs, and brings, from a virtual and from the first real iteration (002, section 3.3, figure 5).
// With --compute-ms: what a consistency brings where the link takes as long as the computing.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <future>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/zerocompute/measures.h"
#include "phub/text_table.h"
#include "transport/error.h"
#include "worker/examples/files.h"
#include "worker/examples/page_rank.h"
#include "worker/examples/processes.h"
#include "worker/examples/program.h"

namespace phub::iterstore_bench {
namespace {

using examples::Graph;
using examples::PageRank;
using examples::RankedLinks;
using iterstore::Store;
using iterstore::StoreOptions;
using iterstore::StoreThread;
using Clock = std::chrono::steady_clock;

struct Options {
  uint32_t world = 2;
  uint32_t threads = 1;
  uint32_t iterations = 10;
  uint32_t turns = 3;
  uint32_t pages = 50'000;
  uint32_t links = 300'000;
  std::string packages;  // empty: a random graph
  std::string transport = "shm";
  std::string budget;     // of a rank; empty: none
  double compute_ms = 0;  // of an iteration; above 0: consistencies are compared
  uint32_t slices = 1;    // of the rows and of computing
  std::string json;
  bool tiny = false;
};

enum class Gather : uint8_t { kNever, kVirtual, kReal };

struct Variant {
  std::string name;
  Gather gather = Gather::kVirtual;
  bool StoreOptions::*off = nullptr;
  bool none = false;   // of the specialisations
  bool other = false;  // what is recorded are the links of another thread
  double again = 0;    // gather_again
  std::string consistency = "bsp";
  uint32_t slack = 0;
  bool early = false;  // push_early
};

const std::vector<Variant> kVariants = {
    {.name = "none", .gather = Gather::kNever, .none = true},
    {.name = "all, from the first real iteration", .gather = Gather::kReal},
    {.name = "all, from a virtual iteration"},
    {.name = "without placement", .off = &StoreOptions::placement},
    {.name = "without NUMA", .off = &StoreOptions::numa},
    {.name = "without static index", .off = &StoreOptions::static_index},
    {.name = "all, another pattern was recorded", .other = true},
    {.name = "all, another pattern was recorded, gather_again", .other = true, .again = 0.5},
};
const std::vector<Variant> kConsistencies = {
    {.name = "bsp"},
    {.name = "bsp, push_early", .early = true},
    {.name = "ssp, slack 1", .consistency = "ssp", .slack = 1},
    {.name = "ssp, slack 3", .consistency = "ssp", .slack = 3},
    {.name = "async", .consistency = "async"},
};
constexpr uint32_t kNotTimed = 3;  // a pattern that is new is recorded and placed within these

// Seconds, of the slowest thread.
struct Times {
  double preprocessing = 0, initialization = 0;
  double first = 0, later = 0;  // later: of one iteration
  double between = 0;           // of the slowest of those between them
  double chunks = 0;            // to and from rank 0, in one of these
  double placed = 0;            // times that rows were placed
  double norm = 0;              // of the outcome, which is that of all
};

// A few pages have most of the links, as everywhere.
Graph random_graph(uint32_t pages, uint32_t links) {
  std::mt19937_64 random(1);
  Graph graph;
  for (uint32_t page = 0; page < pages; ++page) graph.names.push_back(std::to_string(page));
  const auto any = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  for (uint32_t link = 0; link < links; ++link) {
    const auto from = static_cast<uint32_t>(any() * pages);
    const auto to = static_cast<uint32_t>(std::pow(any(), 4) * pages);
    if (from != to) graph.links.push_back({from, to});
  }
  std::ranges::sort(graph.links, {}, &Graph::Link::from);
  return graph;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Run {
 public:
  Run(const Options& options, const Graph& graph, const Variant& variant, std::string server,
      std::string job)
      : options_(options),
        graph_(graph),
        page_rank_(graph),
        variant_(variant),
        server_(std::move(server)),
        job_(std::move(job)) {}

  Times measure() {
    std::vector<std::future<Times>> ranks;
    for (uint32_t rank = 0; rank < options_.world; ++rank) {
      ranks.push_back(std::async(std::launch::async, [this, rank] { return run_rank(rank); }));
    }
    Times slowest;
    for (auto& rank : ranks) slowest = slower(slowest, rank.get());
    return slowest;
  }

 private:
  static Times slower(const Times& a, const Times& b) {
    return {.preprocessing = std::max(a.preprocessing, b.preprocessing),
            .initialization = std::max(a.initialization, b.initialization),
            .first = std::max(a.first, b.first),
            .later = std::max(a.later, b.later),
            .between = std::max(a.between, b.between),
            .chunks = std::max(a.chunks, b.chunks),
            .placed = std::max(a.placed, b.placed),
            .norm = std::max(a.norm, b.norm)};
  }

  Times run_rank(uint32_t rank) {
    StoreOptions store_options{.tables = {PageRank::table(graph_)}, .threads = options_.threads};
    WorkerOptions& worker = store_options.worker;
    worker.server = server_;
    worker.transport = options_.transport;
    worker.nic_budget = options_.budget;
    worker.rank = static_cast<int32_t>(rank);
    worker.spec.name = job_;
    worker.spec.world_size = options_.world;
    worker.spec.consistency = variant_.consistency;
    worker.spec.slack = variant_.slack;
    worker.spec.lease_ms = 10'000;  // on a busy machine
    worker.local_world_size = options_.world;
    if (variant_.off != nullptr) store_options.*variant_.off = false;
    store_options.gather_again = variant_.again;
    store_options.push_early = variant_.early;
    if (variant_.none) {
      store_options.placement = store_options.numa = store_options.static_index = false;
    }
    Store store(store_options);
    std::vector<std::future<Times>> threads;
    for (uint32_t t = 0; t < options_.threads; ++t) {
      threads.push_back(std::async(std::launch::async, [this, &store, rank, t] {
        return options_.compute_ms > 0 ? run_computing(store, t) : run_thread(store, rank, t);
      }));
    }
    Times slowest;
    for (auto& thread : threads) slowest = slower(slowest, thread.get());
    slowest.placed = static_cast<double>(store.stats().placed);
    const WorkerStats stats = store.stats().worker;  // since the accesses are known
    const uint32_t clocks =
        options_.iterations + kNotTimed + (variant_.gather == Gather::kReal ? 0 : 2);
    slowest.chunks = static_cast<double>(stats.chunks_pushed + stats.chunks_received) / clocks;
    for (const double of_page : page_rank_.ranks(store.table(0))) slowest.norm += of_page * of_page;
    return slowest;
  }

  Times run_thread(Store& store, uint32_t rank, uint32_t thread) {
    const uint32_t threads = options_.world * options_.threads;
    const uint32_t part = rank * options_.threads + thread;
    RankedLinks links = page_rank_.links(part, threads);
    StoreThread mine(store, thread);
    Times times;
    auto begin = Clock::now();
    if (variant_.gather == Gather::kVirtual) {
      RankedLinks others = page_rank_.links((part + 1) % threads, threads);
      mine.begin_virtual();
      page_rank_.iterate(mine, variant_.other ? others : links);
      mine.finish();
      times.preprocessing = seconds_since(begin);
    }
    begin = Clock::now();
    mine.clock();  // of ranks that begin with what the table begins with
    times.initialization = seconds_since(begin);
    begin = Clock::now();
    if (variant_.gather == Gather::kReal) mine.begin_gathering();
    page_rank_.iterate(mine, links);
    times.first = seconds_since(begin);
    if (variant_.gather == Gather::kReal) {
      begin = Clock::now();
      mine.finish();
      times.preprocessing = seconds_since(begin);
    }
    for (uint32_t i = 0; i < kNotTimed; ++i) {  // memory that is touched for the first time, too
      begin = Clock::now();
      page_rank_.iterate(mine, links);
      times.between = std::max(times.between, seconds_since(begin));
    }
    begin = Clock::now();
    for (uint32_t i = 0; i < options_.iterations; ++i) page_rank_.iterate(mine, links);
    times.later = seconds_since(begin) / options_.iterations;
    return times;
  }

  // As a training has it: an iteration reads all rows, computes, and updates all of them; or so
  // slice by slice. (Whole numbers, so that the outcome is the same however old the rows are.)
  Times run_computing(Store& store, uint32_t thread) {
    std::vector<uint64_t> rows(graph_.names.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<double> values(rows.size());
    const std::vector<double> by(rows.size(), 1);
    StoreThread mine(store, thread);
    const auto iterate = [&](double compute_ms) {
      for (size_t slice = 0; slice < options_.slices; ++slice) {
        const size_t first = rows.size() * slice / options_.slices;
        const size_t size = rows.size() * (slice + 1) / options_.slices - first;
        const auto of_slice = std::span<const uint64_t>(rows).subspan(first, size);
        mine.read_batch(0, of_slice, std::span(values).first(size));
        const double ms = compute_ms / options_.slices;
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
        mine.update_batch(0, of_slice, std::span(by).first(size));
      }
      mine.clock();
    };
    mine.begin_virtual();
    iterate(0);
    mine.finish();
    for (uint32_t i = 0; i < kNotTimed; ++i) iterate(0);
    const auto begin = Clock::now();
    for (uint32_t i = 0; i < options_.iterations; ++i) iterate(options_.compute_ms);
    return {.later = seconds_since(begin) / options_.iterations};
  }

  const Options& options_;
  const Graph& graph_;
  const PageRank page_rank_;
  const Variant& variant_;
  const std::string server_, job_;
};

Times median_of(const std::vector<Times>& all) {
  Times median_times;
  for (double Times::*field :
       {&Times::preprocessing, &Times::initialization, &Times::first, &Times::later,
        &Times::between, &Times::placed, &Times::chunks, &Times::norm}) {
    std::vector<double> values;
    for (const Times& times : all) values.push_back(times.*field);
    median_times.*field = median(values);
  }
  return median_times;
}

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("What each specialisation of a store brings, by PageRank.");
  app.add_option("--world", options.world, "Ranks")->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads, "Threads of each")->check(CLI::PositiveNumber);
  app.add_option("--iterations", options.iterations, "Of a run, that are timed")
      ->check(CLI::PositiveNumber);
  app.add_option("--turns", options.turns, "Runs of each kind, in turn; the median counts")
      ->check(CLI::PositiveNumber);
  app.add_option("--pages", options.pages, "Of a random graph")->check(CLI::PositiveNumber);
  app.add_option("--links", options.links, "Of a random graph")->check(CLI::PositiveNumber);
  app.add_option("--packages", options.packages,
                 "Debian's packages instead: what `apt-cache dumpavail` prints");
  app.add_option("--transport", options.transport)->check(CLI::IsMember({"shm", "tcp"}));
  app.add_option("--compute-ms", options.compute_ms,
                 "An iteration computes for so long (it sleeps), between reading all rows and "
                 "updating all; what differs is the consistency")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--slices", options.slices,
                 "With --compute-ms: it reads, computes and updates so many slices of the rows one "
                 "after another")
      ->check(CLI::PositiveNumber);
  app.add_option("--budget", options.budget,
                 "What each rank may send, over tcp: 250mbit, or bytes per second");
  app.add_option("--json", options.json, "Write the results to this file");
  app.add_flag("--tiny", options.tiny, "A small graph, once: whether it works");
  examples::parse_or_exit(app, argc, argv);
  if (options.tiny) {
    options.pages = 500;
    options.links = 3000;
    options.iterations = 2;
    options.turns = 1;
  }
  return options;
}

void write_json(const Options& options, const std::vector<Variant>& variants,
                const std::vector<Times>& medians) {
  nlohmann::json rows;
  for (size_t v = 0; v < variants.size(); ++v) {
    rows.push_back({{"name", variants[v].name},
                    {"preprocessing_s", medians[v].preprocessing},
                    {"initialization_s", medians[v].initialization},
                    {"first_s", medians[v].first},
                    {"between_s", medians[v].between},
                    {"later_s", medians[v].later},
                    {"placed", medians[v].placed},
                    {"chunks", medians[v].chunks}});
  }
  const nlohmann::json report = {
      {"world", options.world},         {"threads", options.threads},
      {"transport", options.transport}, {"compute_ms", options.compute_ms},
      {"budget", options.budget},       {"rows", rows}};
  examples::write_file(options.json, report.dump(1) + '\n');
}

void print_specialisations(const std::vector<Times>& medians) {
  TextTable table({"preprocessing ms", "initialization ms", "first ms", "between ms", "later ms",
                   "of none", "chunks", "with"},
                  true);
  for (size_t v = 0; v < kVariants.size(); ++v) {
    const Times& of = medians[v];
    table.add({fmt::format("{:.1f}", 1e3 * of.preprocessing),
               fmt::format("{:.1f}", 1e3 * of.initialization),
               fmt::format("{:.1f}", 1e3 * of.first), fmt::format("{:.1f}", 1e3 * of.between),
               fmt::format("{:.2f}", 1e3 * of.later),
               fmt::format("{:.0f}%", 100 * of.later / medians[0].later),
               fmt::format("{:.0f}", of.chunks), kVariants[v].name});
  }
  fmt::print("{}", table.text());
}

void print_consistencies(const std::vector<Times>& medians) {
  TextTable table({"iteration ms", "iterations/s", "of bsp", "with"}, true);
  for (size_t v = 0; v < kConsistencies.size(); ++v) {
    const double later = medians[v].later;
    table.add({fmt::format("{:.1f}", 1e3 * later), fmt::format("{:.1f}", 1 / later),
               fmt::format("{:.2f}", medians[0].later / later), kConsistencies[v].name});
  }
  fmt::print("{}", table.text());
}

void run(const Options& options) {
  const bool computes = options.compute_ms > 0;
  const std::vector<Variant>& variants = computes ? kConsistencies : kVariants;
  examples::check_can_write(options.json);
  const OwnServer server(beside_this_program("phub"), options.transport, {});
  const Graph graph = options.packages.empty() ? random_graph(options.pages, options.links)
                                               : examples::read_packages(options.packages);
  std::vector<std::vector<Times>> times(variants.size());
  for (uint32_t turn = 0; turn < options.turns; ++turn) {
    for (size_t v = 0; v < variants.size(); ++v) {
      const std::string job = fmt::format("iterstore-{}-{}", turn, v);
      times[v].push_back(Run(options, graph, variants[v], server.address(), job).measure());
      // Each does the same work.
      if (times[v].back().norm == times[0][0].norm) continue;
      fail(ErrorCode::kInternal, "'{}' comes to other ranks: {:.17g}, not {:.17g}",
           variants[v].name, times[v].back().norm, times[0][0].norm);
    }
  }
  fmt::print("{} pages, {} links, {} ranks of {} threads, {}\n", graph.names.size(),
             graph.links.size(), options.world, options.threads, options.transport);
  std::vector<Times> medians;
  for (const auto& of_variant : times) medians.push_back(median_of(of_variant));
  computes ? print_consistencies(medians) : print_specialisations(medians);
  write_json(options, variants, medians);
}

}  // namespace
}  // namespace phub::iterstore_bench

int main(int argc, char** argv) {
  using namespace phub::iterstore_bench;  // NOLINT
  return phub::examples::status_of("iterstore_bench", [&] { run(parse(argc, argv)); });
}

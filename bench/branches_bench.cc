// What branches of a job cost (002, sections 5.2 and 5.3.2): a fork, with the copies that the
// rounds after it make, and rounds that change branch against rounds of one branch. Out of
// lock-step the two branches have different slack, so that changing branch changes the consistency.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bench/zerocompute/measures.h"
#include "phub/plan/models.h"
#include "phub/text_table.h"
#include "worker/examples/files.h"
#include "worker/examples/processes.h"
#include "worker/examples/program.h"
#include "worker/worker.h"

namespace phub::branches_bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string model = "resnet50";
  std::string optimizer = "nesterov";
  uint32_t workers = 2;
  uint32_t turns = 15;
  uint32_t rounds = 8;            // of one kind, one after the other
  uint32_t stretch = 1;           // rounds of a branch before the other runs
  std::optional<uint32_t> slack;  // of branch 0, out of lock-step; that of the other is 0
  double compute_ms = 0, straggle_ms = 0;
  std::string transport = "shm";
  std::string json;
  bool tiny = false;
};

// Milliseconds.
struct Times {
  std::vector<double> alone, interleaved;  // of each round, or of each turn's (add())
  std::vector<double> other;               // out of lock-step: those of the other branch alone
  std::vector<double> calls;               // until a fork is answered
  std::vector<double> forks;               // by how much the rounds behind it are longer, together
};

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// Out of lock-step the rounds of a rank differ: then what counts is their mean.
void add(const std::vector<double>& rounds, const Options& options, std::vector<double>& to) {
  if (!options.slack) {
    to.insert(to.end(), rounds.begin(), rounds.end());
  } else {
    const double all = std::accumulate(rounds.begin(), rounds.end(), 0.0);
    to.push_back(all / static_cast<double>(rounds.size()));
  }
}

// One rank. All make the same rounds; rank 0 decides about branches, and measures.
class Rank {
 public:
  Rank(const Options& options, const WorkerOptions& worker)
      : options_(options),
        leads_(worker.rank == 0),
        worker_(worker),
        until_changed_(4 + options.slack.value_or(0)) {
    worker_.wait_all();
    for (size_t k = 0; k < worker_.spec().keys.size(); ++k) {
      std::ranges::fill(worker_.gradient(k), 1e-3F);
    }
  }

  Times measure() {
    rounds(options_.rounds);  // memory that is touched for the first time
    for (uint32_t turn = 0; turn < options_.turns; ++turn) {
      const std::vector<double> before = rounds(options_.rounds);
      const uint32_t child = fork(median(before));
      if (options_.slack) add(rounds_of(child), options_, times_.other);
      add(change_branches(child), options_, times_.interleaved);
      if (leads_) worker_.discard(child);
      rounds(2);
      add(before, options_, times_.alone);
      add(rounds(options_.rounds), options_, times_.alone);
    }
    worker_.leave();
    return times_;
  }

 private:
  std::vector<double> rounds(uint32_t count) {
    std::vector<double> times;
    for (uint32_t i = 0; i < count; ++i) {
      const auto begin = Clock::now();
      compute(begin);
      for (size_t k = 0; k < worker_.spec().keys.size(); ++k) worker_.push(k);
      worker_.wait_all();
      times.push_back(ms_since(begin));
    }
    return times;
  }

  // As where a GPU does. All ranks draw the same: which of them takes longer in this round.
  void compute(Clock::time_point begin) {
    const bool straggles = random_() % options_.workers == worker_.rank();
    const double ms = options_.compute_ms + (straggles ? options_.straggle_ms : 0);
    if (ms == 0) return;
    std::this_thread::sleep_until(begin + std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6)));
  }

  // Its copies are made where chunks begin the round, which is one of the next.
  uint32_t fork(double usual) {
    uint32_t child = 0;
    double call = 0;
    if (leads_) {
      const auto begin = Clock::now();
      child = options_.slack ? worker_.fork(0, {{"slack", 0}}).branch : worker_.fork(0).branch;
      call = ms_since(begin);
    }
    double longer = 0;
    for (const double round : rounds(options_.rounds)) longer += round - usual;
    times_.calls.push_back(call);
    times_.forks.push_back(longer);
    return child;
  }

  std::vector<double> rounds_of(uint32_t branch) {
    schedule({{.branch = branch, .rounds = 0}});
    rounds(until_changed_);
    return rounds(options_.rounds);
  }

  std::vector<double> change_branches(uint32_t child) {
    const uint32_t all = options_.rounds + until_changed_;  // the first may come before the change
    std::vector<BranchTurn> turns;
    for (uint32_t i = 0; i * options_.stretch < all; ++i) {
      turns.push_back({.branch = i % 2 * child, .rounds = options_.stretch});
    }
    turns.push_back({.branch = 0, .rounds = 0});
    schedule(turns);
    rounds(until_changed_);
    std::vector<double> times = rounds(options_.rounds);
    rounds(until_changed_ + options_.stretch);  // until it runs alone for sure
    return times;
  }

  void schedule(const std::vector<BranchTurn>& turns) {
    if (leads_) worker_.schedule(turns);
  }

  const Options& options_;
  const bool leads_;
  Worker worker_;
  const uint32_t until_changed_;  // rounds in which what was scheduled has begun for sure
  std::mt19937_64 random_;
  Times times_;
};

Times run_job(const Options& options, const KeyTable& table, const std::string& server) {
  std::vector<std::future<Times>> ranks;
  for (uint32_t rank = 0; rank < options.workers; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&options, &table, &server, rank] {
      WorkerOptions worker;
      worker.server = server;
      worker.transport = options.transport;
      worker.rank = static_cast<int32_t>(rank);
      worker.local_world_size = options.workers;
      worker.spec.name = "branches";
      worker.spec.keys = table.keys;
      worker.spec.optimizer = options.optimizer;
      worker.spec.world_size = options.workers;
      worker.spec.branches = 2;
      worker.spec.consistency = options.slack ? "ssp" : "bsp";
      worker.spec.slack = options.slack.value_or(0);
      worker.spec.initial = "zeros";
      worker.spec.lease_ms = 10'000;  // on a busy machine
      return Rank(options, worker).measure();
    }));
  }
  Times of_leader = ranks.front().get();
  for (size_t rank = 1; rank < ranks.size(); ++rank) ranks[rank].get();
  return of_leader;
}

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("What a fork of a job costs, and rounds that change branch each time.");
  app.add_option("--model", options.model, "As of zerocompute: a name, or a file");
  app.add_option("--optimizer", options.optimizer);
  app.add_option("--workers", options.workers)->check(CLI::PositiveNumber);
  app.add_option("--turns", options.turns, "Forks; the median counts")->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds, "Of each kind, in each turn")
      ->check(CLI::Range(1, 200));
  app.add_option("--stretch", options.stretch, "Rounds of a branch before the other runs")
      ->check(CLI::Range(1, 200));
  app.add_option("--slack", options.slack,
                 "Out of lock-step (ssp), with this slack; that of the other branch is 0")
      ->check(CLI::Range(0, 16));
  app.add_option("--compute-ms", options.compute_ms, "A gradient takes this long")
      ->check(CLI::Range(0, 10'000));
  app.add_option("--straggle-ms", options.straggle_ms,
                 "That of one rank, another in each round, so much longer")
      ->check(CLI::Range(0, 10'000));
  app.add_option("--transport", options.transport)->check(CLI::IsMember({"shm", "tcp"}));
  app.add_option("--json", options.json, "Write the results to this file");
  app.add_flag("--tiny", options.tiny, "A small model, once: whether it works");
  examples::parse_or_exit(app, argc, argv);
  if (options.tiny) options.turns = options.rounds = 1;
  return options;
}

// What a change of branch costs is measured against what the same rounds take without.
void print(const Options& options, const KeyTable& table, const Times& times) {
  const double alone = median(times.alone), interleaved = median(times.interleaved);
  const double other = options.slack ? median(times.other) : alone;
  fmt::print(
      "{}: {} elements, {} of {} workers, {}; a gradient takes {} ms, and one of each round {} ms "
      "more; medians of {} turns of {} rounds\n",
      table.name, total_elements(table), options.optimizer, options.workers, options.transport,
      options.compute_ms, options.straggle_ms, options.turns, options.rounds);
  TextTable out({"ms", "what"}, true);
  const auto row = [&out](double ms, const std::string& what) {
    out.add({fmt::format("{:.2f}", ms), what});
  };
  row(alone, options.slack ? fmt::format("a round of the branch with slack {}", *options.slack)
                           : "a round of one branch");
  if (options.slack) row(other, "a round of the branch with slack 0");
  row(interleaved, fmt::format("a round where they change after every {} ({:+.1f}%)",
                               options.stretch, 100 * (interleaved * 2 / (alone + other) - 1)));
  row(median(times.calls), "until a fork is answered");
  row(median(times.forks), "by which the rounds behind it are longer, together");
  fmt::print("{}", out.text());
}

void write_json(const Options& options, const KeyTable& table, const Times& times) {
  nlohmann::json report = {{"model", table.name},
                           {"workers", options.workers},
                           {"transport", options.transport},
                           {"consistency", options.slack ? "ssp" : "bsp"},
                           {"slack", options.slack.value_or(0)},
                           {"stretch", options.stretch},
                           {"compute_ms", options.compute_ms},
                           {"straggle_ms", options.straggle_ms},
                           {"alone_ms", median(times.alone)},
                           {"interleaved_ms", median(times.interleaved)},
                           {"fork_call_ms", median(times.calls)},
                           {"fork_rounds_ms", median(times.forks)}};
  if (options.slack) report["other_ms"] = median(times.other);
  examples::write_file(options.json, report.dump(1) + '\n');
}

void run(const Options& options) {
  examples::check_can_write(options.json);
  KeyTable table = options.tiny ? KeyTable{"tiny", {{"w", 10'000}}} : model_or_file(options.model);
  const OwnServer server(beside_this_program("phub"), options.transport, {});
  const Times times = run_job(options, table, server.address());
  print(options, table, times);
  write_json(options, table, times);
}

}  // namespace
}  // namespace phub::branches_bench

int main(int argc, char** argv) {
  using namespace phub::branches_bench;  // NOLINT
  return phub::examples::status_of("branches_bench", [&] { run(parse(argc, argv)); });
}

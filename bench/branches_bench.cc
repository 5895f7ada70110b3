// What branches of a job cost (002, section 5.2): a fork, with the copies that the rounds after it
// make, and rounds that change branch each time against rounds of one branch.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/zerocompute/processes.h"
#include "phub/plan/models.h"
#include "phub/text_table.h"
#include "transport/error.h"
#include "worker/worker.h"

namespace phub::branches_bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string model = "resnet50";
  std::string optimizer = "nesterov";
  uint32_t workers = 2;
  uint32_t turns = 15;
  uint32_t rounds = 8;  // of one kind, one after the other
  std::string transport = "shm";
  std::string json;
  bool tiny = false;
};

// Milliseconds.
struct Times {
  std::vector<double> alone, interleaved;  // of each round
  std::vector<double> calls;               // until a fork is answered
  std::vector<double> forks;               // by how much the rounds behind it are longer, together
};

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// One rank. All make the same rounds; rank 0 decides about branches, and measures.
class Rank {
 public:
  Rank(const Options& options, const WorkerOptions& worker)
      : options_(options), leads_(worker.rank == 0), worker_(worker) {
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
      const std::vector<double> interleaved = change_each_round(child);
      if (leads_) worker_.discard(child);
      rounds(2);
      const std::vector<double> after = rounds(options_.rounds);
      times_.alone.insert(times_.alone.end(), before.begin(), before.end());
      times_.alone.insert(times_.alone.end(), after.begin(), after.end());
      times_.interleaved.insert(times_.interleaved.end(), interleaved.begin(), interleaved.end());
    }
    worker_.leave();
    return times_;
  }

 private:
  std::vector<double> rounds(uint32_t count) {
    std::vector<double> times;
    for (uint32_t i = 0; i < count; ++i) {
      const auto begin = Clock::now();
      for (size_t k = 0; k < worker_.spec().keys.size(); ++k) worker_.push(k);
      worker_.wait_all();
      times.push_back(ms_since(begin));
    }
    return times;
  }

  // Its copies are made where chunks begin the round, which is one of the next.
  uint32_t fork(double usual) {
    uint32_t child = 0;
    double call = 0;
    if (leads_) {
      const auto begin = Clock::now();
      child = worker_.fork(0).branch;
      call = ms_since(begin);
    }
    double longer = 0;
    for (const double round : rounds(options_.rounds)) longer += round - usual;
    times_.calls.push_back(call);
    times_.forks.push_back(longer);
    return child;
  }

  std::vector<double> change_each_round(uint32_t child) {
    const uint32_t all = options_.rounds + 4;  // the first ones may come before the change
    if (leads_) {
      std::vector<BranchTurn> turns;
      for (uint32_t i = 0; i < all; ++i) turns.push_back({.branch = i % 2 * child, .rounds = 1});
      turns.push_back({.branch = 0, .rounds = 0});
      worker_.schedule(turns);
    }
    rounds(4);
    std::vector<double> times = rounds(options_.rounds);
    rounds(4);  // until it runs alone for sure
    return times;
  }

  const Options& options_;
  const bool leads_;
  Worker worker_;
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
  app.add_option("--transport", options.transport)->check(CLI::IsMember({"shm", "tcp"}));
  app.add_option("--json", options.json, "Write the results to this file");
  app.add_flag("--tiny", options.tiny, "A small model, once: whether it works");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e) == 0 ? 0 : 2);
  }
  if (options.tiny) options.turns = options.rounds = 1;
  return options;
}

void run(const Options& options) {
  KeyTable table = options.tiny ? KeyTable{"tiny", {{"w", 10'000}}} : model_or_file(options.model);
  const OwnServer server(beside_this_program("phub"), options.transport, "");
  const Times times = run_job(options, table, server.address());
  const double alone = median(times.alone), interleaved = median(times.interleaved);
  const double call = median(times.calls), fork = median(times.forks);
  fmt::print("{}: {} elements, {} of {} workers, {}; medians of {} turns of {} rounds\n",
             table.name, total_elements(table), options.optimizer, options.workers,
             options.transport, options.turns, options.rounds);
  TextTable out({"ms", "what"}, true);
  out.add({fmt::format("{:.2f}", alone), "a round of one branch"});
  out.add({fmt::format("{:.2f}", interleaved),
           fmt::format("a round of another branch than the one before ({:+.1f}%)",
                       100 * (interleaved / alone - 1))});
  out.add({fmt::format("{:.2f}", call), "until a fork is answered"});
  out.add({fmt::format("{:.2f}", fork), "by which the rounds behind it are longer, together"});
  fmt::print("{}", out.text());
  if (options.json.empty()) return;
  std::ofstream file(options.json);
  file << nlohmann::json({{"model", table.name},
                          {"workers", options.workers},
                          {"transport", options.transport},
                          {"alone_ms", alone},
                          {"interleaved_ms", interleaved},
                          {"fork_call_ms", call},
                          {"fork_rounds_ms", fork}})
              .dump(1)
       << '\n';
  if (!file.flush()) fail(ErrorCode::kInternal, "{}: cannot be written", options.json);
}

}  // namespace
}  // namespace phub::branches_bench

int main(int argc, char** argv) try {
  phub::branches_bench::run(phub::branches_bench::parse(argc, argv));
} catch (const std::exception& error) {
  fmt::print(stderr, "branches_bench: {}\n", error.what());
  return 1;
}

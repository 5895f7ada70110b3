// Runs simulated racks by seed:
//   rack_sim --seeds 1..10000 [--jobs 2] [--replay-check]
//   rack_sim --seed 42 --verbose
//   rack_sim --large --seeds 1..1000
//   rack_sim --outer --seeds 1..10000
#include <fmt/format.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/sim/rack.h"

namespace {

using phub::sim::RackPlan;
using phub::sim::RackResult;

uint64_t current_seed = 0;

// A broken invariant aborts, an endless loop uses up its time: both must say which seed.
extern "C" void on_signal(int number) {
  std::fprintf(stderr, "signal %d in seed %llu; replay: rack_sim --seed %llu --verbose\n", number,
               static_cast<unsigned long long>(current_seed),
               static_cast<unsigned long long>(current_seed));
  std::signal(number, SIG_DFL);
  std::raise(number);
}

struct Options {
  std::string range;
  uint64_t seed = 0;
  uint32_t processes = 1;
  bool verbose = false;
  bool replay = false;
  bool stop = false;
  bool racks = false;
  bool large = false;
  bool outer = false;
  bool switches = false;
};

struct Totals {
  uint64_t racks = 0, failures = 0, observations = 0, lost = 0, admitted = 0, failed_jobs = 0;
  uint64_t writes = 0, overtakes = 0, breaks = 0, steps = 0, box_deaths = 0, restored = 0;
  uint64_t parts_restored = 0, parts_restored_below = 0, void_snapshots = 0, states = 0,
           spread_jobs = 0, ended_shards = 0, rewinds = 0;
  uint64_t coded_jobs = 0, residuals_restored = 0, jobs_of_differences = 0, jobs_of_factors = 0;
  uint64_t jobs_of_rows = 0, lazy_jobs = 0, jobs_of_interest = 0, jobs_of_schedules = 0;
  uint64_t limited_racks = 0, limited_uplinks = 0, near_links = 0, mixed_links = 0, near_writes = 0;
  uint64_t window_writes = 0, window_growths = 0, taken = 0;
  uint64_t chunks_carried = 0, forks = 0, switches = 0, restored_with_branches = 0;
  uint64_t kills = 0, revivals = 0, spread_kills = 0, spread_revivals = 0, revived_runs = 0;
  uint64_t racked_jobs = 0, racks_admitted = 0, racks_lost = 0, boxes_below_died = 0;
  uint64_t switched_jobs = 0, switch_chunks = 0, switch_generations = 0;
  phub::sim::OuterCounts outer;
};

RackPlan plan_of(uint64_t seed, const Options& options) {
  if (options.outer) return phub::sim::make_outer_plan(seed);
  return options.large ? phub::sim::make_large_plan(seed) : phub::sim::make_rack_plan(seed);
}

// What was drawn, so that one sees that it was not empty.
void print_outer(const Totals& totals) {
  const phub::sim::OuterCounts& outer = totals.outer;
  fmt::print(
      "{} outer jobs, {} failures; {} learners, {} of them slow, {} with slow links; {} rounds of "
      "fragments, {} contributions, {} times one was late for a round, {} results of chunks "
      "compared; {} processes ended, {} hung, {} ranks lost; {} partitions, {} one-sided, cut off "
      "{} ranks; {} new ranks joined later, {} were there again; {} times looked who waits, the "
      "longest for {} ms with a quorum; {} jobs failed as they should, {} queue pairs broken, {} "
      "steps\n",
      totals.racks, totals.failures, outer.learners, outer.slow_learners, outer.slow_links,
      outer.rounds, outer.sent, outer.late, totals.observations, outer.ended, outer.hung,
      totals.lost, outer.partitions, outer.one_sided, outer.cut_off, outer.joined_late,
      outer.joined_again, outer.waits, outer.longest_wait_ms, totals.failed_jobs, totals.breaks,
      totals.steps);
}

bool run_one(uint64_t seed, const Options& options, Totals& totals) {
  current_seed = seed;
  const time_t most_s = options.large ? 1200 : 120;
  const itimerval limit = {.it_interval = {}, .it_value = {.tv_sec = most_s, .tv_usec = 0}};
  setitimer(ITIMER_PROF, &limit, nullptr);  // of the CPU: the machine may be busy
  const RackPlan plan = plan_of(seed, options);
  if (options.racks && plan.racks.empty()) return true;
  if (options.switches && !plan.through_switch) return true;
  if (options.verbose) fmt::print("{}", describe(plan));
  RackResult result = run_rack(plan, options.verbose);
  if (options.verbose) {
    for (const std::string& line : result.text) fmt::print("{}\n", line);
    fmt::print("trace {:016x}, {} steps, {:.3f} ms, {} results\n", result.trace_hash, result.steps,
               static_cast<double>(result.virtual_ns) * 1e-6, result.observations);
  }
  if (result.failure.empty() && options.replay && run_rack(plan).trace_hash != result.trace_hash) {
    result.failure = "the same seed gives another trace";
  }
  ++totals.racks;
  totals.observations += result.observations;
  totals.lost += result.lost;
  totals.admitted += result.admitted;
  totals.failed_jobs += result.failed_jobs;
  totals.writes += result.net.writes;
  totals.overtakes += result.net.overtakes;
  totals.breaks += result.net.breaks;
  totals.steps += result.steps;
  totals.box_deaths += result.box_deaths;
  totals.restored += result.restored;
  totals.states += result.states;
  totals.spread_jobs += result.spread_jobs;
  totals.ended_shards += result.ended_shards;
  totals.rewinds += result.rewinds;
  totals.racked_jobs += result.racked_jobs;
  totals.racks_admitted += result.racks_admitted;
  totals.racks_lost += result.racks_lost;
  totals.boxes_below_died += result.boxes_below_died;
  totals.parts_restored += result.parts_restored;
  totals.parts_restored_below += result.parts_restored_below;
  totals.coded_jobs += result.coded_jobs;
  totals.jobs_of_schedules += result.jobs_of_schedules;
  totals.jobs_of_factors += result.jobs_of_factors;
  totals.jobs_of_rows += result.jobs_of_rows;
  totals.lazy_jobs += result.lazy_jobs;
  totals.jobs_of_interest += result.jobs_of_interest;
  totals.jobs_of_differences += result.jobs_of_differences;
  totals.residuals_restored += result.residuals_restored;
  totals.limited_racks += plan.worker_bytes_per_s + plan.box_bytes_per_s > 0;
  totals.limited_uplinks += plan.uplink_bytes_per_s > 0;
  totals.near_links += result.net.near_links;
  totals.mixed_links += result.net.mixed_links;
  totals.near_writes += result.net.near_writes;
  totals.window_writes += result.net.window_writes;
  totals.window_growths += result.net.window_growths;
  totals.taken += result.net.taken;
  totals.chunks_carried += result.chunks_carried;
  totals.forks += result.forks;
  totals.switches += result.switches;
  totals.kills += result.kills;
  totals.revivals += result.revivals;
  totals.spread_kills += result.spread_kills;
  totals.spread_revivals += result.spread_revivals;
  totals.revived_runs += result.revived_runs;
  totals.restored_with_branches += result.restored_with_branches;
  totals.void_snapshots += result.void_snapshots;
  totals.switched_jobs += result.switched_jobs;
  totals.switch_chunks += result.switch_chunks;
  totals.switch_generations += result.switch_generations;
  totals.outer.add(result.outer);
  if (result.failure.empty()) return true;
  ++totals.failures;
  fmt::print("seed {}: {}\n  replay: rack_sim{} --seed {} --verbose\n", seed, result.failure,
             options.outer   ? " --outer"
             : options.large ? " --large"
                             : "",
             seed);
  std::fflush(stdout);
  return false;
}

int run_range(uint64_t first, uint64_t last, uint64_t stride, const Options& options) {
  Totals totals;
  for (uint64_t seed = first; seed <= last; seed += stride) {
    if (!run_one(seed, options, totals) && options.stop) break;
  }
  if (options.outer) {
    print_outer(totals);
    return totals.failures == 0 ? 0 : 1;
  }
  fmt::print(
      "{} racks, {} failures; {} results and {} states of chunks compared, {} ranks admitted, {} "
      "lost, {} jobs failed as they should, {} writes, {} out of order, {} queue pairs broken, {} "
      "steps; {} boxes "
      "died, {} jobs went on from a "
      "checkpoint, {} ranks with a part of it, {} of them at racks; {} snapshots were void; {} "
      "jobs were spread over "
      "boxes, "
      "{} ended with one, {} went on without one; {} jobs were over racks, {} racks were admitted "
      "and {} "
      "lost, {} boxes of racks died; {} jobs sent factors, {} rows, {} of them with lazy "
      "keys, in {} ranks took part in some chunks only, {} had coded gradients, {} of them by "
      "schedules, {} ranks their "
      "residuals again; {} jobs had differences for results; {} racks had NICs with budgets, {} "
      "uplinks, {} links were within a host, {} partly, with {} writes; {} chunks were carried "
      "over; {} branches were forked, another went on {} times, {} checkpoints with some were gone "
      "on from; {} branches were killed, {} of them over several boxes, and {} revived from files, "
      "{} over several boxes; {} times one that had been killed went on; {} jobs were behind a "
      "switch, "
      "{} chunks came through it, in {} generations; {} writes went into windows, which grew {} "
      "times; {} times a worker heard that a gradient had left a slot that chunks share\n",
      totals.racks, totals.failures, totals.observations, totals.states, totals.admitted,
      totals.lost, totals.failed_jobs, totals.writes, totals.overtakes, totals.breaks, totals.steps,
      totals.box_deaths, totals.restored, totals.parts_restored, totals.parts_restored_below,
      totals.void_snapshots, totals.spread_jobs, totals.ended_shards, totals.rewinds,
      totals.racked_jobs, totals.racks_admitted, totals.racks_lost, totals.boxes_below_died,
      totals.jobs_of_factors, totals.jobs_of_rows, totals.lazy_jobs, totals.jobs_of_interest,
      totals.coded_jobs, totals.jobs_of_schedules, totals.residuals_restored,
      totals.jobs_of_differences, totals.limited_racks, totals.limited_uplinks, totals.near_links,
      totals.mixed_links, totals.near_writes, totals.chunks_carried, totals.forks, totals.switches,
      totals.restored_with_branches, totals.kills, totals.spread_kills, totals.revivals,
      totals.spread_revivals, totals.revived_runs, totals.switched_jobs, totals.switch_chunks,
      totals.switch_generations, totals.window_writes, totals.window_growths, totals.taken);
  return totals.failures == 0 ? 0 : 1;
}

int run_in_processes(uint64_t first, uint64_t last, const Options& options) {
  std::vector<pid_t> children;
  for (uint32_t i = 0; i < options.processes; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      const int status = run_range(first + i, last, options.processes, options);
      std::fflush(stdout);
      _exit(status);
    }
    children.push_back(child);
  }
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    if (waitpid(child, &status, 0) < 0 || status != 0) failed = 1;
  }
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Simulated racks: the production server and worker over a seeded network.");
  app.add_option("--seeds", options.range, "FIRST..LAST");
  app.add_option("--seed", options.seed, "one seed");
  app.add_option("--jobs", options.processes, "processes")->check(CLI::Range(1, 256));
  app.add_flag("--verbose", options.verbose, "print plan and trace");
  app.add_flag("--replay-check", options.replay, "run every seed twice and compare the traces");
  app.add_flag("--racks", options.racks, "leave out seeds without racks below the root");
  app.add_flag("--switches", options.switches, "leave out seeds without a switch that adds");
  app.add_flag("--large", options.large, "a thousand ranks over three levels of boxes, each");
  app.add_flag("--outer", options.outer,
               "up to 64 learners that exchange now and then, with a quorum, each");
  app.add_flag("--stop", options.stop, "end with the first failure");
  CLI11_PARSE(app, argc, argv);
  for (int number : {SIGABRT, SIGSEGV, SIGPROF, SIGFPE}) std::signal(number, on_signal);

  uint64_t first = options.seed, last = options.seed;
  if (!options.range.empty() &&
      std::sscanf(options.range.c_str(), "%lu..%lu", &first, &last) != 2) {
    fmt::print(stderr, "--seeds: '{}' is not FIRST..LAST\n", options.range);
    return 2;
  }
  if (options.processes > 1) return run_in_processes(first, last, options);
  return run_range(first, last, 1, options);
}

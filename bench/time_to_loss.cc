// Compares consistencies if one rank is slow: rounds per second, and the time and the rounds until
// the digits' training loss and held-out accuracy are good enough.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/time_to_loss_run.h"
#include "transport/error.h"
#include "worker/examples/digits_data.h"
#include "worker/examples/digits_training.h"
#include "worker/examples/files.h"
#include "worker/examples/processes.h"
#include "worker/examples/program.h"
#include "worker/session/send_order.h"
#include "worker/worker.h"

namespace phub::digits {
namespace {

struct Options {
  TimeToLoss run;
  std::vector<std::string> modes = {"bsp", "ssp:1", "ssp:3", "async"};
  std::string straggler = "fixed";
  uint32_t turns = 3;
  std::string transport = "shm";
  std::string budget;  // of a worker; empty: none
  std::string data = "build/data/digits.csv";
  std::string json;
  bool tiny = false;
};

constexpr uint32_t kAsyncCarries = 3;  // rounds, where no slack says how many

// What follows the consistency: "+carry", or an order.
void parse_addition(const std::string& word, Mode& mode) {
  if (word == "late") {
    mode.late = true;
    return;
  }
  if (word == "carry") {
    mode.carry_over = mode.consistency == "ssp" ? mode.slack : kAsyncCarries;
    return;
  }
  try {
    parse_send_order(word);
  } catch (const Error&) {
    throw CLI::ValidationError(
        "--modes",
        "'" + word + "' is not late, carry, nor an order: priority, fifo, random, magnitude");
  }
  mode.order = word;
}

// "bsp", "async", "ssp:3", and what is added: "ssp:3+magnitude+carry".
Mode parse_mode(const std::string& all) {
  const std::string word = all.substr(0, all.find('+'));
  Mode mode{.consistency = word.substr(0, word.find(':'))};
  const bool ssp = mode.consistency == "ssp";
  const bool known = ssp || word == "bsp" || word == "async";
  const std::string slack = ssp && word.size() > 4 ? word.substr(4) : "";
  if (!known || (ssp && (slack.empty() || slack.size() > 6 ||
                         slack.find_first_not_of("0123456789") != std::string::npos))) {
    throw CLI::ValidationError("--modes", "'" + word + "' is not bsp, ssp:SLACK or async");
  }
  if (ssp) mode.slack = static_cast<uint32_t>(std::stoul(slack));
  for (size_t plus = all.find('+'); plus != std::string::npos;) {
    const size_t next = all.find('+', plus + 1);
    parse_addition(all.substr(plus + 1, next - plus - 1), mode);
    plus = next;
  }
  return mode;
}

template <typename Field>
double median(const std::vector<Result>& results, Field field) {
  std::vector<double> values;
  for (const Result& result : results) values.push_back(field(result));
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Medians over the turns. A goal that was not reached counts as infinite. Accuracies are those of
// the first turn.
Result median(const std::vector<Result>& results) {
  const auto of = [&](auto field) { return median(results, field); };
  Result result;
  result.rounds_per_second = of([](const Result& r) { return r.rounds_per_second; });
  result.loss = {of([](const Result& r) { return r.loss.seconds; }),
                 of([](const Result& r) { return r.loss.rounds; })};
  result.accuracy = {of([](const Result& r) { return r.accuracy.seconds; }),
                     of([](const Result& r) { return r.accuracy.rounds; })};
  result.last_loss = of([](const Result& r) { return r.last_loss; });
  result.carried = of([](const Result& r) { return r.carried; });
  result.accuracies = results.front().accuracies;
  for (const Result& r : results) {
    result.largest_lead = std::max(result.largest_lead, r.largest_lead);
  }
  return result;
}

std::string text_of(double value, int digits) {
  return value == kNotReached ? "never" : fmt::format("{:.{}f}", value, digits);
}

void print(const Options& options, const std::vector<Mode>& modes,
           const std::vector<Result>& results) {
  size_t width = 14;
  for (const Mode& mode : modes) width = std::max(width, mode.name().size() + 1);
  fmt::print("{:<{}}{:>10}{:>16}{:>8}{:>16}{:>8}{:>12}{:>6}{:>9}\n", "", width, "rounds/s",
             fmt::format("s to loss {:g}", options.run.loss), "rounds",
             fmt::format("s to {:g}%", options.run.accuracy), "rounds", "last loss", "lead",
             "carried");
  for (size_t m = 0; m < modes.size(); ++m) {
    const Result& r = results[m];
    fmt::print("{:<{}}{:>10.1f}{:>16}{:>8}{:>16}{:>8}{:>12.4f}{:>6.0f}{:>8.0f}%\n", modes[m].name(),
               width, r.rounds_per_second, text_of(r.loss.seconds, 2), text_of(r.loss.rounds, 0),
               text_of(r.accuracy.seconds, 2), text_of(r.accuracy.rounds, 0), r.last_loss,
               r.largest_lead, 100 * r.carried);
  }
}

nlohmann::json json_of(const Reached& reached) {
  if (reached.seconds == kNotReached) return nullptr;
  return {{"seconds", reached.seconds}, {"rounds", reached.rounds}};
}

nlohmann::json json_of(const std::vector<Accuracy>& accuracies) {
  nlohmann::json points = nlohmann::json::array();
  for (const Accuracy& at : accuracies) points.push_back({at.seconds, at.rounds, at.percent});
  return points;
}

nlohmann::json json_of(const Options& options, const std::vector<Mode>& modes,
                       const std::vector<Result>& results) {
  nlohmann::json rows = nlohmann::json::array();
  for (size_t m = 0; m < modes.size(); ++m) {
    rows.push_back({{"consistency", modes[m].consistency},
                    {"slack", modes[m].slack},
                    {"late", modes[m].late},
                    {"order", modes[m].order},
                    {"carry_over", modes[m].carry_over},
                    {"carried", results[m].carried},
                    {"rounds_per_s", results[m].rounds_per_second},
                    {"to_loss", json_of(results[m].loss)},
                    {"to_accuracy", json_of(results[m].accuracy)},
                    {"last_loss", results[m].last_loss},
                    {"largest_lead", results[m].largest_lead},
                    {"accuracies", json_of(results[m].accuracies)}});
  }
  const Training& training = options.run.training;
  return {{"rows", rows},
          {"workers", training.world},
          {"rounds", training.rounds},
          {"batch", training.batch},
          {"lr", training.lr},
          {"momentum", training.momentum},
          {"hidden", training.hidden},
          {"seed", training.seed},
          {"turns", options.turns},
          {"compute_ms", options.run.compute_ms},
          {"delay_ms", options.run.delay_ms},
          {"straggler", options.straggler},
          {"loss", options.run.loss},
          {"accuracy", options.run.accuracy},
          {"budget", options.budget},
          {"cache", options.run.cache},
          {"transport", options.transport}};
}

// Turns of all modes alternate, so that changes of the machine's load affect all.
std::vector<Result> measure(const Options& options, const std::vector<Mode>& modes) {
  const Dataset data = load(options.data);
  const OwnServer server(beside_this_program("phub"), options.transport, {});
  std::vector<std::vector<Result>> results(modes.size());
  for (uint32_t turn = 0; turn < options.turns; ++turn) {
    for (size_t m = 0; m < modes.size(); ++m) {
      WorkerOptions worker;
      worker.server = server.address();
      worker.transport = options.transport;
      worker.nic_budget = options.budget;
      worker.spec = job_spec(options.run.training, fmt::format("time-to-loss-{}-{}", turn, m));
      results[m].push_back(train(options.run, data, modes[m], worker));
    }
  }
  std::vector<Result> medians;
  for (const auto& of_mode : results) medians.push_back(median(of_mode));
  return medians;
}

void add_options(CLI::App& app, Options& options) {
  add_options(app, options.run.training);
  app.add_option(
         "--modes", options.modes,
         "bsp, ssp:SLACK, async; separated by commas. Behind each, with a '+': 'late', that "
         "a round of the slack (in bsp the one before) is under way while the next gradient "
         "is computed; an order of what waits for the budget (fifo, random, magnitude); "
         "and 'carry', that chunks without it are left to later rounds")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--compute-ms", options.run.compute_ms, "A gradient takes this long")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--delay-ms", options.run.delay_ms, "And a straggler's so much longer")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--straggler", options.straggler,
                 "fixed: the last rank; random: every rank, in one of --world of its rounds")
      ->check(CLI::IsMember({"fixed", "random"}))
      ->capture_default_str();
  app.add_option("--loss", options.run.loss, "Mean over the training images that is good enough")
      ->capture_default_str();
  app.add_option("--accuracy", options.run.accuracy, "Percent of the held-out images, the same")
      ->capture_default_str();
  app.add_option("--turns", options.turns, "Alternated runs, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--budget", options.budget,
                 "What each worker may send, over tcp: 250mbit, or bytes per second");
  app.add_option("--cache", options.run.cache,
                 "Each rank has a GeePS cache in a host device with so much memory: 64M, 35% of "
                 "what everything takes, or least");
  app.add_option("--transport", options.transport, "Of the workers: shm or tcp")
      ->capture_default_str();
  app.add_option("--data", options.data, "The digits as CSV")->capture_default_str();
  app.add_option("--json", options.json, "A file for the figures");
  app.add_flag("--tiny", options.tiny, "A smoke test: figures mean nothing");
}

void run(int argc, char** argv) {
  Options options;
  std::vector<Mode> modes;
  CLI::App app("Time to loss in lock-step and out of it, with a straggler, on handwritten digits.");
  add_options(app, options);
  app.callback([&] {
    for (const std::string& word : options.modes) modes.push_back(parse_mode(word));
  });
  examples::parse_or_exit(app, argc, argv);
  options.run.random = options.straggler == "random";
  if (options.tiny) {
    options.run.training.rounds = 12;
    options.run.training.hidden = 16;
    options.turns = 1;
    options.run.compute_ms = 1;
    options.run.delay_ms = 3;
  }
  examples::check_can_write(options.json);
  const std::vector<Result> results = measure(options, modes);
  print(options, modes, results);
  examples::write_file(options.json, json_of(options, modes, results).dump(2) + '\n');
}

}  // namespace
}  // namespace phub::digits

int main(int argc, char** argv) {
  return phub::examples::status_of("time_to_loss", [&] { phub::digits::run(argc, argv); });
}

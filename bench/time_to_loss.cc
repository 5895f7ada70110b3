// What a consistency costs and brings where one rank is slow: rounds per second, and the time and
// the rounds until the digits' training loss and held-out accuracy are good enough.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <future>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "bench/zerocompute_server.h"
#include "transport/error.h"
#include "worker/examples/digits_data.h"
#include "worker/examples/digits_model.h"
#include "worker/examples/digits_training.h"
#include "worker/worker.h"

namespace phub::digits {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kNotReached = std::numeric_limits<double>::infinity();

struct Mode {
  std::string consistency;
  uint32_t slack = 0;

  std::string name() const {
    return consistency == "ssp" ? fmt::format("ssp, slack {}", slack) : consistency;
  }
  uint64_t largest_lead() const { return consistency == "async" ? ~uint64_t{0} : slack; }
};

// "bsp", "async", "ssp:3".
Mode parse_mode(const std::string& word) {
  Mode mode{.consistency = word.substr(0, word.find(':'))};
  const bool ssp = mode.consistency == "ssp";
  const bool known = ssp || word == "bsp" || word == "async";
  const std::string slack = ssp && word.size() > 4 ? word.substr(4) : "";
  if (!known || (ssp && (slack.empty() || slack.size() > 6 ||
                         slack.find_first_not_of("0123456789") != std::string::npos))) {
    throw CLI::ValidationError("--modes", "'" + word + "' is not bsp, ssp:SLACK or async");
  }
  if (ssp) mode.slack = static_cast<uint32_t>(std::stoul(slack));
  return mode;
}

struct Options {
  Training training = {.rounds = 300};
  std::vector<std::string> modes = {"bsp", "ssp:1", "ssp:3", "async"};
  double compute_ms = 6;  // of a gradient
  double delay_ms = 12;   // more, for a straggler
  std::string straggler = "fixed";
  double loss = 0.1;
  double accuracy = 95;
  uint32_t turns = 3;
  std::string transport = "shm";
  std::string data = "build/data/digits.csv";
  std::string json;
  bool tiny = false;
};

// What rank 0 had after one of its rounds.
struct Sample {
  double seconds = 0;
  double rounds = 0;  // gradients of all ranks, over their number
  std::vector<float> parameters;
};

// When a goal was reached.
struct Reached {
  double seconds = kNotReached;
  double rounds = kNotReached;
};

struct Result {
  double rounds_per_second = 0;
  Reached loss, accuracy;
  double last_loss = 0;
  double largest_lead = 0;
};

// One training: a job, and a thread per rank. It ends when the ranks have taken as many gradients
// as so many rounds have, whoever took them.
class Run {
 public:
  Run(const Options& options, const Dataset& data, const Mode& mode, WorkerOptions worker)
      : options_(options),
        training_(options.training),
        data_(data),
        mode_(mode),
        worker_(std::move(worker)),
        pushed_(options.training.world) {
    worker_.spec.consistency = mode.consistency;
    worker_.spec.slack = mode.slack;
  }

  Result measure() {
    std::vector<std::future<void>> ranks;
    for (uint32_t rank = 0; rank < training_.world; ++rank) {
      ranks.push_back(std::async(std::launch::async, [this, rank] { train(rank); }));
    }
    for (auto& rank : ranks) rank.get();
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    return evaluate({.rounds_per_second = static_cast<double>(training_.rounds) / seconds,
                     .largest_lead = static_cast<double>(largest_lead_.load())});
  }

 private:
  static constexpr uint64_t kLeft = ~uint64_t{0};

  void train(uint32_t rank) {
    Network network = digits::network(training_);
    WorkerOptions options = worker_;
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    worker.broadcast(rank == 0 ? network.initial(training_.seed) : std::vector<float>());
    worker.barrier();
    std::call_once(started_, [this] { start_ = Clock::now(); });
    const uint64_t gradients = training_.rounds * training_.world;
    for (uint64_t round = 1; taken_.fetch_add(1) < gradients; ++round) {
      const auto done = Clock::now() + computation_of(rank, round);
      compute(network, worker, round);
      std::this_thread::sleep_until(done);
      pushed_[rank] = round;
      for (size_t key = 0; key < worker.keys(); ++key) worker.push(key);
      worker.wait_all();
      note_lead(round);
      if (rank == 0) take_sample(worker);
    }
    pushed_[rank] = kLeft;
    worker.leave();
  }

  // A straggler is the last rank in every round, or each rank in one of `world` of its rounds.
  std::chrono::nanoseconds computation_of(uint32_t rank, uint64_t round) const {
    const bool straggles =
        options_.straggler == "fixed"
            ? rank + 1 == training_.world
            : Random((training_.seed * training_.world + rank) << 32 | round).next() %
                      training_.world ==
                  0;
    const double ms = options_.compute_ms + (straggles ? options_.delay_ms : 0);
    return std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6));
  }

  void compute(Network& network, Worker& worker, uint64_t round) const {
    const Samples batch = digits::batch(data_.train, training_.seed, worker.rank(), training_.world,
                                        round, training_.batch);
    network.start(batch.images);
    for (size_t l = 0; l < network.layers(); ++l) {
      network.forward(l, worker.parameters(Network::weights_key(l)),
                      worker.parameters(Network::bias_key(l)));
    }
    network.loss(batch.labels);
    for (size_t l = network.layers(); l-- > 0;) {
      const size_t weights = Network::weights_key(l);
      network.backward(l, worker.parameters(weights), worker.gradient(weights),
                       worker.gradient(Network::bias_key(l)));
    }
  }

  // Who has the result of its round is ahead of the slowest by so many.
  void note_lead(uint64_t round) {
    uint64_t slowest = round;
    for (const auto& pushed : pushed_) slowest = std::min<uint64_t>(slowest, pushed);
    const uint64_t lead = round - slowest;
    uint64_t most = largest_lead_;
    while (most < lead && !largest_lead_.compare_exchange_weak(most, lead)) {
    }
    if (lead > mode_.largest_lead()) {
      fail(ErrorCode::kInternal, "{}: a rank is {} rounds ahead", mode_.name(), lead);
    }
  }

  void take_sample(const Worker& worker) {
    Sample sample;
    sample.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    for (size_t key = 0; key < worker.keys(); ++key) {
      const std::span<const float> values = worker.parameters(key);
      sample.parameters.insert(sample.parameters.end(), values.begin(), values.end());
    }
    uint64_t gradients = 0;
    for (const auto& pushed : pushed_) gradients += pushed == kLeft ? 0 : pushed.load();
    sample.rounds = static_cast<double>(gradients) / training_.world;
    samples_.push_back(std::move(sample));
  }

  // After the run, so that it takes none of its time.
  Result evaluate(Result result) const {
    Network network = digits::network(training_);
    for (const Sample& sample : samples_) {
      const Reached now{sample.seconds, sample.rounds};
      const bool last = &sample == &samples_.back();
      if (last || result.loss.seconds == kNotReached) {
        forward(network, data_.train, sample);
        result.last_loss = network.loss(data_.train.labels);
        if (result.loss.seconds == kNotReached && result.last_loss <= options_.loss) {
          result.loss = now;
        }
      }
      if (result.accuracy.seconds != kNotReached) continue;
      forward(network, data_.test, sample);
      const auto correct = static_cast<double>(network.correct(data_.test.labels));
      if (100 * correct >= options_.accuracy * static_cast<double>(data_.test.size())) {
        result.accuracy = now;
      }
    }
    return result;
  }

  static void forward(Network& network, const Samples& on, const Sample& sample) {
    const std::vector<size_t> offsets = key_offsets(network.keys());
    const auto values = [&](size_t key) {
      return std::span(sample.parameters).subspan(offsets[key], offsets[key + 1] - offsets[key]);
    };
    network.start(on.images);
    for (size_t l = 0; l < network.layers(); ++l) {
      network.forward(l, values(Network::weights_key(l)), values(Network::bias_key(l)));
    }
  }

  const Options& options_;
  const Training& training_;
  const Dataset& data_;
  const Mode mode_;
  WorkerOptions worker_;
  std::once_flag started_;
  Clock::time_point start_;
  std::atomic<uint64_t> taken_ = 0;            // gradients that somebody computes or has computed
  std::vector<std::atomic<uint64_t>> pushed_;  // per rank
  std::atomic<uint64_t> largest_lead_ = 0;
  std::vector<Sample> samples_;  // rank 0's
};

template <typename Field>
double median(const std::vector<Result>& results, Field field) {
  std::vector<double> values;
  for (const Result& result : results) values.push_back(field(result));
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Medians over the turns; a goal that was not reached took for ever.
Result median(const std::vector<Result>& results) {
  const auto of = [&](auto field) { return median(results, field); };
  Result result;
  result.rounds_per_second = of([](const Result& r) { return r.rounds_per_second; });
  result.loss = {of([](const Result& r) { return r.loss.seconds; }),
                 of([](const Result& r) { return r.loss.rounds; })};
  result.accuracy = {of([](const Result& r) { return r.accuracy.seconds; }),
                     of([](const Result& r) { return r.accuracy.rounds; })};
  result.last_loss = of([](const Result& r) { return r.last_loss; });
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
  fmt::print("{:<14}{:>10}{:>16}{:>8}{:>16}{:>8}{:>12}{:>6}\n", "", "rounds/s",
             fmt::format("s to loss {:g}", options.loss), "rounds",
             fmt::format("s to {:g}%", options.accuracy), "rounds", "last loss", "lead");
  for (size_t m = 0; m < modes.size(); ++m) {
    const Result& r = results[m];
    fmt::print("{:<14}{:>10.1f}{:>16}{:>8}{:>16}{:>8}{:>12.4f}{:>6.0f}\n", modes[m].name(),
               r.rounds_per_second, text_of(r.loss.seconds, 2), text_of(r.loss.rounds, 0),
               text_of(r.accuracy.seconds, 2), text_of(r.accuracy.rounds, 0), r.last_loss,
               r.largest_lead);
  }
}

nlohmann::json json_of(const Reached& reached) {
  if (reached.seconds == kNotReached) return nullptr;
  return {{"seconds", reached.seconds}, {"rounds", reached.rounds}};
}

nlohmann::json json_of(const Options& options, const std::vector<Mode>& modes,
                       const std::vector<Result>& results) {
  nlohmann::json rows = nlohmann::json::array();
  for (size_t m = 0; m < modes.size(); ++m) {
    rows.push_back({{"consistency", modes[m].consistency},
                    {"slack", modes[m].slack},
                    {"rounds_per_s", results[m].rounds_per_second},
                    {"to_loss", json_of(results[m].loss)},
                    {"to_accuracy", json_of(results[m].accuracy)},
                    {"last_loss", results[m].last_loss},
                    {"largest_lead", results[m].largest_lead}});
  }
  const Training& training = options.training;
  return {{"rows", rows},
          {"workers", training.world},
          {"rounds", training.rounds},
          {"batch", training.batch},
          {"lr", training.lr},
          {"momentum", training.momentum},
          {"hidden", training.hidden},
          {"seed", training.seed},
          {"turns", options.turns},
          {"compute_ms", options.compute_ms},
          {"delay_ms", options.delay_ms},
          {"straggler", options.straggler},
          {"loss", options.loss},
          {"accuracy", options.accuracy},
          {"transport", options.transport}};
}

// Turns of all modes alternate, so that a change of the machine's mood hits all.
std::vector<Result> measure(const Options& options, const std::vector<Mode>& modes) {
  const Dataset data = load(options.data);
  const OwnServer server(beside_this_program("phub"), options.transport, "");
  std::vector<std::vector<Result>> results(modes.size());
  for (uint32_t turn = 0; turn < options.turns; ++turn) {
    for (size_t m = 0; m < modes.size(); ++m) {
      WorkerOptions worker;
      worker.server = server.address();
      worker.transport = options.transport;
      worker.spec = job_spec(options.training, fmt::format("time-to-loss-{}-{}", turn, m));
      results[m].push_back(Run(options, data, modes[m], worker).measure());
    }
  }
  std::vector<Result> medians;
  for (const auto& of_mode : results) medians.push_back(median(of_mode));
  return medians;
}

void add_options(CLI::App& app, Options& options) {
  add_options(app, options.training);
  app.add_option("--modes", options.modes, "bsp, ssp:SLACK, async; separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--compute-ms", options.compute_ms, "A gradient takes this long")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--delay-ms", options.delay_ms, "And a straggler's so much longer")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--straggler", options.straggler,
                 "fixed: the last rank; random: every rank, in one of --world of its rounds")
      ->check(CLI::IsMember({"fixed", "random"}))
      ->capture_default_str();
  app.add_option("--loss", options.loss, "Mean over the training images that is good enough")
      ->capture_default_str();
  app.add_option("--accuracy", options.accuracy, "Percent of the held-out images, the same")
      ->capture_default_str();
  app.add_option("--turns", options.turns, "Alternated runs, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--transport", options.transport, "Of the workers: shm or tcp")
      ->capture_default_str();
  app.add_option("--data", options.data, "The digits as CSV")->capture_default_str();
  app.add_option("--json", options.json, "A file for the figures");
  app.add_flag("--tiny", options.tiny, "A smoke test: figures mean nothing");
}

int run(int argc, char** argv) {
  Options options;
  std::vector<Mode> modes;
  CLI::App app("Time to loss in lock-step and out of it, with a straggler, on handwritten digits.");
  add_options(app, options);
  try {
    app.parse(argc, argv);
    for (const std::string& word : options.modes) modes.push_back(parse_mode(word));
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  if (options.tiny) {
    options.training.rounds = 12;
    options.training.hidden = 16;
    options.turns = 1;
    options.compute_ms = 1;
    options.delay_ms = 3;
  }
  const std::vector<Result> results = measure(options, modes);
  print(options, modes, results);
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << json_of(options, modes, results).dump(2) << "\n";
    if (!file.flush()) fail(ErrorCode::kInvalid, "--json: cannot write '{}'", options.json);
  }
  return 0;
}

}  // namespace
}  // namespace phub::digits

int main(int argc, char** argv) {
  try {
    return phub::digits::run(argc, argv);
  } catch (const phub::Error& error) {
    fmt::print(stderr, "time_to_loss: {}\n", error.what());
    return 1;
  }
}

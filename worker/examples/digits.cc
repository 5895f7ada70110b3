// Trains a small network on the handwritten digits, data-parallel: start one per rank.
//
//   bin/phub serve --listen 127.0.0.1:7717 &
//   for rank in 0 1 2 3; do bin/digits --world 4 --rank $rank & done; wait
//
// The layers are exchanged while others are computed: a layer is pushed as soon as its gradient is
// there, last layer first, and waited for just before it is used again, first layer first.
//
// A rank that loses its server waits for it and joins again. It goes on as if nothing had happened:
// its batches follow from the round, and what it has summed up of them is saved with the job.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <thread>

#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"
#include "transport/error.h"
#include "worker/examples/digits_data.h"
#include "worker/examples/digits_model.h"
#include "worker/examples/digits_training.h"
#include "worker/examples/files.h"
#include "worker/examples/numbers.h"
#include "worker/examples/program.h"
#include "worker/worker.h"

namespace phub::digits {
namespace {

struct Options {
  WorkerOptions worker;
  Training training;
  std::string job = "digits";
  std::string consistency = "bsp";
  uint32_t slack = 0;
  std::string data = "build/data/digits.csv";
  std::string out;  // final parameters, f32, all keys one after another
  std::string log;  // membership log of the job, JSON
  uint64_t report_every = 100;
  uint32_t delay_ms = 0;
  bool show_connection = false;
};

Options parse(int argc, char** argv) {
  Options options;
  options.worker = options_from_environment();
  options.training.world = options.worker.spec.world_size;
  if (!options.worker.spec.name.empty()) options.job = options.worker.spec.name;
  CLI::App app("Trains a small network on handwritten digits, one process per rank.");
  add_options(app, options.training);
  app.add_option("--server", options.worker.server,
                 "HOST:PORT of phub serve, or several with commas")
      ->capture_default_str();
  app.add_option("--job", options.job, "Name of the job")->capture_default_str();
  app.add_option("--rank", options.worker.rank, "This process's rank; -1: the server chooses")
      ->capture_default_str();
  app.add_flag("--replace", options.worker.replace, "Take the rank over from who has it now");
  app.add_option("--data", options.data, "The digits as CSV")->capture_default_str();
  app.add_option("--out", options.out, "Write the final parameters to this file");
  app.add_option("--log", options.log, "Write the job's membership log to this file");
  app.add_option("--report-every", options.report_every, "Rounds between rank 0's reports")
      ->check(examples::positive())
      ->capture_default_str();
  app.add_option("--consistency", options.consistency, "bsp, ssp or async; of all ranks")
      ->check(CLI::IsMember({"bsp", "ssp", "async"}))
      ->capture_default_str();
  app.add_option("--slack", options.slack, "ssp: rounds that a rank may be ahead of the slowest")
      ->capture_default_str();
  app.add_option("--delay-ms", options.delay_ms, "Pretend that a gradient takes this much longer")
      ->capture_default_str();
  app.add_flag("--show-connection", options.show_connection, "Print over what this rank exchanges");
  examples::parse_or_exit(app, argc, argv);
  options.worker.spec = job_spec(options.training, options.job);
  options.worker.spec.consistency = options.consistency;
  options.worker.spec.slack = options.slack;
  return options;
}

// Of this rank's batches since the last report.
struct Losses {
  double sum = 0;
  uint64_t batches = 0;
};

// One rank's training loop.
class Trainer {
 public:
  Trainer(const Options& options, const Dataset& data)
      : options_(options),
        training_(options.training),
        data_(data),
        network_(network(options.training)),
        worker_(std::make_unique<Worker>(options_with_saver())) {}

  void run() {
    while (!runs_to_the_end()) worker_ = worker_->rejoin();
  }

 private:
  // From the job's present round on. False: its server died, and the job goes on from a checkpoint.
  bool runs_to_the_end() try {
    restore();
    worker_->broadcast(worker_->rank() == 0 ? network_.initial(training_.seed)
                                            : std::vector<float>());
    report_join();
    for (uint64_t round = worker_->first_round(); round <= training_.rounds; ++round) {
      train(round);
      if (worker_->rank() == 0 && round % options_.report_every == 0) report(round);
    }
    worker_->wait_all();
    examples::write_file(options_.out, parameters());
    if (!options_.log.empty()) {
      examples::write_file(
          options_.log,
          to_json(LogPage{.records = ControlClient(worker_->server(), options_.worker.token,
                                                   options_.worker.tls)
                                         .log(options_.job)}));
    }
    worker_->leave();
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kRewound) throw;
    fmt::print("rank {}: the server is gone; waiting for it\n", worker_->rank());
    std::fflush(stdout);
    return false;
  }

  // What a checkpoint has of this rank, beside the job's parameters.
  WorkerOptions options_with_saver() {
    WorkerOptions options = options_.worker;
    options.saver = [this](uint64_t) {
      const auto bytes = std::as_bytes(std::span(&losses_, 1));
      return RankState{{"losses", {bytes.begin(), bytes.end()}}};
    };
    return options;
  }
  void restore() {
    losses_ = {};
    const auto saved = worker_->restored("losses");
    if (!saved) return;  // the job begins, or is in progress
    if (saved->size() != sizeof losses_) {
      fail(ErrorCode::kInvalid,
           "the checkpoint of job '{}' has {} bytes of 'losses' of rank {}, not {}: another "
           "program saved it",
           options_.job, saved->size(), worker_->rank(), sizeof losses_);
    }
    std::memcpy(&losses_, saved->data(), sizeof losses_);
  }

  void train(uint64_t round) {
    if (options_.delay_ms > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(options_.delay_ms));
    }
    const Samples batch = digits::batch(data_.train, training_.seed, worker_->rank(),
                                        training_.world, round, training_.batch);
    forward(batch.images);
    if ((round - 1) % options_.report_every == 0) losses_ = {};
    losses_.sum += network_.loss(batch.labels);
    ++losses_.batches;
    for (size_t layer = network_.layers(); layer-- > 0;) {
      const size_t weights = Network::weights_key(layer);
      const size_t bias = Network::bias_key(layer);
      network_.backward(layer, worker_->parameters(weights), worker_->gradient(weights),
                        worker_->gradient(bias));
      // The first layer is needed first in the next round.
      const auto priority = static_cast<int32_t>(network_.layers() - layer);
      worker_->push(weights, priority);
      worker_->push(bias, priority);
    }
  }

  void forward(const Eigen::MatrixXf& images) {
    network_.start(images);
    for (size_t layer = 0; layer < network_.layers(); ++layer) {
      const size_t weights = Network::weights_key(layer);
      const size_t bias = Network::bias_key(layer);
      worker_->wait(weights);
      worker_->wait(bias);
      network_.forward(layer, worker_->parameters(weights), worker_->parameters(bias));
    }
  }

  void report_join() {
    if (worker_->first_round() > 1) {
      fmt::print("rank {} (incarnation {}) joins in round {}\n", worker_->rank(),
                 worker_->incarnation(), worker_->first_round());
    }
    if (options_.show_connection) {
      fmt::print("rank {} exchanges over {}\n", worker_->rank(), worker_->connection());
    }
    std::fflush(stdout);
  }

  void report(uint64_t round) {
    forward(data_.test.images);
    const double accuracy = 100.0 * static_cast<double>(network_.correct(data_.test.labels)) /
                            static_cast<double>(data_.test.size());
    fmt::print("round {:>6}   loss {:.4f}   test accuracy {:.1f}%\n", round,
               losses_.sum / static_cast<double>(losses_.batches), accuracy);
    std::fflush(stdout);
  }

  std::string parameters() {
    std::string bytes;
    for (size_t key = 0; key < worker_->keys(); ++key) {
      const std::span<const std::byte> values = worker_->parameter_bytes(key);
      bytes.append(reinterpret_cast<const char*>(values.data()), values.size());
    }
    return bytes;
  }

  const Options& options_;
  const Training& training_;
  const Dataset& data_;
  Network network_;
  Losses losses_;
  std::unique_ptr<Worker> worker_;
};

}  // namespace
}  // namespace phub::digits

int main(int argc, char** argv) {
  return phub::examples::status_of("digits", [&] {
    const phub::digits::Options options = phub::digits::parse(argc, argv);
    phub::examples::check_can_write(options.out);
    phub::examples::check_can_write(options.log);
    const phub::digits::Dataset data = phub::digits::load(options.data);
    phub::digits::Trainer(options, data).run();
  });
}

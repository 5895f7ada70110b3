// The common part of every application: its options, and the loop of the training.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "worker/examples/geeps/model.h"
#include "worker/worker.h"

namespace CLI {
class App;
}

namespace phub::examples {

struct TrainingOptions {
  WorkerOptions worker;     // server, job, rank, world size
  bool standalone = false;  // without a box
  bool store = false;       // the parameters lie in a store of rows (store_exchange.h)
  std::string consistency = "bsp";
  uint32_t slack = 0;

  uint32_t devices = 1;  // those of this process, with a thread each
  std::string device = "host";
  std::string budget = "100%";  // device memory of each device: see budget_bytes()
  double bandwidth = 0;         // bytes per second of the host device's copies
  uint32_t latency_us = 0;      // added to each copy
  std::string gather = "virtual";
  bool prefetch = true;
  bool peak_first = false;
  uint32_t partitions = 1;
  bool poison = false;
  std::string trace;

  Share share;  // that of this process; its samples and mini-batches are those of a device
  std::string optimizer = "sgd";
  std::vector<std::string> hyper;  // NAME=VALUE, beside the learning rate
  double lr = 0.1, lr_decay = 1;
  uint64_t lr_every = 0;  // clocks; 0: always the same
  uint64_t clocks = 500;
  uint64_t report_every = 100;

  std::string out;         // the final parameters, f32, all tables one after another
  std::string checkpoint;  // %r is the rank
  uint64_t checkpoint_every = 0;
  bool resume = false;
};

// Adds these to the application's own, and reads the command line; where that asks for help, or is
// wrong, the process ends. `options` has the defaults.
void parse(CLI::App& app, TrainingOptions& options, int argc, char** argv);

using MakeModel = std::function<std::unique_ptr<Model>(const Share& share)>;

// Trains on all devices, prints reports, and at the end the digest of the parameters' bits. `name`
// is the name of the model, for the checkpoint.
void train(const TrainingOptions& options, const std::string& name, const MakeModel& make);

}  // namespace phub::examples

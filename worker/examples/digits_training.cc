#include "worker/examples/digits_training.h"

#include <CLI/CLI.hpp>

#include "worker/examples/numbers.h"

namespace phub::digits {

void add_options(CLI::App& app, Training& training) {
  app.add_option("--world", training.world, "Ranks, and shards of the data")
      ->check(CLI::Range(1u, 64u))
      ->capture_default_str();
  app.add_option("--rounds", training.rounds, "Mini-batches of every rank")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 32))
      ->capture_default_str();
  app.add_option("--seed", training.seed, "Of the initial parameters and the batches")
      ->capture_default_str();
  app.add_option("--hidden", training.hidden, "Units of the hidden layer")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--batch", training.batch, "Images per rank and round")
      ->check(CLI::Range(1u, 4096u))
      ->capture_default_str();
  app.add_option("--lr", training.lr, "Learning rate")
      ->check(examples::positive())
      ->capture_default_str();
  app.add_option("--momentum", training.momentum, "Nesterov momentum")
      ->check(examples::between(0, 1))
      ->capture_default_str();
  app.add_option("--chunk-elements", training.chunk_elements, "Elements per chunk")
      ->capture_default_str();
}

Network network(const Training& training) { return Network({kPixels, training.hidden, kClasses}); }

JobSpec job_spec(const Training& training, const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.keys = network(training).keys();
  spec.world_size = training.world;
  spec.chunk_elements = training.chunk_elements;
  spec.optimizer = "nesterov";
  spec.hyper = {{"lr", training.lr}, {"momentum", training.momentum}};
  spec.reduction = "mean";
  spec.initial = "broadcast";
  spec.on_loss = "shrink";
  return spec;
}

}  // namespace phub::digits

// The options on which all ranks of a digits run, and the reference that recomputes it, must agree.
#pragma once

#include <cstdint>
#include <string>

#include "transport/control/job_spec.h"
#include "worker/examples/digits_model.h"

namespace CLI {
class App;
}

namespace phub::digits {

struct Training {
  uint32_t world = 4;  // ranks, and shards of the data
  uint64_t rounds = 1000;
  uint64_t seed = 1;
  int hidden = 256;
  uint32_t batch = 16;  // images per rank and round
  double lr = 0.05;
  double momentum = 0.9;
  uint32_t chunk_elements = 2048;  // small, so that this small model has several chunks
};

// Adds one option per field.
void add_options(CLI::App& app, Training& training);

Network network(const Training& training);

// Nesterov on the server, the mean over the ranks that took part, initial parameters from rank 0.
// The job goes on without a lost rank until a new process takes it over.
JobSpec job_spec(const Training& training, const std::string& name);

}  // namespace phub::digits

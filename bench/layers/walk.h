// A rank's training of a network in which computing takes a stated time and nothing is computed:
// forward through the layers, backward, and an exchange of the size of the layers' gradients (Zhang
// et al., Poseidon, 2015, section 4.2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phub/plan/layers.h"
#include "worker/factors.h"
#include "worker/worker.h"

namespace phub::layers {

struct WalkOptions {
  double compute_s = 1;  // an iteration, a third of it forward; shared out by the connections
  // True: a layer is pushed when its backward is done, and waited for before its next forward
  // (wait-free backpropagation, Alg. 2). False: all are pushed when the last backward is done, and
  // all are waited for.
  bool overlap = true;
  bool first_layers_first = false;  // needed first, sent first; false: ready first, sent first
  std::vector<size_t> as_factors;   // layers whose matrices are exchanged as factors
  uint32_t samples = 1;             // one rank's, in an iteration
  // The speed of making the products of factors. 0: they are made, on threads beside the computing
  // ones, as on the host's processors. Otherwise they take the time of so many FLOP/s of the
  // layers' processor, and are not made.
  double product_flops = 0;
  uint64_t warmup = 1, iterations = 3;
};

struct WalkResult {
  double iteration_s = 0;  // mean of the measured ones, each from the end of a backward to the next
  // Layers, of all measured iterations, whose push began before the backward of the layer below
  // ended, and whose results were back before the iteration's backward ended. `layers` counts those
  // that had a layer below.
  uint64_t pushed_early = 0, back_early = 0, layers = 0;
  uint64_t wrong = 0;  // results that cannot be sums of the ranks' gradients
};

// The job: sums of the gradients, and keys for the factors. Throws Error(kInvalid): as
// add_factor_keys().
JobSpec job_of(const Net& net, const WalkOptions& options, JobSpec spec);

// Both ends of what a rank sends in a round (1, 2, …) are this times rank + 1. It differs from the
// round before, so a result of that one is seen.
inline float scale_of(uint64_t round) { return static_cast<float>(1 + round % 8); }

// What exchanges the layers' gradients. Called by one thread, for a layer push() and wait() in
// turn.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // Sends the layer's gradient, and does not wait. `layer` is an index into Net::layers.
  virtual void push(size_t layer) = 0;
  // Returns when the result of the last push is here: at once if nothing was pushed since. The
  // seconds that the rank then computes to have its gradient.
  virtual double wait(size_t layer) = 0;
  // Whether the result of the last push is here, before anyone waited for it.
  virtual bool is_back(size_t layer) = 0;
  // Results so far that cannot be sums of the ranks' gradients.
  virtual uint64_t wrong() const = 0;
};

// Runs all iterations of the job's rank. Throws Error.
WalkResult walk(const Net& net, const WalkOptions& options, Worker& worker);
// The same with another exchange. Throws what that throws.
WalkResult walk(const Net& net, const WalkOptions& options, Exchange& exchange);
// Runs without an exchange, as a single node does.
WalkResult walk_alone(const Net& net, const WalkOptions& options);

// FLOP of a rank for the matrix of a layer: it multiplies the factors of all ranks.
double product_flop(const Net& net, size_t layer, uint32_t ranks, uint32_t samples);

}  // namespace phub::layers

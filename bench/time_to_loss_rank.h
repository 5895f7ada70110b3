// A rank of time_to_loss, which computes the gradients of its rounds, and exchanges them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "worker/examples/digits_data.h"
#include "worker/examples/digits_training.h"
#include "worker/worker.h"

namespace phub::digits {

class Rank {
 public:
  virtual ~Rank() = default;

  virtual Worker& worker() = 0;
  // The job's first parameters, for rank 0.
  virtual std::vector<float> initial() const = 0;
  // Called after broadcast().
  virtual void begin() {}
  // Computes a gradient of the round, which takes at least so long, calls `computed`, and pushes
  // it. Returns a round: the rank may begin the next one.
  virtual uint64_t train(uint64_t round, std::chrono::nanoseconds time,
                         const std::function<void()>& computed) = 0;
  // The parameters that the rank would use next, as a Network's keys have them. REQUIRES: it is
  // rank 0.
  virtual std::vector<float> parameters() const = 0;
  // Waits for the results of its pushes.
  virtual void end() {}
};

// A rank over the plain client: it waits for all results of a round before the next one; if it is
// `late`, for those of the round before it, and this one's travel while it computes.
std::unique_ptr<Rank> make_plain_rank(const Training& training, const Dataset& data,
                                      const WorkerOptions& options, bool late);

// The same network over a GeePS cache (worker/geeps/cache.h) in a host device with so much memory,
// as the applications' --budget has it: a layer is pushed when its gradient is there, and waited
// for when it is read, as long as the consistency demands; if it is `late`, its reads may be a
// clock older than that.
std::unique_ptr<Rank> make_cached_rank(const Training& training, const Dataset& data,
                                       const WorkerOptions& options, const std::string& budget,
                                       bool late);

}  // namespace phub::digits

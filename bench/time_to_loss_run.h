// A training on the digits with a straggler, in lock-step or not, and the time until it was good
// enough.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "worker/examples/digits_data.h"
#include "worker/examples/digits_training.h"
#include "worker/worker.h"

namespace phub::digits {

struct Mode {
  std::string consistency;
  uint32_t slack = 0;
  // A round of the slack is under way while the next gradient is computed.
  bool late = false;
  std::string order = "priority";  // the order of chunks that wait for a budget
  uint32_t carry_over = 0;         // rounds

  std::string name() const {
    std::string text = consistency == "ssp" ? fmt::format("ssp, slack {}", slack) : consistency;
    if (late) text += ", late";
    if (order != "priority") text += ", " + order;
    return carry_over > 0 ? text + ", carried" : text;
  }
  // What the box is told: a round that is under way at the rank is not the box's to allow.
  uint32_t job_slack() const { return late && slack > 0 ? slack - 1 : slack; }
  uint64_t largest_lead() const {
    return consistency == "async" ? ~uint64_t{0} : uint64_t{job_slack()} + late;
  }
};

// The training and its goals.
struct TimeToLoss {
  Training training = {.rounds = 300};
  double compute_ms = 6;  // the time of a gradient
  double delay_ms = 12;   // so much more for a straggler
  bool random = false;    // true: each rank is a straggler at times; false: the last rank always
  double loss = 0.1;      // mean over the training images
  double accuracy = 95;   // percent of the held-out images
  std::string cache;      // memory of each rank's GeePS cache (time_to_loss_rank.h); empty: none
};

inline constexpr double kNotReached = std::numeric_limits<double>::infinity();

// The point at which a goal was reached.
struct Reached {
  double seconds = kNotReached;
  double rounds = kNotReached;
};

// The accuracy on the held-out images, after some time.
struct Accuracy {
  double seconds;
  double rounds;
  double percent;
};

struct Result {
  double rounds_per_second = 0;
  Reached loss, accuracy;
  double last_loss = 0;
  double largest_lead = 0;
  double carried = 0;                // the fraction of rank 0's pushed chunks that was carried over
  std::vector<Accuracy> accuracies;  // after each of rank 0's rounds
};

// Runs a job named `worker.spec.name` with a thread per rank, until the ranks together have
// computed the gradients of `training.rounds` rounds. Rethrows an exception of a rank, and throws
// Error(kInternal) if a rank is further ahead than the slack.
Result train(const TimeToLoss& options, const Dataset& data, const Mode& mode,
             const WorkerOptions& worker);

}  // namespace phub::digits

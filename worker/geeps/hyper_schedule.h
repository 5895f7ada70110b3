// The hyperparameters of every round: what a job begins with, its schedule, and later changes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "transport/job_spec.h"

namespace phub::geeps {

// Not thread-safe. Errors are Error(kInvalid), and change nothing.
class HyperSchedule {
 public:
  HyperSchedule(kernels::Optimizer optimizer, const JobSpec& spec);

  const kernels::Hyper& at(uint64_t round) const;
  // From `round` on, after what the schedule says of that round. Rounds before `oldest` are not
  // asked for any more. REQUIRES: oldest <= round.
  void change(uint64_t round, const std::map<std::string, double>& values, uint64_t oldest);

 private:
  void check(const std::map<std::string, double>& values) const;
  void lay_out();

  const kernels::Optimizer optimizer_;
  kernels::Hyper first_;
  std::vector<HyperChange> changes_;                         // by ascending round
  std::vector<std::pair<uint64_t, kernels::Hyper>> rounds_;  // from each of these rounds on
};

}  // namespace phub::geeps

// From the names and numbers of a job to the hyperparameters of every round and key.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "phub/core_messages.h"
#include "transport/job_spec.h"

namespace phub {

// Throws Error(kInvalid) that lists the known names, or says which value is out of range.
void check_hyper(const std::map<std::string, double>& values);

// Keys with the same learning-rate and decay scales share a class.
struct KeyClasses {
  struct Scales {
    double lr = 1, decay = 1;
  };
  std::vector<Scales> classes;
  std::vector<uint16_t> of_key;
};
KeyClasses key_classes(const JobSpec& spec);  // throws kInvalid beyond 65,535 classes

// The whole table, ascending, from round 0 on. Changes apply in the order of their rounds; those of
// one round in the order given.
std::vector<HyperVersion> hyper_table(const JobSpec& spec, kernels::Optimizer optimizer,
                                      const KeyClasses& classes,
                                      const std::vector<HyperChange>& changes);

}  // namespace phub

// A job whose parameters are what they were, less the updates.
#pragma once

#include <span>
#include <string>

#include "transport/control/job_spec.h"
#include "worker/geeps/cache.h"

namespace phub::geeps::testing {

inline JobSpec plain_job(std::span<const TableSpec> tables, const std::string& name = "plain") {
  JobSpec job;
  job.name = name;
  job.keys = keys_of(tables);
  job.optimizer = "sgd";
  job.hyper = {{"lr", 1}};
  job.initial = "zeros";
  return job;
}

}  // namespace phub::geeps::testing

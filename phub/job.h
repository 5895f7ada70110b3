// A job on the box: its plan, memory, link, the cores' parts of it, and its membership. Control
// thread, but for what the cores were handed; it is made and freed beside that thread, which takes
// long. All memory is there when the constructor returns.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "numa/memory.h"
#include "numa/topology.h"
#include "phub/core_job.h"
#include "phub/hyper.h"
#include "phub/membership.h"
#include "phub/plan.h"
#include "transport/job_spec.h"
#include "transport/nic.h"

namespace phub {

// Fills in what follows from the rest (max_ranks) and checks the words that validate() cannot know:
// optimizer, formats, hyperparameters. Throws Error(kInvalid).
void complete_spec(JobSpec& spec);

// All nodes together; what is asked for before anything is allocated.
NodeMemory total_memory(const Plan& plan, const JobSpec& spec);

class Job {
 public:
  // REQUIRES: complete_spec(spec). Throws Error.
  Job(const JobSpec& spec, Plan plan, Nic& nic, kernels::Store store);

  const JobSpec& spec() const { return spec_; }
  const Plan& plan() const { return plan_; }
  const NodeMemory& memory() const { return memory_; }
  BoxLink& link() { return *link_; }
  Membership& membership() { return membership_; }
  // The parts of the job by core of the plan, which may leave cores of the server out.
  CoreJob& core_job(uint32_t core) { return *core_jobs_[core]; }
  uint32_t cores() const { return static_cast<uint32_t>(core_jobs_.size()); }

  HyperTable& hyper() { return hyper_; }
  // What has grown since it was made: the log, and changes of hyperparameters.
  uint64_t grown_bytes() const { return membership_.log().bytes() + hyper_.bytes(); }

  // "key 'conv1.weight', elements 0 to 8191": for error messages.
  std::string where(uint32_t chunk) const;

 private:
  std::vector<CoreChunk> chunks_of(uint32_t core) const;

  const JobSpec spec_;
  const Plan plan_;
  const kernels::Optimizer optimizer_;
  const NodeMemory memory_;
  const KeyClasses classes_;
  HyperTable hyper_;
  std::unique_ptr<BoxLink> link_;
  numa::Memory parameters_;
  numa::Memory state0_;
  numa::Memory state1_;
  std::vector<std::unique_ptr<CoreJob>> core_jobs_;
  Membership membership_;
};

}  // namespace phub

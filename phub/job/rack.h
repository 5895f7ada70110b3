// A box with a parent is a *rack*: it sums the gradients of one group of a job's ranks, and is one
// rank of the parent's job with them. Its workers join with the job as a whole, and with their
// ranks in it. The parent gets the same job with each group of the last level as one rank, so that
// the order of additions is that of one box.
//
// A parent may have a parent itself: then the ranks of its job are racks, and a group of them is
// one rank further up.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "phub/plan/choices.h"
#include "transport/control/job_spec.h"
#include "transport/control/rank_tree.h"
#include "transport/layout.h"
#include "transport/transport.h"

namespace phub {

// What a rack's job is made from, beside its spec and plan, once the parent has admitted it.
struct Rack {
  RankRange ranks;           // of the job, which it serves
  Layout above;              // of the parent's job
  uint64_t first_round = 1;  // the parent's, in which the rack begins
  uint32_t incarnation = 1;  // the rack's at the parent
  // The connection to the parent, over the sizes and threads of this layout. Builder's thread.
  std::function<std::unique_ptr<WorkerLink>(const LinkLayout& layout)> connect;
};

// The rank at the parent with which a rank of the job is served; -1: whichever is free.
int32_t rank_above(const JobSpec& spec, int32_t rank);
// The ranks of the job that are the parent's rank together. Throws Error(kInternal): there is no
// such rank.
RankRange ranks_below(const JobSpec& spec, uint32_t rank_above);
// Of the training, those that a rank of the job stands for: itself, or those of the rack.
RankRange ranks_of_training(const JobSpec& spec, uint32_t rank);
// What the parent's job is. REQUIRES: check_rules(spec, Feature::kBelowParent).
JobSpec spec_above(const JobSpec& spec);

// What is left to do for a rack itself: sums. (Whether rounds are gated can still be seen in it.)
JobSpec spec_of_sums(JobSpec spec);

}  // namespace phub

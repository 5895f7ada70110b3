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

#include "phub/job_rules.h"
#include "transport/control/job_spec.h"
#include "transport/control/rank_tree.h"
#include "transport/layout.h"
#include "transport/transport.h"

namespace phub {

// The data from which a rack's job is made, beside its spec and plan, once the parent has admitted
// it.
struct Rack {
  RankRange ranks;           // the job's ranks that it serves
  Layout above;              // the layout of the parent's job
  uint64_t first_round = 1;  // the parent's, in which the rack begins
  uint32_t incarnation = 1;  // the rack's at the parent
  // The connection to the parent, over the sizes and threads of this layout. Builder's thread.
  std::function<std::unique_ptr<WorkerLink>(const LinkLayout& layout)> connect;
};

// The rank at the parent under which a rank of the job is served; -1: any that is free.
int32_t rank_above(const JobSpec& spec, int32_t rank);
// The ranks of the job that together are this rank of the parent's. Throws Error(kInternal) if
// there is no such rank.
RankRange ranks_below(const JobSpec& spec, uint32_t rank_above);
// The training's ranks for which a rank of the job stands: itself, or those of the rack.
RankRange ranks_of_training(const JobSpec& spec, uint32_t rank);
// Returns the spec of the parent's job. REQUIRES: check_rules(spec, Feature::kBelowParent).
JobSpec spec_above(const JobSpec& spec);

// Returns the spec of a rack's own work, which is to sum.
JobSpec spec_of_sums(JobSpec spec);
// Returns its rules. Rounds are gated as those of `spec` are: the parent's optimizer may need it.
JobRules rules_of_sums(const JobSpec& spec);

}  // namespace phub

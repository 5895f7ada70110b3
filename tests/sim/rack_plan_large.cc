// Plans of a thousand ranks over three levels of boxes.
#include <algorithm>
#include <iterator>

#include "tests/sim/rack_plan.h"

namespace phub::sim {

// Five racks of ten racks of twenty ranks.
RackPlan thousand_ranks(uint64_t seed) {
  RackPlan plan;
  plan.seed = seed;
  plan.clean = true;
  plan.cores = 2;
  plan.net.seed = seed;
  plan.shards.assign(8, 1);
  JobPlan job;
  job.seed = seed;
  job.rounds = 2;
  job.lockstep = true;
  job.null_chance = 0.2;
  job.spec.name = "large";
  job.spec.chunk_elements = 32;
  job.spec.keys = {{.name = "a", .elements = 400}, {.name = "b", .elements = 1}};
  job.spec.world_size = job.spec.max_ranks = 1000;
  job.spec.optimizer = "adam";
  job.spec.reduction = "mean";
  job.spec.on_loss = "fail";
  for (int rack = 0; rack < 5; ++rack) {
    job.spec.groups += rack == 0 ? "(20" : ",(20";
    for (int below = 1; below < 10; ++below) job.spec.groups += ",20";
    job.spec.groups += ")";
  }
  put_over_racks(job, 2, 1, plan);
  plan.jobs.push_back(std::move(job));
  return plan;
}

RackPlan make_large_plan(uint64_t seed) {
  SimRandom random(seed ^ 0x6c61726765ull);
  RackPlan plan = thousand_ranks(seed);
  plan.clean = false;
  plan.net.duplicate = 0.05;
  constexpr double kLoss[] = {0, 0, 0.001, 0.01}, kBreaks[] = {0, 0.0001}, kControl[] = {0, 0.005};
  plan.net.loss = kLoss[random.below(std::size(kLoss))];
  plan.net.break_chance = kBreaks[random.below(std::size(kBreaks))];
  plan.control_loss = kControl[random.below(std::size(kControl))];
  plan.net.overtake = random.chance(0.5) ? 0.5 : 0;
  plan.near_chance = random.chance(0.5) ? 0.3 : 0;
  JobPlan& job = plan.jobs.front();
  job.rounds = random.between(3, 8);
  job.spec.on_loss = random.chance(0.8) ? "shrink" : "wait";
  job.spec.lease_ms = 300;
  job.spec.progress_limit_ms = job.spec.wait_limit_ms = job.spec.join_limit_ms = 2000;
  if (random.chance(0.6)) move_states(random, job);
  for (uint64_t i = random.between(5, 20); i > 0; --i) {
    job.faults.push_back(some_fault(random, job));
  }
  const uint64_t pushes = job.rounds * job.spec.keys.size() * job.spec.world_size;
  if (random.chance(0.5)) plan.checkpoint_every = random.between(1, 3);
  if (random.chance(0.7)) job.saver_chance = random.chance(0.5) ? 1 : 0.1;
  if (plan.checkpoint_every > 0 && random.chance(0.6)) {
    plan.box_faults.push_back({.after_pushes = random.below(pushes),
                               .delay_ns = random.below(3'000'000),
                               .power = random.chance(0.5),
                               .restart_ms = random.below(50)});
  }
  if (random.chance(0.2)) {
    plan.shard_faults.push_back({.after_pushes = random.below(pushes),
                                 .shard = random.below(8),
                                 .hangs = random.chance(0.5),
                                 .ms = random.between(1, 100)});
  }
  if (random.chance(0.8)) add_rack_faults(random, plan);
  for (RackFault& fault : plan.rack_faults) {
    fault.after_pushes = random.below(pushes);
    fault.box = random.below(plan.racks.size());
  }
  std::ranges::sort(plan.rack_faults, {}, &RackFault::after_pushes);
  return plan;
}

}  // namespace phub::sim

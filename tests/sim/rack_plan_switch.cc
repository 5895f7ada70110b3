// Plans of racks with a switch that adds.
#include <algorithm>

#include "tests/sim/rack_plan.h"

namespace phub::sim {
namespace {

double some_share(SimRandom& random) {
  constexpr double kShares[] = {0, 0, 0.01, 0.1, 0.3};
  return kShares[random.below(std::size(kShares))];
}

// What a switch does not add, and a job beside it has.
void send_directly(JobSpec& spec) {
  if (spec.gradient_dtype == "int32") spec.gradient_dtype = "int8";
  for (KeySpec& key : spec.keys) {
    if (key.format == "int32") key.format = "int8";
  }
}

// What a job behind a switch cannot have is left out (check_switched()).
void take_to_int32(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  spec.groups.clear();
  spec.unused = "zero";
  if (spec.on_nonfinite == "exclude") spec.on_nonfinite = "stop";
  job.interest.clear();
  spec.branches = 0;
  job.branch_calls.clear();
  job.digits = false;
  // Mostly it goes wrong after some rounds only: the first one that sends directly ends it for a
  // while.
  if (random.chance(0.7)) {
    const uint64_t rounds = random.between(3, 15), pushes = rounds * spec.keys.size();
    job.rounds += rounds;
    for (Fault& fault : job.faults) fault.after_pushes += random.below(pushes);
    for (uint64_t& after : job.late_after_pushes) after += random.below(pushes * spec.world_size);
  }
  // Chunks of one part and of several.
  if (random.chance(0.5)) {
    spec.chunk_elements = random.chance(0.5) ? 512 : 1024;
    for (KeySpec& key : spec.keys) {
      const bool plain = !is_factors(key) && !is_rows(key);
      if (plain) key.elements = random.between(1, 3000), key.shape.clear();
    }
  }
}

}  // namespace

void put_behind_switch(SimRandom& random, RackPlan& plan) {
  JobPlan& job = plan.jobs.front();
  JobSpec& spec = job.spec;
  const auto can_be = [](const KeySpec& key) { return !is_factors(key) && !is_rows(key); };
  if (plan.net.shared_memory || !plan.racks.empty()) return;
  if (!job.lock_step() || spec.optimizer == "fold" || std::ranges::none_of(spec.keys, can_be)) {
    return;
  }
  plan.shards.clear();  // its sums go to one box
  plan.shard_faults.clear();
  for (JobPlan& other : plan.jobs) send_directly(other.spec);
  take_to_int32(random, job);
  std::ranges::find_if(spec.keys, can_be)->format = "int32";
  for (KeySpec& key : spec.keys) {
    if (can_be(key) && random.chance(0.7)) key.format = "int32";
  }
  plan.worker_bytes_per_s = 0;  // a link with a budget has no switch
  plan.net.overtake = 0;  // nor has one that does not keep the order of a queue, as libfabric's
  SwitchPlan& of = plan.through_switch.emplace();
  // Each core that takes sums has one at least.
  of.told = static_cast<uint16_t>(random.between(8, 64));
  of.slots = random.chance(0.1) ? static_cast<uint16_t>(random.between(1, of.told)) : of.told;
  of.loss = some_share(random);
  of.twice = some_share(random);
  of.late = some_share(random);
  of.no_port = random.chance(0.05) ? 0.2 : 0;
  of.retry_ns = random.between(200'000, 2'000'000);
  for (uint64_t i = random.chance(0.5) ? random.between(1, 4) : 0; i > 0; --i) {
    constexpr SwitchFault::Kind kKinds[] = {SwitchFault::kForgets, SwitchFault::kForgets,
                                            SwitchFault::kPasses, SwitchFault::kSilent};
    of.faults.push_back({.kind = kKinds[random.below(std::size(kKinds))],
                         .after_pushes = random.below(300),
                         .ms = random.between(1, random.chance(0.5) ? 10 : 200)});
  }
  std::ranges::sort(of.faults, {}, &SwitchFault::after_pushes);
  of.rounds_between = random.chance(0.8) ? static_cast<uint32_t>(random.between(1, 12)) : 0;
}

}  // namespace phub::sim

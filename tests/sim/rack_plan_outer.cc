// Plans of jobs of up to 64 learners that exchange now and then, with a quorum, and lose and get
// ranks meanwhile.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "tests/sim/rack_plan.h"
#include "transport/control/rules.h"
#include "transport/error.h"

namespace phub::sim {
namespace {

constexpr uint32_t kLearners = 64, kMostRanks = 72;

template <typename T, size_t n>
const T& pick(SimRandom& random, const T (&choices)[n]) {
  return choices[random.below(n)];
}

bool is_valid(const JobSpec& spec) {
  try {
    validate(spec);
    check_rules(spec);
  } catch (const Error&) {
    return false;
  }
  return true;
}

// Takes the change if the job may have it.
template <typename Change>
void change(JobSpec& spec, const Change& make) {
  JobSpec changed = spec;
  make(changed);
  if (is_valid(changed)) spec = changed;
}

void draw_keys(SimRandom& random, JobSpec& spec) {
  const auto fragments = static_cast<uint32_t>(random.chance(0.3) ? 1 : random.between(2, 8));
  const auto keys = static_cast<uint32_t>(fragments + random.below(3));
  for (uint32_t k = 0; k < keys; ++k) {
    spec.keys.push_back({.name = fmt::format("key{}", k), .elements = random.between(1, 48)});
    KeySpec& key = spec.keys.back();
    key.fragment = k < fragments ? k : static_cast<uint32_t>(random.below(fragments));
    if (random.chance(0.2)) key.lr_scale = 0.5;
  }
}

void draw_formats(SimRandom& random, JobSpec& spec) {
  const auto some = [&random] {
    return pick<std::string>(random, {"f32", "f32", "int8", "int4", "topk", "bf16"});
  };
  const std::string of_all = some();
  change(spec, [&](JobSpec& with) { with.gradient_dtype = of_all; });
  for (size_t k = 0; k < spec.keys.size() && random.chance(0.3); ++k) {
    const std::string format = some();
    change(spec, [&](JobSpec& with) { with.keys[k].format = format; });
  }
  if (random.chance(0.3)) {
    const auto format = pick<std::string>(random, {"int8", "int4", "fp8-e4m3"});
    change(spec, [&](JobSpec& with) { with.parameter_dtype = format; });
  }
  const bool is_stochastic = random.chance(0.5);
  change(spec, [&](JobSpec& with) { with.rounding = is_stochastic ? "stochastic" : "nearest"; });
}

void draw_steps(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  spec.optimizer = pick<std::string>(
      random, {"nesterov", "nesterov", "nesterov", "nesterov", "nesterov", "sgd", "adam", "none"});
  if (spec.optimizer == "nesterov") spec.hyper = {{"lr", 0.7}, {"momentum", 0.9}};
  spec.reduction = random.chance(0.7) ? "mean" : "sum";
  spec.initial = random.chance(0.5) ? "broadcast" : "zeros";
  const bool weighs = random.chance(0.5);
  change(spec, [&](JobSpec& with) { with.weights = weighs ? Weights::kYes : Weights::kNo; });
}

void draw_quorum(SimRandom& random, JobSpec& spec) {
  const uint32_t most = spec.world_size;
  spec.quorum = pick(random, {1u, most, static_cast<uint32_t>(random.between(1, most)),
                              static_cast<uint32_t>(random.between((most + 1) / 2, most))});
  spec.grace_ms =
      static_cast<uint32_t>(pick(random, {uint64_t{0}, random.below(20), random.below(1000)}));
  if (random.chance(0.3)) spec.grace = Grace::kAuto;
  const double decay = pick(random, {1.0, 1.0, 0.9, 0.5, 0.0});
  change(spec, [&](JobSpec& with) { with.late_decay = decay; });
}

void draw_course(SimRandom& random, JobPlan& job) {
  OuterPlan& outer = job.outer.emplace();
  const uint32_t fragments = fragments_of(job.spec);
  outer.every = random.between(fragments, 16);
  outer.delay = random.chance(0.4) ? 0 : random.below(outer.every);
  outer.step_ms = random.between(20, 400);
  outer.slowness = random.between(2, 5);
  const auto rank = [&] { return static_cast<uint32_t>(random.below(job.spec.world_size)); };
  for (uint64_t i = random.below(5); i > 0; --i) outer.slow.insert(rank());
  if (!random.chance(0.3)) return;
  outer.slow_link_bytes_per_s = random.between(500, 20'000);
  for (uint64_t i = random.between(1, 3); i > 0; --i) outer.slow_links.insert(rank());
}

void draw_limits(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  spec.on_loss = "shrink";
  spec.lease_ms = static_cast<uint32_t>(random.between(1000, 4000));
  // Longer than the slowest takes: it is waited for where the quorum is all ranks.
  spec.progress_limit_ms = static_cast<uint32_t>(3 * job.outer->longest_cycle_ms() + 5'000);
  spec.wait_limit_ms = spec.join_limit_ms = 10'000;
}

Partition some_partition(SimRandom& random, const JobPlan& job, uint64_t pushes) {
  Partition cut{
      .kind = pick(random, {Partition::kCut, Partition::kCut, Partition::kMute, Partition::kDeaf}),
      .after_pushes = random.below(pushes),
      .ms = random.between(20, 3ull * job.spec.lease_ms),
      .heals = random.chance(0.7)};
  cut.followed = !cut.heals && random.chance(0.5);
  const uint64_t world = job.spec.world_size;
  uint64_t ranks = pick(random, {uint64_t{1}, random.between(1, world), (world + 1) / 2});
  for (uint64_t rank = random.below(world); ranks > 0; --ranks) {
    cut.ranks.insert(static_cast<uint32_t>(rank++ % world));
  }
  return cut;
}

void draw_faults(SimRandom& random, JobPlan& job) {
  const uint64_t keys = job.spec.keys.size();
  const uint64_t pushes = job.rounds * keys * job.spec.world_size;
  for (uint64_t i = random.chance(0.2) ? 0 : random.between(1, 12); i > 0; --i) {
    Fault fault = some_fault(random, job);
    if (fault.kind == Fault::kBeatingHang) fault.hang_ms %= 10'000;
    job.faults.push_back(fault);
  }
  for (uint64_t i = random.below(4); i > 0; --i) {
    job.outer->partitions.push_back(some_partition(random, job, pushes));
  }
  std::ranges::sort(job.outer->partitions, {}, &Partition::after_pushes);
  job.late_ranks =
      static_cast<uint32_t>(random.below(job.spec.max_ranks - job.spec.world_size + 1));
  for (uint32_t i = 0; i < job.late_ranks; ++i) {
    job.late_after_pushes.push_back(random.below(pushes));
  }
  std::ranges::sort(job.late_after_pushes);
  for (uint64_t i = random.chance(0.1) ? random.between(1, 3) : 0; i > 0; --i) {
    job.bad.push_back({.kind = pick(random, {BadGradient::kNan, BadGradient::kInfinity}),
                       .rank = static_cast<uint32_t>(random.below(job.spec.world_size)),
                       .key = static_cast<uint32_t>(random.below(keys)),
                       .round = random.between(1, job.rounds)});
  }
}

JobPlan outer_job(SimRandom& random, bool clean) {
  JobPlan job;
  JobSpec& spec = job.spec;
  job.seed = random.next();
  job.rounds = random.between(2, 8);
  job.lockstep = true;
  job.barrier = random.chance(0.1);
  job.fixed_ranks = random.chance(0.7);
  job.null_chance = random.chance(0.2) ? 0.2 : 0;
  spec.name = "outer";
  spec.chunk_elements = 32;
  spec.world_size =
      random.chance(0.6) ? kLearners : static_cast<uint32_t>(random.between(2, kLearners));
  spec.max_ranks = random.chance(0.5)
                       ? spec.world_size
                       : static_cast<uint32_t>(random.between(spec.world_size, kMostRanks));
  draw_keys(random, spec);
  draw_steps(random, job);
  spec.on_nonfinite = pick<std::string>(random, {"exclude", "exclude", "pass", "stop"});
  draw_quorum(random, spec);
  draw_formats(random, spec);
  draw_course(random, job);
  draw_limits(random, job);
  if (!clean) draw_faults(random, job);
  const auto is_f32 = [&](const KeySpec& key) { return gradient_format(spec, key) == "f32"; };
  job.digits = spec.optimizer == "none" && spec.reduction == "sum" && spec.late_decay == 1 &&
               spec.weights == Weights::kNo && spec.parameter_dtype == "f32" &&
               std::ranges::all_of(spec.keys, is_f32);
  return job;
}

}  // namespace

RackPlan make_outer_plan(uint64_t seed) {
  SimRandom random(seed ^ 0x6f75746572ull);
  RackPlan plan;
  plan.seed = seed;
  plan.clean = random.chance(0.05);
  plan.cores = static_cast<uint32_t>(random.between(1, 4));
  plan.net.seed = random.next();
  plan.net.max_delay_ns = pick(random, {20'000ull, 200'000ull, 2'000'000ull});
  plan.net.send_depth = pick(random, {4u, 16u, 256u});
  plan.net.duplicate = 0.05;
  plan.net.overtake = pick(random, {0.0, 0.05, 0.5});
  plan.control_timeout_ns = 100'000'000;
  plan.near_chance = pick(random, {0.0, 0.0, 0.0, 0.3});
  if (!plan.clean) {
    plan.net.loss = pick(random, {0.0, 0.0, 0.001, 0.02});
    plan.net.break_chance = pick(random, {0.0, 0.0, 0.0005});
    plan.control_loss = pick(random, {0.0, 0.0, 0.01});
    plan.control_duplicate = pick(random, {0.0, 0.0, 0.05});
    plan.core_pause_chance = pick(random, {0.0, 0.001});
  }
  plan.jobs.push_back(outer_job(random, plan.clean));
  return plan;
}

std::string describe(const OuterPlan& outer) {
  std::string text = fmt::format("    each fragment every {} steps of {} ms, delay {}\n",
                                 outer.every, outer.step_ms, outer.delay);
  auto out = std::back_inserter(text);
  for (const uint32_t rank : outer.slow) {
    fmt::format_to(out, "    rank {} is {} times slower\n", rank, outer.slowness);
  }
  for (const uint32_t rank : outer.slow_links) {
    fmt::format_to(out, "    rank {} sends {} bytes/s\n", rank, outer.slow_link_bytes_per_s);
  }
  for (const Partition& cut : outer.partitions) {
    constexpr std::string_view kKinds[] = {"cut off", "mute", "deaf"};
    fmt::format_to(out, "    after {} pushes {} ranks from {} are {} for {} ms{}{}\n",
                   cut.after_pushes, cut.ranks.size(), *cut.ranks.begin(), kKinds[cut.kind], cut.ms,
                   cut.heals ? "" : ", and die", cut.followed ? ", others follow" : "");
  }
  return text;
}

}  // namespace phub::sim

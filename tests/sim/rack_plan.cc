#include "tests/sim/rack_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>

#include "kernels/hyper.h"
#include "tests/oracle/groups.h"
#include "tests/oracle/replay.h"
#include "transport/control/key_schedules.h"
#include "transport/control/rules.h"
#include "transport/error.h"
#include "worker/memory/gradient_coder.h"

namespace phub::sim {
namespace {

template <typename T, size_t n>
const T& pick(SimRandom& random, const T (&choices)[n]) {
  return choices[random.below(n)];
}

std::vector<KeySpec> some_keys(SimRandom& random, uint32_t chunk_elements, bool tiny) {
  const size_t n = tiny                 ? random.between(1, 2)
                   : random.chance(0.3) ? random.between(1, 20)
                                        : random.between(1, 6);
  std::vector<KeySpec> keys;
  for (size_t k = 0; k < n; ++k) {
    KeySpec key;
    key.name = fmt::format("key{}", k);
    key.elements = tiny ? random.between(1, chunk_elements)
                        : random.between(1, chunk_elements * (n > 6 ? 2 : 4));
    key.priority = random.chance(0.3) ? static_cast<int32_t>(random.below(3)) : 0;
    if (random.chance(0.2)) key.lr_scale = 0.5;
    if (random.chance(0.2)) key.decay_scale = 0;
    if (random.chance(0.2)) key.group = static_cast<uint32_t>(random.below(4));
    keys.push_back(std::move(key));
  }
  return keys;
}

// One of the schedules of the learning rate, perhaps after a warm-up; runs have few rounds.
void add_schedule(SimRandom& random, std::map<std::string, double>& hyper) {
  const auto rounds = [&random] { return static_cast<double>(random.between(2, 12)); };
  const auto kind =
      pick<std::string>(random, {"lr_exponential", "lr_inverse", "lr_polynomial", "lr_cosine"});
  hyper[kind] = kind == "lr_exponential" ? 0.9 : kind == "lr_inverse" ? 0.25 : rounds();
  if (random.chance(0.5)) hyper["lr_end"] = 0.125;
  if (random.chance(0.5)) hyper["lr_inverse_power"] = 0.75;
  if (random.chance(0.5)) hyper["lr_polynomial_power"] = 2;
  if (random.chance(0.5)) hyper["lr_warmup"] = rounds();
  if (random.chance(0.2)) hyper["lr_rounds_before"] = rounds() - 6;
}

std::map<std::string, double> some_hyper(SimRandom& random, const std::string& optimizer) {
  std::map<std::string, double> hyper;
  if (random.chance(0.7)) hyper["lr"] = 0.001 * static_cast<double>(random.between(1, 500));
  if (random.chance(0.3)) hyper["weight_decay"] = 0.01;
  if (random.chance(0.3)) hyper["momentum"] = 0.5;
  if (random.chance(0.1)) hyper["grad_scale"] = 8;
  if (random.chance(0.2)) add_schedule(random, hyper);
  if (optimizer == "rmsprop" && random.chance(0.5)) hyper["rmsprop_momentum"] = 0.9;
  return hyper;
}

// Of all keys, or of one group.
std::string some_rate(SimRandom& random, const JobSpec& spec) {
  const uint32_t groups = hyper_groups(spec);
  return groups == 1 || random.chance(0.5) ? "lr" : fmt::format("lr@{}", random.below(groups));
}

JobSpec some_spec(SimRandom& random, uint32_t index, bool tiny) {
  JobSpec spec;
  spec.name = fmt::format("job{}", index);
  spec.chunk_elements = pick(random, {32u, 64u, 96u, 256u});
  spec.keys = some_keys(random, spec.chunk_elements, tiny);
  spec.world_size = static_cast<uint32_t>(tiny                 ? random.between(2, 3)
                                          : random.chance(0.2) ? random.between(9, 16)
                                                               : random.between(2, 8));
  spec.max_ranks = static_cast<uint32_t>(random.chance(0.5) ? spec.world_size
                                                            : random.between(spec.world_size, 16));
  spec.optimizer =
      pick<std::string>(random, {"none", "none", "none", "sgd", "momentum", "nesterov", "adam",
                                 "adamw", "adagrad", "rmsprop", "adadelta", "lion"});
  spec.hyper = some_hyper(random, spec.optimizer);
  if (random.chance(0.5)) spec.hyper[some_rate(random, spec)] = 0.02;
  if (random.chance(0.7)) {
    spec.gradient_dtype = spec.parameter_dtype = "f32";
  } else {
    spec.gradient_dtype = pick<std::string>(random, {"f32", "bf16", "f16"});
    spec.parameter_dtype = pick<std::string>(random, {"f32", "bf16", "f16"});
    for (KeySpec& key : spec.keys)
      key.format = pick<std::string>(random, {"", "f32", "bf16", "f16"});
  }
  spec.reduction = random.chance(0.3) ? "mean" : "sum";
  spec.initial = random.chance(0.4) ? "broadcast" : "zeros";
  spec.on_loss = pick<std::string>(random, {"shrink", "shrink", "shrink", "wait", "fail"});
  spec.on_nonfinite = pick<std::string>(random, {"stop", "exclude", "exclude", "pass"});
  spec.lease_ms = static_cast<uint32_t>(random.between(15, 60));
  spec.progress_limit_ms = 200;
  spec.wait_limit_ms = 300;
  spec.join_limit_ms = 300;
  if (random.chance(0.2))
    spec.schedule.push_back({random.between(2, 6), {{some_rate(random, spec), 0.05}}});
  return spec;
}

void add_trouble(SimRandom& random, JobPlan& job) {
  const uint64_t faults = random.chance(0.2) ? random.between(3, 6) : random.below(3);
  for (uint64_t i = 0; i < faults; ++i) job.faults.push_back(some_fault(random, job));
  job.late_ranks =
      static_cast<uint32_t>(random.below(job.spec.max_ranks - job.spec.world_size + 1));
  const uint64_t all_pushes = job.rounds * job.spec.keys.size() * job.spec.world_size;
  for (uint32_t i = 0; i < job.late_ranks; ++i) {
    job.late_after_pushes.push_back(random.below(all_pushes));
  }
  if (!random.chance(0.15)) return;
  const uint64_t bad = random.between(1, 3);
  for (uint64_t i = 0; i < bad; ++i) {
    job.bad.push_back({.kind = pick(random, {BadGradient::kNan, BadGradient::kNan,
                                             BadGradient::kInfinity, BadGradient::kOverflow}),
                       .rank = static_cast<uint32_t>(random.below(job.spec.world_size)),
                       .key = static_cast<uint32_t>(random.below(job.spec.keys.size())),
                       .round = random.between(1, job.rounds)});
  }
}

JobPlan some_job(SimRandom& random, uint32_t index, bool clean) {
  JobPlan job;
  const bool tiny = random.chance(0.03);  // little work, so that rounds can pass 256
  job.spec = some_spec(random, index, tiny);
  job.seed = random.next();
  job.rounds = tiny ? random.between(258, 300) : random.between(1, 10);
  const JobSpec& spec = job.spec;
  const auto is_f32 = [&](const KeySpec& key) { return gradient_format(spec, key) == "f32"; };
  job.digits = spec.optimizer == "none" && spec.reduction == "sum" &&
               spec.parameter_dtype == "f32" && std::ranges::all_of(spec.keys, is_f32) &&
               !spec.hyper.contains("grad_scale");
  job.lockstep = random.chance(0.5);
  job.barrier = random.chance(0.3);
  job.fixed_ranks = random.chance(0.6);
  job.null_chance = random.chance(0.4) ? 0.2 : 0;
  while (random.chance(0.4) && job.hyper_calls.size() < 3) {
    job.hyper_calls.push_back(
        {random.below(job.rounds * spec.keys.size()),
         {{some_rate(random, spec), 0.001 * static_cast<double>(random.between(1, 500))}}});
  }
  if (!clean) add_trouble(random, job);
  return job;
}

// A schedule of formats with this one in it. The key says which, and no random number, so that
// seeds keep their racks.
std::string schedule_with(std::string_view format, uint64_t elements, uint64_t rounds) {
  const uint64_t a = 1 + elements % rounds, b = 1 + elements / 7 % rounds;
  switch (elements / 3 % 4) {
    case 0:
      return fmt::format("f32*{},{}", a, format);
    case 1:
      return fmt::format("{}*{},f32", format, a);
    case 2:
      return fmt::format("f32*{},{}*{},topk", a, format, b);
    default:
      return fmt::format("{}*{},topk-10*{},f32*1,{}", format, b, a, format);
  }
}

void schedule_formats(JobPlan& job) {
  JobSpec& spec = job.spec;
  if (!job.lock_step() || spec.branches > 0) return;
  std::set<std::string> all;
  const auto change = [&](std::string& format, uint64_t elements) {
    const bool may = !format.empty() && format != "f32" && format != "int32" && format != "bf16" &&
                     format != "f16";
    if (!may || elements % 3 == 0 || all.size() == KeySchedules::kMost) return;
    format = schedule_with(format, elements, std::min<uint64_t>(job.rounds, 8));
    all.insert(format);
  };
  change(spec.gradient_dtype, spec.keys.front().elements);
  for (KeySpec& key : spec.keys) change(key.format, key.elements);
}

// Some keys have coded gradients, or all. Out of lock-step not those of which only the largest
// elements are sent: they leave out what counts the updates. Integers are added in one order only
// where there are no groups.
void code_keys(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  const auto some_format = [&] {
    return pick<std::string>(
        random, {"fp8-e4m3", "fp8-e5m2", "int8", "int4", job.lock_step() ? "topk" : "int8",
                 job.lock_step() ? "topk-int2" : "int4",
                 job.lock_step() && spec.groups.empty() ? "int32" : "int8"});
  };
  if (random.chance(0.2)) spec.gradient_dtype = some_format();
  spec.keys[random.below(spec.keys.size())].format = some_format();
  for (KeySpec& key : spec.keys) {
    if (random.chance(0.4)) key.format = some_format();
  }
  spec.rounding = random.chance(0.5) ? "stochastic" : "nearest";
  job.digits = false;
  schedule_formats(job);
}

// Of some keys, which become matrices, factors are sent.
void send_factors(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  if (!job.lock_step()) return;
  const size_t always = random.below(spec.keys.size());
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    if (k != always && !random.chance(0.4)) continue;
    KeySpec& key = spec.keys[k];
    const uint64_t columns = random.between(1, std::min<uint64_t>(key.elements, 80));
    key.shape = {key.elements / columns, columns};
    key.elements = key.shape[0] * columns;
    key.format = "factors";
    key.rank_limit = static_cast<uint32_t>(random.between(1, 4));
    const uint32_t together = rows_together(key);
    key.tile_rows =
        std::min(together * static_cast<uint32_t>(random.between(1, 3)), most_tile_rows(key));
  }
  job.digits = false;
}

// Of some keys, which become matrices, rows are sent.
void send_rows(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  if (!job.lock_step()) return;
  const bool may_be_lazy =
      spec.optimizer != "none" && !is_gated(spec) && job.box_of.empty() && random.chance(0.9);
  const size_t always = random.below(spec.keys.size());
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    KeySpec& key = spec.keys[k];
    if (is_factors(key) || (k != always && !random.chance(0.4))) continue;
    const uint64_t columns = random.between(1, std::min<uint64_t>(key.elements, 40));
    key.shape = {key.elements / columns, columns};
    key.elements = key.shape[0] * columns;
    set_rows_limit(key, static_cast<uint32_t>(random.between(1, 30)),
                   may_be_lazy && random.chance(0.7));
    if (!key.lazy && key.shape[0] <= 300 && random.chance(0.4)) {
      set_rows_limit(key, static_cast<uint32_t>(key.shape[0]), false);
      set_rank_limit(key, static_cast<uint32_t>(random.between(1, 4)));
    }
    const uint32_t together = rows_together(key);
    key.tile_rows =
        std::min(together * static_cast<uint32_t>(random.between(1, 3)), most_tile_rows(key));
  }
  job.digits = false;
}

// In place of gradients there are values, which have operations.
void fold_values(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  const auto multiplies = [](const KeySpec& key) { return key.rank_limit > 0; };
  if (!job.lock_step() || is_gated(spec) || std::ranges::any_of(spec.keys, multiplies)) return;
  spec.optimizer = "fold";
  spec.hyper.clear();
  spec.schedule.clear();
  spec.reduction = "sum";
  spec.gradient_dtype = spec.parameter_dtype = "f32";
  spec.unused = "zero";
  spec.on_nonfinite = random.chance(0.5) ? "stop" : "pass";
  for (KeySpec& key : spec.keys) {
    if (!is_rows(key)) key.format.clear();
    const bool even = (key.shape.empty() ? key.elements : key.shape.back()) % 2 == 0;
    key.value_type = even ? pick<std::string>(random, {"f32", "f64", "i32", "i64"})
                          : pick<std::string>(random, {"f32", "i32"});
    key.operation = pick<std::string>(random, {"add", "multiply", "min", "max", "or"});
    if (key.operation == "or" && key.value_type[0] == 'f') key.operation = "add";
  }
  job.hyper_calls.clear();
  job.bad.clear();
  job.digits = false;
}

std::vector<ElementRange> some_ranges(SimRandom& random, uint64_t elements) {
  std::vector<ElementRange> ranges;
  if (random.chance(0.4)) return ranges;
  for (uint64_t i = random.between(1, 3); i > 0; --i) {
    const uint64_t begin = random.below(elements);
    const uint64_t most =
        random.chance(0.5) ? std::min<uint64_t>(elements - begin, 40) : elements - begin;
    ranges.push_back({begin, begin + random.between(1, most)});
  }
  return ranges;
}

// Whatever the order, the server's steps have the same bits: it subtracts whole numbers.
void step_in_whole_numbers(JobPlan& job) {
  job.spec.optimizer = "sgd";
  job.spec.hyper = {{"lr", 1}};
  for (KeySpec& key : job.spec.keys) key.lr_scale = 1;
  job.hyper_calls.clear();
}

// The job has branches, if it may; and some more rounds for them. `saved`: they can be killed.
void add_branches(SimRandom& random, JobPlan& job, bool saved) {
  JobSpec& spec = job.spec;
  if (!job.box_of.empty() || steps_whole_keys(spec)) return;
  if (!job.lock_step()) {
    step_in_whole_numbers(job);
  } else if (spec.optimizer == "none") {
    spec.optimizer = random.chance(0.5) ? "adam" : "momentum";
    job.digits = false;
  }
  spec.branches = static_cast<uint32_t>(random.between(1, 4));
  spec.schedule.clear();
  job.rounds += job.kills_branches ? 150 : random.below(saved ? 60 : 30);
  const uint64_t calls = job.kills_branches ? 150 : random.between(1, saved ? 80 : 20);
  const uint64_t ranks = job.kills_branches ? 1 : spec.world_size;  // who was told what there is
  for (uint64_t i = calls; i > 0; --i) {
    job.branch_calls.push_back({.rank = static_cast<uint32_t>(random.below(ranks)),
                                .after_pushes = random.below(job.rounds * spec.keys.size()),
                                .random = random.next()});
  }
  std::ranges::stable_sort(job.branch_calls, {}, &BranchCall::after_pushes);
}

// Ranks write and read some chunks only. Which rank somebody gets is known before he joins.
void choose_interest(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  if (!job.lock_step() || is_gated(spec) || !job.box_of.empty() || spec.branches > 0) return;
  job.fixed_ranks = true;
  for (uint32_t rank = 0; rank < spec.max_ranks; ++rank) {
    std::vector<KeyInterest>& interest = job.interest.emplace_back();
    for (const KeySpec& key : spec.keys) {
      if (random.chance(0.2)) continue;
      interest.push_back(
          {key.name, some_ranges(random, key.elements), some_ranges(random, key.elements)});
    }
    const auto nothing = [](const KeyInterest& of) {
      return of.writes.empty() && of.reads.empty();
    };
    if (!interest.empty() && !std::ranges::all_of(interest, nothing)) continue;
    const KeySpec& key = spec.keys[random.below(spec.keys.size())];
    interest = {{key.name, {}, {{0, key.elements}}}};
  }
}

// Results come back as differences.
void send_differences(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  if (!job.lock_step() || spec.optimizer == "none" || !job.box_of.empty()) return;
  if (spec.branches > 0) return;
  spec.parameter_dtype =
      pick<std::string>(random, {"fp8-e4m3", "fp8-e5m2", "int8", "int8", "int4"});
  spec.rounding = random.chance(0.5) ? "stochastic" : "nearest";
  if (spec.on_nonfinite == "pass") job.bad.clear();  // it would stay in what ranks have
}

// The box keeps the optimizer's states in 8 bits, where it can.
void keep_states_in_8_bits(JobPlan& job) {
  JobSpec eight = job.spec;
  eight.state_dtype = "8bit";
  try {
    check_rules(eight);
    job.spec.state_dtype = eight.state_dtype;
  } catch (const Error&) {
  }
}

// Keys that no rank has a gradient of are left out.
void leave_out_unused(SimRandom& random, JobPlan& job) {
  if (job.spec.optimizer == "none") return;
  job.spec.unused = "skip";
  job.null_chance = random.chance(0.5) ? 0.9 : 0.5;
}

// SSP or async: what is added, and in which numbers, is such that any order gives the same bits,
// and every chunk has an element for each rank.
void leave_lock_step(SimRandom& random, JobPlan& job) {
  JobSpec& spec = job.spec;
  spec.consistency = random.chance(0.7) ? "ssp" : "async";
  if (spec.consistency == "ssp") spec.slack = static_cast<uint32_t>(random.below(5));
  spec.optimizer = "none";
  spec.reduction = "sum";
  spec.gradient_dtype = spec.parameter_dtype = "f32";
  spec.hyper.clear();
  for (KeySpec& key : spec.keys) {
    key.elements = (key.elements + 31) / 32 * 32;
    key.format.clear();
  }
  job.digits = false;
  job.bad.clear();
}

bool is_valid(const JobSpec& spec) {
  try {
    validate(spec);
  } catch (const Error&) {
    return false;
  }
  return true;
}

// Rounds go on without late ranks, where they can.
void end_with_quorum(SimRandom& random, JobPlan& job, const RackPlan& plan) {
  JobSpec spec = job.spec;
  spec.quorum = static_cast<uint32_t>(random.between(1, spec.world_size));
  spec.grace_ms = static_cast<uint32_t>(random.below(4));
  if (random.chance(0.3)) spec.grace = Grace::kAuto;
  if (!folds(spec)) spec.late_decay = pick(random, {1.0, 1.0, 0.75, 0.1, 0.0});
  // Who stays behind its last round may be lost in a rack in which nothing goes wrong, too.
  if (spec.on_loss == OnLoss::kWait || plan.clean) spec.on_loss = OnLoss::kShrink;
  const bool needs_parts = !plan.box_faults.empty() && spec.optimizer == "none";
  const bool has_parts = plan.checkpoint_every > 0 && saves_residuals(spec);
  const bool is_elsewhere = !job.box_of.empty() || !job.interest.empty();
  const bool is_switched = plan.through_switch && &job == &plan.jobs.front();
  if (needs_parts || has_parts || is_elsewhere || is_switched) return;
  if (!is_valid(spec)) spec.late_decay = 1;
  if (!is_valid(spec)) return;
  if (spec.late_decay < 1) job.digits = false;
  const auto most = static_cast<uint32_t>(std::min<size_t>(spec.keys.size(), 4));
  const auto fragments = static_cast<uint32_t>(random.chance(0.6) ? random.between(1, most) : 1);
  for (uint32_t k = 0; k < spec.keys.size(); ++k) {
    spec.keys[k].fragment = k < fragments ? k : static_cast<uint32_t>(random.below(fragments));
  }
  job.spec = spec;
  job.saver_chance = 0;
}

// Pushes have weights, where they can.
void weigh(JobPlan& job, const RackPlan& plan) {
  JobSpec spec = job.spec;
  spec.weights = Weights::kYes;
  const bool is_elsewhere = !job.box_of.empty() || !job.interest.empty();
  const bool is_switched = plan.through_switch && &job == &plan.jobs.front();
  if (is_elsewhere || is_switched || !is_valid(spec)) return;
  job.spec = spec;
  job.digits = false;
}

// The optimizer has trust ratios.
void step_by_norms(SimRandom& random, JobSpec& spec) {
  if (!random.chance(0.5)) return;
  spec.optimizer = random.chance(0.5) ? "lars" : "lamb";
  spec.hyper.erase("rmsprop_momentum");
  if (spec.optimizer == "lamb") spec.hyper.erase("momentum");
  if (random.chance(0.5)) spec.hyper["weight_decay"] = 0.1;
  if (random.chance(0.5)) spec.hyper["always_adapt"] = 1;
  if (spec.optimizer == "lars") spec.hyper["trust_coeff"] = 0.5;
}

// The optimizer makes steps of whole keys, some of which are matrices.
void step_by_keys(SimRandom& random, JobSpec& spec) {
  const bool can_be = spec.branches == 0 && spec.state_dtype == "f32";
  if (!can_be || !random.chance(0.4)) return;
  spec.optimizer = random.chance(0.5) ? "adafactor" : "muon";
  std::erase_if(spec.hyper, [](const auto& value) {
    const std::string name = value.first.substr(0, value.first.find('@'));
    return name == "rmsprop_momentum" || name == "trust_coeff" || name == "always_adapt";
  });
  if (spec.optimizer == "adafactor") spec.hyper.erase("momentum");
  for (KeySpec& key : spec.keys) {
    const uint64_t columns = random.between(2, 12);
    if (!key.shape.empty() || key.elements % columns != 0 || !random.chance(0.8)) continue;
    key.shape = {key.elements / columns, columns};
  }
}

// Rounds are clipped, skipped, or both; or steps are made by norms, or of whole keys.
void gate_rounds(SimRandom& random, JobPlan& job, bool clean) {
  JobSpec& spec = job.spec;
  if (spec.optimizer == "none") spec.optimizer = random.chance(0.5) ? "adam" : "sgd";
  job.digits = false;
  step_by_norms(random, spec);
  step_by_keys(random, spec);
  if (random.chance(0.5)) spec.on_nonfinite = "skip";
  const bool by_keys = steps_whole_keys(spec);
  const bool is_gated_so = spec.on_nonfinite == "skip" || adapts_by_key(spec) || by_keys;
  if (spec.optimizer != "lamb" && !by_keys && (!is_gated_so || random.chance(0.6))) {
    spec.hyper["max_norm"] =
        random.chance(0.2) ? 0 : 0.1 * static_cast<double>(random.between(1, 300));
    if (!job.hyper_calls.empty()) job.hyper_calls.back().values["max_norm"] = 1.5;
  }
  if (clean && spec.on_nonfinite != "skip") return;
  for (uint64_t i = random.below(4); i > 0; --i) {
    job.bad.push_back({.kind = pick(random, {BadGradient::kNan, BadGradient::kOverflow}),
                       .rank = static_cast<uint32_t>(random.below(spec.world_size)),
                       .key = static_cast<uint32_t>(random.below(spec.keys.size())),
                       .round = random.between(1, job.rounds)});
  }
}

// Gradients are added in groups of ranks; then the job may have as many ranks in all its lives.
void add_in_groups(SimRandom& random, JobPlan& job) {
  job.spec.groups =
      reference::some_groups(job.spec.max_ranks, [&random](uint64_t n) { return random.below(n); });
  for (JobPlan::Ranks& ranks : job.later_ranks) ranks.max_ranks = job.spec.max_ranks;
}

// Workers that die with the box are followed by others, in another number.
void begin_again(SimRandom& random, RackPlan& plan) {
  for (BoxFault& fault : plan.box_faults) fault.with_workers = random.chance(0.5);
  for (JobPlan& job : plan.jobs) {
    for (size_t i = 0; i < plan.box_faults.size(); ++i) {
      const auto ranks = static_cast<uint32_t>(random.between(1, job.spec.max_ranks));
      job.later_ranks.push_back(
          {ranks, static_cast<uint32_t>(random.between(ranks, job.spec.max_ranks))});
    }
  }
}

// The box dies once or more. Workers join again by themselves; of their own faults crashes stay, at
// most.
void kill_box(SimRandom& random, RackPlan& plan) {
  uint64_t pushes = 0;
  for (JobPlan& job : plan.jobs) {
    // All-reduce goes on with what its ranks saved, if all did.
    if (random.chance(0.5)) job.saver_chance = random.chance(0.7) ? 1 : 0.5;
    if (job.lock_step() && job.spec.optimizer == "none" && job.saver_chance < 1) {
      job.spec.optimizer = "momentum";
    }
    job.digits = false;
    if (job.spec.on_nonfinite != "skip") job.bad.clear();
    job.late_ranks = 0;
    job.device_fault.reset();
    const bool loses = random.chance(0.3);
    std::erase_if(job.faults, [loses](Fault& fault) {
      if (fault.successor == Fault::kEager) fault.successor = Fault::kPatient;
      const bool crash = fault.kind == Fault::kCrash || fault.kind == Fault::kSilentCrash;
      return fault.kind != Fault::kBreak && fault.kind != Fault::kStraggle && !(crash && loses);
    });
    job.rounds += random.between(20, 60);
    pushes += job.rounds * job.spec.keys.size() * job.spec.world_size;
  }
  plan.checkpoint_every = random.between(1, 3);
  const uint64_t faults = random.between(1, 4);
  for (uint64_t i = 0; i < faults; ++i) {
    plan.box_faults.push_back({.after_pushes = random.below(pushes),
                               .delay_ns = random.below(3'000'000),
                               .disk_call = random.chance(0.5) ? random.between(1, 60) : 0,
                               .power = random.chance(0.5),
                               .restart_ms = random.below(50)});
  }
  std::ranges::sort(plan.box_faults, {}, &BoxFault::after_pushes);
  if (random.chance(0.4)) begin_again(random, plan);
  using Kind = testing::SimulatedDisk::Fault;
  for (uint64_t i = random.below(4); i > 0; --i) {
    plan.disk_faults.push_back({.after_pushes = random.below(pushes),
                                .call = random.between(1, 100),
                                .kind = pick(random, {Kind::kFail, Kind::kFailDone, Kind::kFull}),
                                .room_ms = random.below(100)});
  }
  std::ranges::sort(plan.disk_faults, {}, &DiskFault::after_pushes);
}

// Checkpoints are written beside everything else that happens; nobody needs them.
void save(SimRandom& random, RackPlan& plan) {
  plan.checkpoint_every = random.between(1, 3);
  for (JobPlan& job : plan.jobs) job.saver_chance = pick(random, {0.0, 0.5, 1.0, 1.0});
}

// The network of a worker works in one direction only, for a while.
void cut_off(SimRandom& random, JobPlan& job) {
  Fault fault{.kind = random.chance(0.5) ? Fault::kMute : Fault::kDeaf,
              .successor = random.chance(0.5) ? Fault::kNobody : Fault::kPatient,
              .rank = static_cast<uint32_t>(random.below(job.spec.world_size)),
              .after_pushes = random.below(job.rounds * job.spec.keys.size() + 1),
              .hang_ms = random.between(1, 3ull * job.spec.lease_ms),
              .successor_ms = random.below(2 * job.spec.lease_ms)};
  job.faults.push_back(fault);
  job.look_again = false;  // whose barrier's answer is lost enters another one
}

// Other boxes have parts of the jobs; over shared memory they have nothing to do.
void add_shards(SimRandom& random, RackPlan& plan) {
  if (plan.net.shared_memory || !random.chance(0.5)) return;
  for (uint64_t i = random.between(1, 3); i > 0; --i) {
    plan.shards.push_back(static_cast<uint32_t>(random.between(1, 4)));
  }
  if (plan.clean || !random.chance(0.3)) return;
  for (uint64_t i = random.between(1, 2); i > 0; --i) {
    plan.shard_faults.push_back({.after_pushes = random.below(300),
                                 .shard = random.below(3),
                                 .hangs = random.chance(0.4),
                                 .ms = random.between(1, random.chance(0.5) ? 100 : 15'000)});
  }
  std::ranges::sort(plan.shard_faults, {}, &ShardFault::after_pushes);
}

// The machines of boxes and ranks, so that chunks lie at home as far as they can. Of some ranks it
// is unknown, or there is no box.
void place_ranks(SimRandom& random, RackPlan& plan) {
  if (plan.shards.empty() || !random.chance(0.6)) return;
  const uint64_t machines = random.between(1, 3);
  for (size_t box = 0; box <= plan.shards.size(); ++box) {
    plan.hosts.push_back(random.between(1, machines));
  }
  for (JobPlan& job : plan.jobs) {
    job.spec.rank_hosts.resize(random.between(1, job.spec.max_ranks));
    for (uint64_t& host : job.spec.rank_hosts) host = random.below(machines + 2);
  }
}

// Branches are killed, and revived from files, which other boxes have a part of.
void kill_over_boxes(SimRandom& random, RackPlan& plan) {
  if (plan.checkpoint_every == 0) save(random, plan);
  plan.jobs.erase(plan.jobs.begin() + 1, plan.jobs.end());
  plan.jobs.front().kills_branches = true;
  plan.cores = static_cast<uint32_t>(random.between(1, 2));
  plan.shards.assign(random.between(1, 2), 1);
}

// NICs that send a round in a few milliseconds.
void limit_nics(SimRandom& random, RackPlan& plan) {
  if (plan.net.shared_memory || !random.chance(0.35)) return;
  constexpr uint64_t kBytesOfChunk = 256;  // headers and rounding
  uint64_t of_rank = 0, of_all = 0;
  for (const JobPlan& job : plan.jobs) {
    uint64_t bytes = 0;
    for (const KeySpec& key : job.spec.keys) {
      bytes += key.elements * sizeof(float) +
               (key.elements / job.spec.chunk_elements + 1) * kBytesOfChunk;
    }
    of_rank = std::max(of_rank, bytes);
    of_all += bytes * std::max(job.spec.world_size, job.spec.max_ranks);
  }
  if (random.chance(0.7)) plan.worker_bytes_per_s = of_rank * random.between(100, 1000);
  if (random.chance(0.7)) plan.box_bytes_per_s = of_all * random.between(100, 1000);
  if (!plan.racks.empty() && random.chance(0.7)) {
    plan.uplink_bytes_per_s = of_rank * plan.jobs.size() * random.between(100, 1000);
  }
  plan.send_order = pick(
      random, {SendOrder::kPriority, SendOrder::kFifo, SendOrder::kRandom, SendOrder::kMagnitude});
}

// Several updates that are sent as one, and what is left of them, are whole numbers of int8 still.
void code_sums_exactly(JobSpec& spec) {
  const auto widen = [](std::string& format) {
    if (format == "int4") format = "int8";
  };
  widen(spec.gradient_dtype);
  for (KeySpec& key : spec.keys) widen(key.format);
}

// Values that the optimizer does not use, or of a group without keys: the box refuses them.
void drop_unused(const JobSpec& spec, std::map<std::string, double>& values) {
  const kernels::Optimizer optimizer = *kernels::parse_optimizer(spec.optimizer);
  std::erase_if(values, [&](const auto& value) {
    const HyperName name = *parse_hyper_name(value.first);
    const size_t field = kernels::hyper_field(std::string(name.field));
    const auto is_of_group = [&](const KeySpec& key) { return key.group == name.group; };
    return !kernels::uses(optimizer, kernels::kHyperFields[field]) ||
           (name.group && std::ranges::none_of(spec.keys, is_of_group));
  });
}

void drop_unused(JobPlan& job) {
  drop_unused(job.spec, job.spec.hyper);
  for (HyperChange& change : job.spec.schedule) drop_unused(job.spec, change.values);
  for (auto& call : job.hyper_calls) drop_unused(job.spec, call.values);
  std::erase_if(job.spec.schedule, [](const HyperChange& c) { return c.values.empty(); });
  std::erase_if(job.hyper_calls, [](const auto& call) { return call.values.empty(); });
}

}  // namespace

Fault some_fault(SimRandom& random, const JobPlan& job) {
  Fault fault;
  fault.kind = pick(
      random, {Fault::kCrash, Fault::kCrash, Fault::kSilentCrash, Fault::kHang, Fault::kBeatingHang,
               Fault::kStraggle, Fault::kBreak, Fault::kBreak, Fault::kReplace, Fault::kLeave});
  fault.rank = static_cast<uint32_t>(random.below(job.spec.world_size));
  fault.after_pushes = random.below(job.rounds * job.spec.keys.size() + 1);
  fault.successor = pick(random, {Fault::kNobody, Fault::kEager, Fault::kPatient});
  fault.successor_ms = random.chance(0.5) ? 0 : random.below(2 * job.spec.lease_ms);
  switch (fault.kind) {
    case Fault::kHang:
      fault.hang_ms = random.between(1, 3ull * job.spec.lease_ms);
      break;
    case Fault::kBeatingHang:
      fault.hang_ms = random.between(1, 2ull * job.spec.progress_limit_ms);
      break;
    case Fault::kStraggle:
      fault.hang_ms = random.between(1, job.spec.lease_ms / 3);
      break;
    case Fault::kReplace:
      fault.successor = Fault::kEager;
      break;
    default:
      break;
  }
  if (fault.kind == Fault::kBreak || fault.kind == Fault::kStraggle)
    fault.successor = Fault::kNobody;
  return fault;
}

void move_states(SimRandom& random, JobPlan& job) {
  if (!job.lock_step() || job.spec.optimizer == "none") return;
  const size_t keys = job.spec.keys.size();
  for (uint64_t i = random.between(1, 8); i > 0; --i) {
    StateCall call{.rank = static_cast<uint32_t>(random.below(job.spec.world_size)),
                   .after_pushes = random.below(job.rounds * keys),
                   .sets = random.chance(0.5)};
    for (uint32_t key = 0; key < keys; ++key) {
      const auto at = static_cast<ptrdiff_t>(random.below(call.keys.size() + 1));
      if (random.chance(0.6)) call.keys.insert(call.keys.begin() + at, key);
    }
    if (call.keys.empty()) call.keys.push_back(static_cast<uint32_t>(random.below(keys)));
    job.state_calls.push_back(std::move(call));
  }
  std::ranges::stable_sort(job.state_calls, {}, &StateCall::after_pushes);
}

RackPlan make_rack_plan(uint64_t seed) {
  SimRandom random(seed ^ 0x7261636bull);
  RackPlan plan;
  plan.seed = seed;
  plan.clean = random.chance(0.15);
  plan.cores = static_cast<uint32_t>(random.between(1, 8));
  plan.net.seed = random.next();
  plan.net.shared_memory = random.chance(0.35);
  plan.net.max_delay_ns = pick(random, {3'000ull, 20'000ull, 200'000ull});
  plan.net.send_depth = pick(random, {2u, 4u, 16u, 256u});
  plan.net.duplicate = 0.05;
  if (!plan.clean) {
    plan.net.loss = pick(random, {0.0, 0.0, 0.001, 0.01, 0.1, 0.3});
    plan.net.break_chance = pick(random, {0.0, 0.0, 0.0005, 0.003});
    if (random.chance(0.1)) {
      const uint64_t from = random.below(5'000'000);
      plan.windows.push_back({from, from + random.below(5'000'000), 0.9});
    }
    plan.control_loss = pick(random, {0.0, 0.0, 0.0, 0.02});
    plan.control_duplicate = pick(random, {0.0, 0.0, 0.05});
    plan.core_pause_chance = pick(random, {0.0, 0.001});
  }
  const uint64_t jobs = random.chance(0.7) ? 1 : random.between(2, 3);
  for (uint32_t i = 0; i < jobs; ++i) plan.jobs.push_back(some_job(random, i, plan.clean));
  plan.nodes = pick(random, {1u, 2u, 4u});
  SimRandom more(seed ^ 0x636c6f636b73ull);
  for (JobPlan& job : plan.jobs) {
    if (!more.chance(0.25)) continue;
    leave_lock_step(more, job);
    // Whose barrier's answer is lost enters another one, and the others would wait for its push.
    job.look_again = job.barrier && plan.control_loss == 0;
  }
  SimRandom dying(seed ^ 0x646576696365ull);
  for (JobPlan& job : plan.jobs) {
    const uint64_t pushes = job.rounds * job.spec.keys.size() * job.spec.world_size;
    const DeviceFault fault{dying.below(pushes), dying.below(8), dying.chance(0.4)};
    if (!plan.clean && dying.chance(0.15)) job.device_fault = fault;
  }
  SimRandom cut(seed ^ 0x637574ull);
  for (JobPlan& job : plan.jobs) {
    if (!plan.clean && cut.chance(0.2)) cut_off(cut, job);
  }
  SimRandom jump(seed ^ 0x6a756d70ull);
  for (uint64_t i = jump.chance(0.3) ? jump.between(1, 2) : 0; i > 0; --i) {
    plan.clock_jumps.push_back({jump.below(300), jump.between(1, 100'000)});
  }
  std::ranges::sort(plan.clock_jumps, {}, &ClockJump::after_pushes);
  // A jump counts for a quarter of a lease, and for 20 ms at least (Server::poll): two between two
  // heartbeats lose nobody.
  for (JobPlan& job : plan.jobs) {
    if (!plan.clock_jumps.empty()) job.spec.lease_ms += 100;
  }
  SimRandom gate(seed ^ 0x67617465ull);
  for (JobPlan& job : plan.jobs) {
    if (job.lock_step() && gate.chance(0.3)) gate_rounds(gate, job, plan.clean);
  }
  SimRandom box(seed ^ 0x626f78ull);
  if (!plan.clean && box.chance(0.4)) {
    kill_box(box, plan);
  } else if (box.chance(0.3)) {
    save(box, plan);
  }
  SimRandom states(seed ^ 0x737461746573ull);
  for (JobPlan& job : plan.jobs) {
    if (states.chance(0.4) && !GatedReplay::is_gated(job.spec)) move_states(states, job);
  }
  SimRandom unused(seed ^ 0x756e75736564ull);
  for (JobPlan& job : plan.jobs) {
    if (job.lock_step() && unused.chance(0.4)) leave_out_unused(unused, job);
  }
  SimRandom groups(seed ^ 0x67726f757073ull);
  for (JobPlan& job : plan.jobs) {
    if (job.lock_step() && groups.chance(0.4)) add_in_groups(groups, job);
  }
  SimRandom shards(seed ^ 0x736861726473ull);
  add_shards(shards, plan);
  SimRandom order(seed ^ 0x6f72646572ull);
  plan.net.overtake = pick(order, {0.0, 0.0, 0.05, 0.5, 1.0});
  SimRandom killing(seed ^ 0x6b696c6cull);
  const bool kills = !plan.net.shared_memory && killing.chance(0.05);
  if (kills) kill_over_boxes(killing, plan);
  SimRandom racks(seed ^ 0x7261636b73ull);
  if (!kills) add_racks(racks, plan);
  SimRandom machines(seed ^ 0x6d616368696e6573ull);
  place_ranks(machines, plan);
  SimRandom branches(seed ^ 0x6272616e6368ull);
  for (JobPlan& job : plan.jobs) {
    if (kills || branches.chance(0.6)) add_branches(branches, job, plan.checkpoint_every > 0);
  }
  SimRandom coded(seed ^ 0x636f646564ull);
  for (JobPlan& job : plan.jobs) {
    if (coded.chance(0.17)) code_keys(coded, job);
  }
  SimRandom differences(seed ^ 0x76696577ull);
  for (JobPlan& job : plan.jobs) {
    if (differences.chance(0.3)) send_differences(differences, job);
  }
  SimRandom factors(seed ^ 0x666163746f7273ull);
  for (JobPlan& job : plan.jobs) {
    if (factors.chance(0.2)) send_factors(factors, job);
  }
  SimRandom rows(seed ^ 0x726f7773ull);
  for (JobPlan& job : plan.jobs) {
    if (rows.chance(0.25)) send_rows(rows, job);
  }
  SimRandom folds(seed ^ 0x666f6c6473ull);
  for (JobPlan& job : plan.jobs) {
    if (folds.chance(0.12)) fold_values(folds, job);
  }
  SimRandom interest(seed ^ 0x696e74657265ull);
  for (JobPlan& job : plan.jobs) {
    if (interest.chance(0.3)) choose_interest(interest, job);
  }
  SimRandom paced(seed ^ 0x7061636564ull);
  limit_nics(paced, plan);
  for (JobPlan& job : plan.jobs) {
    if (job.lock_step() || plan.checkpoint_every > 0 || !paced.chance(0.6)) continue;
    job.carry_over = static_cast<uint32_t>(paced.between(1, 4));
    code_sums_exactly(job.spec);
  }
  SimRandom through(seed ^ 0x737769746368ull);
  if (through.chance(0.7)) put_behind_switch(through, plan);
  SimRandom near(seed ^ 0x6e656172ull);
  // Shared memory has no network beside it, and a switch is between hosts.
  if (!plan.net.shared_memory && !plan.through_switch && near.chance(0.5)) {
    plan.near_chance = pick(near, {0.3, 0.7, 1.0});
  }
  SimRandom window(seed ^ 0x77696e646f77ull);
  if (window.chance(0.5)) {
    // Chunk by chunk over a bad network takes long, and that ranks wait for each other at several
    // boxes is seen by the passing of time alone: with a chunk or two for a core, ranks that push
    // in random orders are late.
    plan.slot_window = pick(window, {4'000ull, 8'000ull, 20'000ull});
    plan.net.shared_slots = window.chance(0.5);
    // Nobody has to see that ranks wait for each other: one slot for a queue will do.
    if (plan.net.shared_slots) plan.slot_window = pick(window, {1ull, 1'000ull, 8'000ull});
    for (JobPlan& job : plan.jobs) job.spec.progress_limit_ms *= 4;
  }
  SimRandom eight(seed ^ 0x38626974ull);
  for (JobPlan& job : plan.jobs) {
    if (eight.chance(0.4)) keep_states_in_8_bits(job);
  }
  SimRandom quorum(seed ^ 0x71756f72756dull);
  for (JobPlan& job : plan.jobs) {
    if (quorum.chance(0.3)) end_with_quorum(quorum, job, plan);
  }
  SimRandom weights(seed ^ 0x77656967687473ull);
  for (JobPlan& job : plan.jobs) {
    if (weights.chance(0.25)) weigh(job, plan);
  }
  for (JobPlan& job : plan.jobs) drop_unused(job);
  return plan;
}

}  // namespace phub::sim

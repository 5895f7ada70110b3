// A rack's plan in words.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "tests/sim/rack_plan.h"

namespace phub::sim {
namespace {

std::string text_of(const std::vector<ElementRange>& ranges) {
  std::string text;
  for (const auto& [begin, end] : ranges) text += fmt::format(" {}-{}", begin, end);
  return text.empty() ? " nothing" : text;
}

}  // namespace

std::string_view name_of(Fault::Kind kind) {
  constexpr std::string_view kNames[] = {"crash",    "silent crash", "hang",    "beating hang",
                                         "straggle", "break",        "replace", "leave",
                                         "mute",     "deaf"};
  return kNames[kind];
}

std::string_view name_of(RackFault::Kind kind) {
  constexpr std::string_view kNames[] = {
      "is dead",       "is silently dead",           "hangs",
      "stands still",  "loses a queue pair above",   "is mute above",
      "is deaf above", "is fine, but the root hangs"};
  return kNames[kind];
}

std::string describe(const RackPlan& plan) {
  std::string text = fmt::format(
      "seed {}: {} cores on {} nodes, {}, delay {} ns, depth {}, loss {}, breaks {}, overtaking "
      "{}, "
      "control loss {}{}\n",
      plan.seed, plan.cores, plan.nodes, plan.net.shared_memory ? "shared memory" : "network",
      plan.net.max_delay_ns, plan.net.send_depth, plan.net.loss, plan.net.break_chance,
      plan.net.overtake, plan.control_loss, plan.clean ? ", clean" : "");
  auto out = std::back_inserter(text);
  if (plan.worker_bytes_per_s + plan.box_bytes_per_s > 0) {
    fmt::format_to(out, "  at most {} bytes/s from a worker, {} from a box, order {}\n",
                   plan.worker_bytes_per_s, plan.box_bytes_per_s,
                   static_cast<int>(plan.send_order));
  }
  if (plan.uplink_bytes_per_s > 0) {
    fmt::format_to(out, "  at most {} bytes/s from a rack to the box above\n",
                   plan.uplink_bytes_per_s);
  }
  if (plan.near_chance > 0) {
    fmt::format_to(out, "  {} of the workers and racks are on the host of a box\n",
                   plan.near_chance);
  }
  if (!plan.hosts.empty()) {
    fmt::format_to(out, "  boxes are at machines {}\n", fmt::join(plan.hosts, ", "));
  }
  if (plan.slot_window > 0) {
    fmt::format_to(out, "  gradients of a rank have {} bytes at a box{}\n", plan.slot_window,
                   plan.net.shared_slots ? ", in slots that they share" : "");
  }
  for (const LossWindow& w : plan.windows) {
    fmt::format_to(out, "  loss {} from {} to {} ns\n", w.loss, w.from_ns, w.to_ns);
  }
  if (plan.checkpoint_every > 0) {
    fmt::format_to(out, "  a checkpoint every {} rounds\n", plan.checkpoint_every);
  }
  for (const BoxFault& f : plan.box_faults) {
    fmt::format_to(out, "  the box dies after {} pushes, {}{}{}, back after {} ms\n",
                   f.after_pushes,
                   f.disk_call > 0 ? fmt::format("in call {} to its disk", f.disk_call)
                                   : fmt::format("{} ns later", f.delay_ns),
                   f.power ? ", without power" : "",
                   f.with_workers ? ", and all workers with it" : "", f.restart_ms);
  }
  for (const DiskFault& f : plan.disk_faults) {
    constexpr std::string_view kKinds[] = {"crashes", "fails", "fails, though it is done",
                                           "and all after it find the disk full"};
    fmt::format_to(out, "  after {} pushes call {} to the disk {} ({} ms)\n", f.after_pushes,
                   f.call, kKinds[static_cast<int>(f.kind)], f.room_ms);
  }
  for (const ClockJump& j : plan.clock_jumps) {
    fmt::format_to(out, "  after {} pushes the box stands still for {} ms\n", j.after_pushes, j.ms);
  }
  if (!plan.shards.empty()) {
    fmt::format_to(out, "  under it boxes of {} cores\n", fmt::join(plan.shards, ", "));
  }
  for (const ShardFault& f : plan.shard_faults) {
    fmt::format_to(out, "  after {} pushes box {} {} for {} ms\n", f.after_pushes,
                   1 + f.shard % plan.shards.size(), f.hangs ? "hangs" : "is dead", f.ms);
  }
  for (size_t i = 0; i < plan.racks.size(); ++i) {
    fmt::format_to(
        out, "  rack {} of {} cores below {}\n", i + 1, plan.racks[i].cores,
        plan.racks[i].above == 0 ? "the root" : fmt::format("rack {}", plan.racks[i].above));
  }
  for (const RackFault& f : plan.rack_faults) {
    fmt::format_to(out, "  after {} pushes rack {} {} for {} ms\n", f.after_pushes,
                   1 + f.box % plan.racks.size(), name_of(f.kind), f.ms);
  }
  if (const auto& of = plan.through_switch) {
    fmt::format_to(out,
                   "  {} behind a switch of {} slots, the box was told {}, loss {}, twice {}, late "
                   "{}, no port {}, again after {} ns, another generation after {} rounds\n",
                   plan.jobs.front().spec.name, of->slots, of->told, of->loss, of->twice, of->late,
                   of->no_port, of->retry_ns, of->rounds_between);
    for (const SwitchFault& f : of->faults) {
      constexpr std::string_view kKinds[] = {"forgets", "adds nothing", "is silent"};
      fmt::format_to(out, "  after {} pushes the switch {} ({} ms)\n", f.after_pushes,
                     kKinds[static_cast<int>(f.kind)], f.ms);
    }
  }
  for (const JobPlan& job : plan.jobs) {
    const JobSpec& s = job.spec;
    fmt::format_to(
        out,
        "  {}: {} of {} ranks{}, {} keys, chunks of {}, {} rounds, {} {} {}/{}/{}, initial "
        "{}, loss {}, nonfinite {}, unused {}, lease {} ms, {}{}{}{}{}{}\n",
        s.name, s.world_size, s.max_ranks,
        s.groups.empty() ? "" : fmt::format(" in groups {}", s.groups), s.keys.size(),
        s.chunk_elements, job.rounds, s.optimizer, s.reduction, s.gradient_dtype, s.state_dtype,
        s.parameter_dtype, s.initial, s.on_loss, s.on_nonfinite, s.unused, s.lease_ms,
        s.consistency, s.slack > 0 ? fmt::format(" slack {}", s.slack) : "",
        job.lockstep ? ", lockstep" : "", job.digits ? ", digits" : "",
        job.fixed_ranks ? "" : ", any rank",
        job.saver_chance > 0 ? fmt::format(", savers {}", job.saver_chance) : "");
    const auto has_format = [](const KeySpec& key) { return !key.format.empty(); };
    if (std::ranges::any_of(s.keys, has_format)) {
      std::vector<std::string> formats;
      for (const KeySpec& key : s.keys) formats.push_back(key.format);
      fmt::format_to(out, "    formats of keys: {}; rounding {}\n", fmt::join(formats, ", "),
                     s.rounding);
    }
    if (s.quorum > 0 || s.weights == Weights::kYes) {
      fmt::format_to(
          out, "    weights {}, quorum {}, grace {} ({} ms), late_decay {}, fragments {}\n",
          s.weights.word(), s.quorum, s.grace.word(), s.grace_ms, s.late_decay, fragments_of(s));
    }
    if (job.outer) text += describe(*job.outer);
    for (uint32_t rank = 0; rank < job.interest.size(); ++rank) {
      for (const KeyInterest& of : job.interest[rank]) {
        fmt::format_to(out, "    rank {}, {}: writes{}, reads{}\n", rank, of.key,
                       text_of(of.writes), text_of(of.reads));
      }
    }
    if (!job.box_of.empty()) {
      fmt::format_to(out, "    at racks {}\n", fmt::join(job.box_of, ", "));
    }
    for (const JobPlan::Ranks& ranks : job.later_ranks) {
      fmt::format_to(out, "    later {} of {} ranks\n", ranks.world_size, ranks.max_ranks);
    }
    for (const Fault& f : job.faults) {
      fmt::format_to(out, "    rank {} after {} pushes: {} ({} ms), successor {} after {} ms\n",
                     f.rank, f.after_pushes, name_of(f.kind), f.hang_ms,
                     f.successor == Fault::kNobody  ? "none"
                     : f.successor == Fault::kEager ? "eager"
                                                    : "patient",
                     f.successor_ms);
    }
    for (const StateCall& c : job.state_calls) {
      fmt::format_to(out, "    rank {} after {} pushes: {} the state of keys {}\n", c.rank,
                     c.after_pushes, c.sets ? "sets" : "gets", fmt::join(c.keys, ", "));
    }
    if (job.spec.branches > 0) {
      fmt::format_to(out, "    {} branches beside the one that runs, {} calls about them\n",
                     job.spec.branches, job.branch_calls.size());
    }
    for (const BadGradient& b : job.bad) {
      fmt::format_to(out, "    rank {} round {} key {}: bad gradient {}\n", b.rank, b.round, b.key,
                     static_cast<int>(b.kind));
    }
    if (const auto& fault = job.device_fault) {
      fmt::format_to(out, "    the device of core {} dies after {} pushes{}\n", fault->core,
                     fault->after_pushes, fault->said ? ", as its NIC says" : "");
    }
    if (job.late_ranks > 0) fmt::format_to(out, "    {} ranks join later\n", job.late_ranks);
  }
  return text;
}

}  // namespace phub::sim

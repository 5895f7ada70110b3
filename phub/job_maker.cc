#include "phub/job_maker.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include "transport/error.h"
#include "transport/greeting.h"

namespace phub {
namespace {

std::vector<PlanLoad> load_of(const Plan& plan, const JobSpec& spec) {
  std::vector<PlanLoad> load;
  const std::vector<uint64_t> bytes = exchanged_bytes(plan, spec.keys, spec.max_ranks);
  for (size_t q = 0; q < plan.queues.size(); ++q) {
    const QueuePlan& queue = plan.queues[q];
    const CorePlan& core = plan.cores[queue.core];
    load.push_back({core.box, core.os_cpu, plan.nics[queue.nic].name, 0});
    for (const uint32_t chunk : plan.queue_chunks[q]) {
      load.back().bytes += bytes[chunk] * spec.max_ranks;
    }
  }
  return load;
}

// A generation of a switch: a number that cannot be guessed.
uint64_t new_generation() {
  const std::string ticket = make_ticket();
  uint64_t number = 0;
  std::from_chars(ticket.data(), ticket.data() + 16, number, 16);
  return std::max<uint64_t>(number, 1);
}

// Throws Error: the parent's answer makes no sense.
Rack rack_of(const JobSpec& spec, const std::shared_ptr<Uplink>& uplink) {
  const JoinReply& admission = uplink->admission();
  const std::string other = difference(spec_above(spec), admission.spec);
  if (!other.empty()) {
    fail(ErrorCode::kInternal, "the answer of the parent at {} is about another job: {}",
         uplink->parent(), other);
  }
  return {.ranks = ranks_below(spec, admission.rank),
          .above = layout_of(admission),
          .first_round = admission.first_round,
          .incarnation = admission.incarnation,
          .connect = [uplink](const LinkLayout& layout) { return uplink->connect(layout); }};
}

// Throws Error: the standby has another job of this name, or its answer makes no sense.
Standby standby_of(const JobSpec& spec, const std::shared_ptr<Uplink>& standby) {
  const JoinReply& admission = standby->admission();
  const std::string other = difference(spec_at_standby(spec), admission.spec);
  if (!other.empty()) {
    fail(ErrorCode::kInternal, "the answer of the standby at {} is about another job: {}",
         standby->parent(), other);
  }
  if (admission.first_round != 1) {
    fail(ErrorCode::kMismatch, "the standby at {} has rounds of job '{}' already, up to {}",
         standby->parent(), spec.name, admission.first_round - 1);
  }
  return {.layout = layout_of(admission),
          .results = result_format(admission.spec),
          .connect = [standby](const LinkLayout& layout) { return standby->connect(layout); }};
}

// Those of this rack's ranks, in the checkpoint that the parent goes on from. Throws Error.
std::map<uint32_t, uint64_t> parts_in(const JobSpec& spec, const JoinReply& admission) {
  const RankRange ranks = ranks_of_training(admission.spec, admission.rank);
  std::map<uint32_t, uint64_t> parts;
  for (const RankPart& part : admission.parts) {
    if (!ranks.contains(part.rank) || part.bytes > most_part_bytes(spec)) {
      fail(ErrorCode::kInternal, "the parent's answer has a part of rank {}, of {} bytes",
           part.rank, part.bytes);
    }
    parts[part.rank] = part.bytes;
  }
  return parts;
}

// The rows of a matrix's chunks, where they are decided already. REQUIRES: as many keys.
void take_tiles(std::span<const KeySpec> from, JobSpec& spec) {
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    if (spec.keys[k].tile_rows == 0) spec.keys[k].tile_rows = from[k].tile_rows;
  }
}

// Which chunks lie at the machines of their ranks. REQUIRES: the job has several boxes.
std::string where_chunks_lie(const JobSpec& spec, const Plan& plan) {
  const uint32_t boxes = boxes_of(plan);
  if (plan.homes.known) {
    return fmt::format("job '{}' on {} boxes: {}", spec.name, boxes, describe(plan.homes));
  }
  return fmt::format(
      "job '{}' on {} boxes: chunks lie at any of them, wherever their ranks are: a parent's plan "
      "keeps them together, or one box would have none",
      spec.name, boxes);
}

// Checks values as set_hyper() does: the file may have been changed.
void check_hyper_of(const Manifest& saved) {
  for (const HyperChange& change : saved.hyper) {
    check_hyper(change.values, hyper_groups(saved.spec));
    const std::string fixed = fixed_value_in(change.values);
    if (!fixed.empty()) {
      fail(ErrorCode::kInvalid, "the checkpoint of job '{}' changes {}", saved.spec.name, fixed);
    }
  }
}

// The part of the checkpoint's manifest that other boxes need.
ShardRestored restored_elsewhere(const Manifest& saved) {
  ShardRestored restored{.round = saved.round,
                         .ranks = static_cast<uint32_t>(saved.ranks.size()),
                         .steps = saved.steps,
                         .hyper = saved.hyper,
                         .moves = saved.branches.moves};
  for (uint32_t rank = 0; rank < saved.ranks.size(); ++rank) {
    if (saved.ranks[rank].expected) restored.expected.push_back(rank);
  }
  const uint32_t shelves = saved.spec.branches;
  for (const SavedShelf& shelf : saved.branches.shelves) {
    if (shelf.place > shelves) restored.docks.push_back(shelf.place - shelves);
  }
  return restored;
}

}  // namespace

void JobMaker::forget(const Job& job) {
  loads_.erase(&job);
  quotas_.remove(&job);
}

// While one more checkpoint is written, none is removed.
Quotas::Needs JobMaker::needs_of(const JobSpec& spec, const Plan& plan,
                                 const NodeMemory& memory) const {
  Quotas::Needs needs{{.jobs = 1,
                       .ranks = spec.max_ranks,
                       .connections = uint64_t{spec.max_ranks} * plan.queues.size(),
                       .keys = spec.keys.size(),
                       .memory = memory.total(),
                       .checkpoints = memory.snapshot * (uint64_t{options_.kept_checkpoints} + 1),
                       .cores = plan.cores.size()}};
  for (const CorePlan& core : plan.cores) needs.cpus.insert(core.os_cpu);
  return needs;
}

// The checkpoint that the job goes on from; nullopt: it begins anew. Workers may ask for other
// numbers of ranks and other limits than it had; all else is as it was.
std::optional<Manifest> JobMaker::newest_checkpoint(const JoinRequest& request, const JobSpec& spec,
                                                    std::vector<std::string>& passed_over) {
  if (request.epoch > 0 && !host_.checkpoints) {
    fail(ErrorCode::kNotFound, "job '{}' cannot go on here: this server keeps no checkpoints",
         spec.name);
  }
  if (spec.mirrors && (!host_.checkpoints || !take_over_.is_standby())) {
    fail(ErrorCode::kInvalid,
         "this box is no standby: start it with 'phub serve --checkpoints DIR --standby-of "
         "HOST:PORT'");
  }
  if (!host_.checkpoints || spec.saved == Saved::kNo) {
    take_over_.check_makes_jobs(spec);
    return std::nullopt;
  }
  if (request.epoch > 0) host_.checkpoints->check_goes_on(spec.name, request.epoch);
  if (box_has_state(spec)) SavedJobs::check(spec);
  std::vector<std::string> said;
  std::optional<Manifest> saved = host_.checkpoints->newest(spec.name, said);
  if (!saved) take_over_.check_makes_jobs(spec);
  if (saved && saved->spec.mirrors) take_over_.check(request, spec, *saved);
  passed_over.insert(passed_over.end(), said.begin(), said.end());
  if (!saved) return saved;
  JobSpec expected = saved->spec;
  expected.world_size = spec.world_size;
  expected.min_ranks = spec.min_ranks;
  expected.max_ranks = spec.max_ranks;
  expected.quorum = spec.quorum;
  expected.grace_ms = spec.grace_ms;
  expected.grace = spec.grace;
  expected.late_decay = spec.late_decay;
  expected.lease_ms = spec.lease_ms;
  expected.progress_limit_ms = spec.progress_limit_ms;
  expected.wait_limit_ms = spec.wait_limit_ms;
  expected.join_limit_ms = spec.join_limit_ms;
  expected.rank_hosts = spec.rank_hosts;  // where they are now
  for (size_t key = 0; key < std::min(spec.keys.size(), expected.keys.size()); ++key) {
    std::vector<uint64_t>& shape = expected.keys[key].shape;
    // It was saved before there were shapes. A step of whole keys goes by them.
    if (shape.empty() && !steps_whole_keys(spec)) shape = spec.keys[key].shape;
    expected.keys[key].exchanged_by = spec.keys[key].exchanged_by;  // how boxes share it out now
  }
  const std::string different = difference(spec, expected);
  if (!different.empty()) {
    fail(ErrorCode::kMismatch,
         "job '{}' is to go on after round {}, from its checkpoint, and differs from it: {}; join "
         "as before, or use another name",
         spec.name, saved->round, different);
  }
  check_hyper_of(*saved);
  Branches(saved->spec).restore(*saved);  // it is known here whether it can be
  check_owner(request, *saved);
  const bool same_ranks =
      saved->spec.world_size == spec.world_size && saved->spec.max_ranks == spec.max_ranks;
  const bool some_expected = std::ranges::any_of(saved->ranks, &SavedRank::expected);
  saved->ranks.resize(std::max<size_t>(saved->ranks.size(), spec.max_ranks));
  for (uint32_t r = 0; r < spec.max_ranks && !(same_ranks && some_expected); ++r) {
    saved->ranks[r].expected = r < spec.world_size;
  }
  return saved;
}

// Over all boxes; over this one alone if the others cannot serve the job: workers read its memory,
// its creator may have some cores only, or it is so small that one of them would have nothing. Then
// `shards` is empty. Chunks go home unless a box would have nothing then.
Plan JobMaker::plan_for(const Order& order, const Transport& transport,
                        std::vector<ShardBox>& shards, const Layout* above,
                        bool may_go_home) const {
  const JobSpec& spec = *order.spec;
  std::erase_if(shards, [&](const ShardBox& shard) {
    return std::ranges::count(shard.about.transports, transport.name()) == 0;
  });
  // The cores of one box decide together who makes a quorum, and one of them steps a whole key.
  const bool one_box = transport.shares_memory() || spec.quorum > 0 || steps_whole_keys(spec) ||
                       spec.mirrors;  // whose source alone is lost
  if (one_box || order.quota.cores != Quota::kNone) shards.clear();
  const std::set<uint32_t> cpus = quotas_.cpus_of(order.join.caller.id);
  const uint64_t most_cores = std::clamp<uint64_t>(order.quota.cores, 1, ~uint32_t{0});
  PlanOptions options{.most_cores = static_cast<uint32_t>(most_cores),
                      .preferred_cpus = {cpus.begin(), cpus.end()},
                      .ranks = spec.max_ranks,
                      .chunk_elements = spec.chunk_elements,
                      .shared_memory = transport.shares_memory(),
                      .trailer_elements = trailer_of(spec),
                      .weight_bytes = weight_bytes_of(spec),
                      .gradient_dtype = spec.gradient_dtype,
                      .rank_hosts = may_go_home ? spec.rank_hosts : std::vector<uint64_t>(),
                      .slot_window = machine_.slot_window(transport),
                      .shares_slots = transport.windows() == Windows::kShared};
  // A rack sends its sums, and a switch its chunks, without looking at slots. A null with a weight
  // would be written into the slot of another gradient.
  const bool may_share =
      spec.rack_ranks.empty() && !options_.through_switch && spec.weights == Weights::kNo;
  if (options.shares_slots && !may_share) options.slot_window = 0;
  if (spec.quorum > 0) options.slot_window = 0;  // no slot is read before a rank has sent all
  if (above) {
    shards.clear();
    for (const ChunkLayout& chunk : above->chunks) options.units.push_back(chunk.queue);
  }
  numa::Topology all = order.topology;
  for (uint32_t i = 0; i < shards.size(); ++i) {
    add_box(all, shards[i].about, transport.name(), i + 1);
  }
  for (const auto& [job, of_job] : loads_) {
    for (PlanLoad load : of_job.of_plan) {
      if (load.box > 0) {
        const auto at = std::ranges::find(shards, of_job.shards[load.box - 1], &ShardBox::id);
        if (at == shards.end()) continue;
        load.box = static_cast<uint32_t>(at - shards.begin()) + 1;
      }
      options.load.push_back(std::move(load));
    }
  }
  Plan plan = make_plan(all, spec.keys, options);
  std::vector<bool> has_chunks(shards.size() + 1);
  for (const CorePlan& core : plan.cores) {
    if (core.elements > 0) has_chunks[core.box] = true;
  }
  if (std::ranges::count(has_chunks, false) == 0) return plan;
  if (plan.homes.known) return plan_for(order, transport, shards, above, false);
  shards.clear();
  return plan_for(order, transport, shards, above, may_go_home);
}

// Returns nullopt if the job does not use the switch.
std::optional<SwitchedJob> JobMaker::switched(const JobSpec& spec, const Plan& plan,
                                              const Transport& transport, const Manifest* saved,
                                              std::vector<std::string>& passed_over) {
  if (!options_.through_switch || options_.has_parent || !may_switch(spec)) return std::nullopt;
  check_switched(spec, transport.name(), boxes_of(plan));
  for (const auto& [other, load] : loads_) {
    if (other->switch_offer().streams.empty()) continue;
    fail(
        ErrorCode::kFull,
        "job '{}' has keys in int32, which come through the switch, and job '{}' has that: one job "
        "at a time uses a switch; wait for its end, or use another format",
        spec.name, other->spec().name);
  }
  for (uint32_t rank = 0; saved != nullptr && rank < saved->ranks.size(); ++rank) {
    if (saved->ranks[rank].expected == (rank < spec.world_size)) continue;
    passed_over.push_back(
        fmt::format("job '{}' goes on without the switch: its ranks are not those from 0 to {}",
                    spec.name, spec.world_size - 1));
    return std::nullopt;
  }
  return SwitchedJob{*options_.through_switch,
                     make_switch_offer(plan, spec, *options_.through_switch, new_generation())};
}

std::shared_ptr<RunningJob> JobMaker::make(const Order& order,
                                           std::vector<std::string>& passed_over) {
  const JoinRequest& request = order.join;
  const std::shared_ptr<Uplink>& uplink = order.uplink;
  std::vector<ShardBox> shards = order.shards;
  JobSpec& spec = *order.spec;
  std::optional<Manifest> saved;
  if (!uplink) saved = newest_checkpoint(request, spec, passed_over);
  if (saved) take_tiles(saved->spec.keys, spec);
  std::optional<Rack> below;
  if (uplink) {
    below = rack_of(spec, uplink);
    take_tiles(uplink->admission().spec.keys, spec);
  }
  const Rack* const rack = below ? &*below : nullptr;
  std::optional<Standby> at_standby;
  if (order.standby) {
    at_standby = standby_of(spec, order.standby);
    take_tiles(order.standby->admission().spec.keys, spec);
  }
  const Standby* const standby = at_standby ? &*at_standby : nullptr;
  const Layout* const above = rack ? &rack->above : standby ? &standby->layout : nullptr;
  Transport& link_transport = machine_.transport_named(request.transport);
  if (!spec.rack_ranks.empty() && link_transport.shares_memory()) {
    fail(ErrorCode::kInvalid, "racks send over a network, not over '{}'", request.transport);
  }
  Plan plan = plan_for(order, link_transport, shards, above);
  for (size_t k = 0; k < spec.keys.size(); ++k) spec.keys[k].tile_rows = plan.tile_rows[k];
  if (!spec.rank_hosts.empty() && !shards.empty()) {
    passed_over.push_back(where_chunks_lie(spec, plan));
  }
  if (host_.checkpoints && request.saves) SavedJobs::check_own_states(spec);
  const bool is_saved = (host_.checkpoints || order.standby) && spec.saved == Saved::kYes;
  if (is_saved && request.saves && spec.quorum > 0) {
    fail(ErrorCode::kInvalid,
         "quorum: the ranks of job '{}' have state of their own for its checkpoints (residuals of "
         "gradients of few bits, or what a saver has), which is as of a round, and a late rank may "
         "have no part in that. Say saved='no', leave the quorum out, or use a server without "
         "checkpoints and without a standby",
         spec.name);
  }
  // A job without state in the box is saved if its ranks save.
  const bool snapshots = host_.checkpoints != nullptr && spec.saved == Saved::kYes &&
                         (box_has_state(spec) || request.saves || saved);
  const std::optional<SwitchedJob> through =
      switched(spec, plan, link_transport, saved ? &*saved : nullptr, passed_over);
  if (through) plan.slot_window = 0;
  const NodeMemory memory = Job::memory_for(plan, spec, snapshots, saved ? saved->ranks.size() : 0,
                                            rack, through ? &*through : nullptr, standby);
  const Quotas::Needs needed = needs_of(spec, plan, memory);
  if (!saved) {  // a job with a checkpoint was allowed before
    quotas_.check(request.caller, order.quota, spec.name, needed, [&] {
      return host_.checkpoints ? host_.checkpoints->kept_bytes(request.caller.id)
                               : Quotas::BytesOfJobs();
    });
  }
  const uint64_t docked = saved ? Job::docked_bytes_for(plan, spec, saved->branches) : 0;
  NodeMemory at_first = memory;
  at_first.shelves += docked;
  host_.budget.reserve(spec, at_first);
  SavedLife life{.durable_round = saved ? saved->round : 0,
                 .docked_bytes = docked,
                 .owner = saved && !saved->owner.empty() ? saved->owner
                          : spec.mirrors                 ? request.owner
                                                         : request.caller.id};
  const std::string owner = life.owner;
  if (saved) {
    life.from = {.epoch = saved->epoch, .round = saved->round};
    life.part_bytes = SavedJobs::parts_of(*saved);
    life.elsewhere.push_back(restored_elsewhere(*saved));
  }
  if (uplink) {
    life.epoch = uplink->admission().epoch;
    life.from.round = uplink->admission().first_round - 1;
    life.part_bytes = parts_in(spec, uplink->admission());
  }
  if (order.standby) life.epoch = order.standby->admission().epoch;
  std::shared_ptr<Job> job;
  try {
    job = std::make_shared<Job>(order.spec, std::move(plan), link_transport, options_.store,
                                snapshots, saved ? &*saved : nullptr, rack,
                                through ? &*through : nullptr, standby);
    if (saved) host_.checkpoints->load(*saved, *job);
    if (job->takes_snapshots()) {
      life.epoch = host_.checkpoints->begin_life(spec.name);
      life.ended = host_.checkpoints->ended_epoch(spec.name);
    }
    std::vector<uint32_t> cores;
    for (const CorePlan& core : job->plan().cores) {
      cores.push_back(machine_.core_at(core.os_cpu));
    }
    if (trace_) {
      const uint32_t number = trace_->add_job(*job);
      for (uint32_t i = 0; i < cores.size(); ++i) {
        job->core_job(i).trace(trace_->log(cores[i]), cores[i], number);
      }
    }
    Load& load = loads_[job.get()] = {.shards = {}, .of_plan = load_of(job->whole_plan(), spec)};
    for (const ShardBox& shard : shards) load.shards.push_back(shard.id);
    if (!owner.empty()) quotas_.add(job.get(), owner, spec.name, needed);
    if (saved) take_over_.goes_on(spec.name);
    return std::make_shared<RunningJob>(job, request.transport, std::move(cores), host_,
                                        std::move(life), std::move(shards), uplink, order.standby);
  } catch (...) {
    if (job) forget(*job);
    job.reset();
    host_.budget.release(at_first.total());
    throw;
  }
}

}  // namespace phub

// Server: from a join to its job. A new job is made beside the control thread; a join of a job that
// is ending waits until it has ended.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include "phub/control/tokens.h"
#include "phub/server.h"
#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/text.h"

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

// Of a switch: a number that nobody guesses.
uint64_t new_generation() {
  const std::string ticket = make_ticket();
  uint64_t number = 0;
  std::from_chars(ticket.data(), ticket.data() + 16, number, 16);
  return std::max<uint64_t>(number, 1);
}

// On the builder's thread. Throws Error: the parent's answer makes no sense.
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

// As set_hyper() checks them: what is in a file may have been changed.
void check_hyper_of(const Manifest& saved) {
  for (const HyperChange& change : saved.hyper) {
    check_hyper(change.values, hyper_groups(saved.spec));
    if (change.values.contains("rmsprop_momentum")) {
      fail(ErrorCode::kInvalid, "the checkpoint of job '{}' changes rmsprop_momentum",
           saved.spec.name);
    }
  }
}

// What other boxes need to know of it.
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

// While one more checkpoint is written, none is removed.
Quotas::Needs Server::needs_of(const JobSpec& spec, const Plan& plan,
                               const NodeMemory& memory) const {
  Quotas::Needs needs{{.jobs = 1,
                       .ranks = spec.max_ranks,
                       .connections = uint64_t{spec.max_ranks} * plan.queues.size(),
                       .keys = spec.keys.size(),
                       .memory = memory.total(),
                       .checkpoints = memory.snapshot * (uint64_t{options_.checkpoints.keep} + 1),
                       .cores = plan.cores.size()}};
  for (const CorePlan& core : plan.cores) needs.cpus.insert(core.os_cpu);
  return needs;
}

void Server::join(JoinRequest request, Reply<JoinReply> reply) {
  if (request.version != kProtocolVersion) {
    fail(ErrorCode::kInvalid, "this server speaks protocol version {}, the worker version {}",
         kProtocolVersion, request.version);
  }
  machine_.transport_named(request.transport);
  if (!request.interest.empty()) {
    check_interest(request.interest, request.spec, features_here(request.spec));
  }
  place(std::make_shared<PendingJoin>(PendingJoin{std::move(request), std::move(reply)}));
}

// What makes jobs at this server differ from those at others.
Features Server::features_here(const JobSpec& spec) const {
  if (options_.parent) return Feature::kBelowParent;
  if (options_.through_switch && may_switch(spec)) return Feature::kSwitch;
  return {};
}

void Server::place(const Join& join) {
  const std::string& name = join->request.spec.name;
  if (const auto at = creating_.find(name); at != creating_.end()) {
    at->second.push_back(join);
    return;
  }
  RunningJob* job = find(name);
  if (!job) return create(join);
  if (job->ending()) {
    waiting_.push_back(join);
  } else {
    compare(*job, join);
  }
}

void Server::create(const Join& join) {
  if (jobs_.size() + creating_.size() >= Core::kMaxJobs) {
    return join->reply(
        {ErrorCode::kFull,
         fmt::format("this server has {} jobs, which is the limit; remove one", Core::kMaxJobs)});
  }
  if (awaited_.contains(join->request.spec.name)) return waiting_.push_back(join);
  creating_[join->request.spec.name];
  if (options_.quota_of) join->quota = options_.quota_of(join->request.caller);
  options_.parent ? join_parent(join) : build(join, nullptr);
}

// A rack's job is made when the parent has admitted the rack: its plan and its first round follow
// from the parent's.
void Server::join_parent(const Join& join) {
  const auto request = std::make_shared<JoinRequest>();
  host_.coder.run(
      [join, request, parent = options_.parent] {
        const JoinRequest& of_worker = join->request;
        complete_spec(join->request.spec);
        check_rules(of_worker.spec, Feature::kBelowParent);
        *request = {.spec = spec_above(of_worker.spec),
                    .rank = rank_above(of_worker.spec, of_worker.rank),
                    .transport = parent->transport(),
                    .id = make_ticket(),
                    .epoch = of_worker.epoch,
                    .saves = of_worker.saves};
      },
      [this, join, request](const std::optional<Error>& refused) {
        if (refused) return created(join, nullptr, refused);
        const auto uplink =
            std::make_shared<Uplink>(*options_.parent, host_.time, std::move(*request));
        uplinks_.push_back(uplink);
        uplink->join([this, join, uplink](const Result<Done>& joined) {
          if (joined) return build(join, uplink);
          created(join, nullptr, Error(joined.code, joined.message));
        });
      });
}

void Server::build(const Join& join, const std::shared_ptr<Uplink>& uplink) {
  numa::Topology topology =
      machine_.topology_for(machine_.transport_named(join->request.transport));
  struct Made {
    std::shared_ptr<RunningJob> job;
    std::vector<std::string> passed_over;
  };
  const auto made = std::make_shared<Made>();
  host_.builder.run(
      [this, join, made, topology = std::move(topology), shards = host_.shards.boxes(), uplink] {
        complete_spec(join->request.spec);
        // The job gets the join's own spec. If there is no job, the join may have to wait with it.
        const auto spec = std::make_shared<JobSpec>(std::move(join->request.spec));
        join->request.spec.name = spec->name;
        join->request.held.reset();  // the job's own memory has it
        const auto refused = error_of(
            [&] { made->job = make(*join, spec, topology, shards, made->passed_over, uplink); });
        if (!refused) return;
        join->request.spec = std::move(*spec);
        throw Error(*refused);
      },
      [this, join, made, uplink](const std::optional<Error>& refused) {
        if (refused && uplink) uplink->leave();
        for (const std::string& line : made->passed_over) host_.notes.add(clock_.now_ms(), line);
        if (refused || !made->job->has_remote_parts()) return created(join, made->job, refused);
        by_number_[made->job->number()] = made->job;
        made->job->make_remote_parts([this, join, made](const std::optional<Error>& failed) {
          created(join, made->job, failed);
        });
      });
}

void Server::created(const Join& join, const std::shared_ptr<RunningJob>& job,
                     const std::optional<Error>& refused) {
  const JoinRequest& request = join->request;
  const std::vector<Join> others = std::move(creating_.extract(request.spec.name).mapped());
  if (!refused) {
    add(job);
    if (!request.caller.id.empty()) {
      owners_[request.spec.name] = {.creator = request.caller, .join_id = request.id};
    }
    job->members().join(request, with_job_token(join));
  } else if (refused->code() == ErrorCode::kFull && freeing_ + host_.ending > 0) {
    if (job) join->request.spec = job->job().spec();
    waiting_.push_back(join);  // until the memory of ended jobs is free
  } else {
    join->reply({refused->code(), refused->what()});
  }
  if (refused && job) discard(job);
  for (const Join& other : others) place(other);
}

// One whose parts elsewhere could not be made.
void Server::discard(std::shared_ptr<RunningJob> job) {
  job->drop_remote_parts();
  by_number_.erase(job->number());
  host_.builder.run([this, job = std::move(job)]() mutable {
    const uint64_t bytes = job->counted_bytes();
    loads_.erase(&job->job());
    quotas_.remove(&job->job());
    job.reset();
    host_.budget.release(bytes);
  });
}

// What the job goes on from; nothing: it begins. Workers may ask for other numbers of ranks than it
// had, and for other limits; all else is as it was.
std::optional<Manifest> Server::newest_checkpoint(const JoinRequest& request, const JobSpec& spec,
                                                  std::vector<std::string>& passed_over) {
  const Caller& caller = request.caller;
  if (request.epoch > 0 && !host_.checkpoints) {
    fail(ErrorCode::kNotFound, "job '{}' cannot go on here: this server keeps no checkpoints",
         spec.name);
  }
  if (!host_.checkpoints) return std::nullopt;
  if (request.epoch > 0) host_.checkpoints->check_goes_on(spec.name, request.epoch);
  if (box_has_state(spec)) SavedJobs::check(spec);
  std::optional<Manifest> saved = host_.checkpoints->newest(spec.name, passed_over);
  if (!saved) return saved;
  JobSpec expected = saved->spec;
  expected.world_size = spec.world_size;
  expected.min_ranks = spec.min_ranks;
  expected.max_ranks = spec.max_ranks;
  expected.lease_ms = spec.lease_ms;
  expected.progress_limit_ms = spec.progress_limit_ms;
  expected.wait_limit_ms = spec.wait_limit_ms;
  expected.join_limit_ms = spec.join_limit_ms;
  for (size_t key = 0; key < std::min(spec.keys.size(), expected.keys.size()); ++key) {
    std::vector<uint64_t>& shape = expected.keys[key].shape;
    if (shape.empty()) shape = spec.keys[key].shape;  // it was saved before there were shapes
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
  const std::string& owner = saved->owner;
  if (!owner.empty() && !caller.id.empty() && caller.id != owner && !caller.is_admin) {
    fail(ErrorCode::kUnauthorized,
         "job '{}' is to go on from the checkpoint of a job that another token created: join with "
         "that token first, or use another name",
         spec.name);
  }
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
// `shards` is empty. On the builder's thread.
Plan Server::plan_for(const PendingJoin& join, const JobSpec& spec, const Transport& transport,
                      const numa::Topology& topology, std::vector<ShardBox>& shards,
                      const Rack* rack) const {
  std::erase_if(shards, [&](const ShardBox& shard) {
    return std::ranges::count(shard.about.transports, transport.name()) == 0;
  });
  if (transport.shares_memory() || join.quota.cores != Quota::kNone) shards.clear();
  const std::set<uint32_t> cpus = quotas_.cpus_of(join.request.caller.id);
  const uint64_t most_cores = std::clamp<uint64_t>(join.quota.cores, 1, ~uint32_t{0});
  PlanOptions options{.most_cores = static_cast<uint32_t>(most_cores),
                      .preferred_cpus = {cpus.begin(), cpus.end()},
                      .ranks = spec.max_ranks,
                      .chunk_elements = spec.chunk_elements,
                      .shared_memory = transport.shares_memory(),
                      .trailer_elements = trailer_of(spec),
                      .gradient_dtype = spec.gradient_dtype};
  if (rack) {
    for (const ChunkLayout& chunk : rack->above.chunks) options.units.push_back(chunk.queue);
  }
  numa::Topology all = topology;
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
  shards.clear();
  return plan_for(join, spec, transport, topology, shards, rack);
}

// Nothing: the job does not use the switch. On the builder's thread.
std::optional<SwitchedJob> Server::switched(const JobSpec& spec, const Plan& plan,
                                            const Transport& transport, const Manifest* saved,
                                            std::vector<std::string>& passed_over) {
  if (!options_.through_switch || options_.parent || !may_switch(spec)) return std::nullopt;
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

// On the builder's thread.
std::shared_ptr<RunningJob> Server::make(const PendingJoin& join,
                                         const std::shared_ptr<JobSpec>& shared_spec,
                                         const numa::Topology& topology,
                                         std::vector<ShardBox> shards,
                                         std::vector<std::string>& passed_over,
                                         const std::shared_ptr<Uplink>& uplink) {
  const JoinRequest& request = join.request;
  JobSpec& spec = *shared_spec;
  std::optional<Manifest> saved;
  if (!uplink) saved = newest_checkpoint(request, spec, passed_over);
  if (saved) take_tiles(saved->spec.keys, spec);
  std::optional<Rack> below;
  if (uplink) {
    below = rack_of(spec, uplink);
    take_tiles(uplink->admission().spec.keys, spec);
  }
  const Rack* const rack = below ? &*below : nullptr;
  Transport& link_transport = machine_.transport_named(request.transport);
  if (!spec.rack_ranks.empty() && link_transport.shares_memory()) {
    fail(ErrorCode::kInvalid, "racks send over a network, not over '{}'", request.transport);
  }
  Plan plan = plan_for(join, spec, link_transport, topology, shards, rack);
  for (size_t k = 0; k < spec.keys.size(); ++k) spec.keys[k].tile_rows = plan.tile_rows[k];
  // What the box has nothing of is saved if its ranks save.
  const bool snapshots =
      host_.checkpoints != nullptr && (box_has_state(spec) || request.saves || saved);
  const std::optional<SwitchedJob> through =
      switched(spec, plan, link_transport, saved ? &*saved : nullptr, passed_over);
  const NodeMemory memory = Job::memory_for(plan, spec, snapshots, saved ? saved->ranks.size() : 0,
                                            rack, through ? &*through : nullptr);
  const Quotas::Needs needed = needs_of(spec, plan, memory);
  if (!saved) {  // what went on before may go on
    quotas_.check(request.caller, join.quota, spec.name, needed, [&] {
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
                 .owner = saved && !saved->owner.empty() ? saved->owner : request.caller.id};
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
  std::shared_ptr<Job> job;
  try {
    job = std::make_shared<Job>(shared_spec, std::move(plan), link_transport, options_.store,
                                snapshots, saved ? &*saved : nullptr, rack,
                                through ? &*through : nullptr);
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
    return std::make_shared<RunningJob>(job, request.transport, std::move(cores), host_,
                                        std::move(life), std::move(shards), uplink);
  } catch (...) {
    loads_.erase(job.get());
    quotas_.remove(job.get());
    job.reset();
    host_.budget.release(at_first.total());
    throw;
  }
}

void Server::add(const std::shared_ptr<RunningJob>& job) {
  jobs_[job->job().spec().name] = job;
  for (uint32_t i = 0; i < job->job().cores(); ++i) {
    by_core_job_[&job->job().core_job(i)] = job.get();
  }
  find_tick();
  job->start();
}

// The creator of a job gets its token with the answer to the join that created it: a new one when
// that join is sent again, as the answer before it did not arrive. Only its hash is kept.
Reply<JoinReply> Server::with_job_token(const Join& join) {
  const JoinRequest& request = join->request;
  const JobOwner* created = owner(request.spec.name);
  if (created == nullptr || created->creator.id != request.caller.id ||
      created->join_id != request.id) {
    return join->reply;
  }
  return [this, name = request.spec.name, reply = join->reply](Result<JoinReply> result) {
    const auto at = owners_.find(name);
    if (result && at != owners_.end()) {
      result.value->job_token = make_token();
      at->second.token_sha256 = hex_of(sha256(result.value->job_token));
    }
    reply(std::move(result));
  };
}

// The job exists: checks that the worker asks for the same keys and options.
void Server::compare(RunningJob& job, const Join& join) {
  const auto check = [&job, join] {
    complete_spec(join->request.spec);
    job.members().check_life(join->request.epoch);
    job.members().check_same(join->request.spec, join->request.transport);
  };
  job.run_beside(host_.coder, check, [this, &job, join](const std::optional<Error>& refused) {
    if (job.ending()) {
      waiting_.push_back(join);
    } else if (refused) {
      join->reply({refused->code(), refused->what()});
    } else {
      job.members().join(join->request,
                         join->request.id.empty() ? join->reply : with_job_token(join));
    }
  });
}

// The job's name is free at once, its memory when the builder has freed it: that takes a while for
// many gigabytes.
void Server::retire(RunningJob& gone) {
  const std::string name = gone.job().spec().name;
  for (uint32_t i = 0; i < gone.job().cores(); ++i) by_core_job_.erase(&gone.job().core_job(i));
  by_number_.erase(gone.number());
  RunningJob::Remains remains = gone.finish();
  ++freeing_;
  host_.builder.run(
      [this, name, over = remains.over, job = std::move(remains.job)]() mutable {
        std::optional<Error> not_ended;
        if (over && job->takes_snapshots()) {
          not_ended = error_of([&] { host_.checkpoints->end(name); });
        }
        const uint64_t bytes = job->memory().total();
        loads_.erase(job.get());
        quotas_.remove(job.get());
        job.reset();
        host_.budget.release(bytes);
        if (not_ended) throw Error(*not_ended);
      },
      [this, name, removals = std::move(remains.removals)](const std::optional<Error>& not_ended) {
        --freeing_;
        if (not_ended) {
          host_.notes.add(clock_.now_ms(),
                          fmt::format("job '{}' has ended, but the next of its name would go on "
                                      "from its checkpoint: {}",
                                      name, not_ended->what()));
        }
        for (const Reply<Done>& reply : removals) reply(Done{});
        for (const Join& join : std::exchange(waiting_, {})) place(join);
      });
  jobs_.erase(name);
  owners_.erase(name);
  find_tick();
}

}  // namespace phub

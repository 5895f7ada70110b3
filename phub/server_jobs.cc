// Server: from a join to its job. A new job is made beside the control thread; a join of a job that
// is ending waits until it has ended.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "phub/control/tokens.h"
#include "phub/server.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

std::vector<PlanLoad> load_of(const Plan& plan, const JobSpec& spec) {
  std::vector<PlanLoad> load;
  const uint64_t bytes = element_bytes(spec).gradient * spec.max_ranks;
  for (size_t q = 0; q < plan.queues.size(); ++q) {
    const QueuePlan& queue = plan.queues[q];
    load.push_back({plan.cores[queue.core].os_cpu, plan.nics[queue.nic].name, 0});
    for (const uint32_t chunk : plan.queue_chunks[q]) {
      load.back().bytes += plan.chunks[chunk].elements * bytes;
    }
  }
  return load;
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

Transport& Server::transport_named(const std::string& name) {
  std::string known;
  for (auto& transport : transports_) {
    if (transport->name() == name) return *transport;
    known += (known.empty() ? "" : ", ") + std::string(transport->name());
  }
  fail(ErrorCode::kInvalid, "this server does not offer transport '{}'; it offers: {}",
       printable(name), known);
}

void Server::join(JoinRequest request, Reply<JoinReply> reply) {
  if (request.version != kProtocolVersion) {
    fail(ErrorCode::kInvalid, "this server speaks protocol version {}, the worker version {}",
         kProtocolVersion, request.version);
  }
  transport_named(request.transport);
  place(std::make_shared<PendingJoin>(PendingJoin{std::move(request), std::move(reply)}));
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
  creating_[join->request.spec.name];
  if (options_.quota_of) join->quota = options_.quota_of(join->request.caller);
  numa::Topology topology = topology_;
  topology.nics = ports_of(transport_named(join->request.transport));
  struct Made {
    std::shared_ptr<RunningJob> job;
    std::vector<std::string> passed_over;
  };
  const auto made = std::make_shared<Made>();
  host_.builder.run(
      [this, join, made, topology = std::move(topology)] {
        complete_spec(join->request.spec);
        made->job = make(*join, topology, made->passed_over);
      },
      [this, join, made](const std::optional<Error>& refused) {
        for (const std::string& line : made->passed_over) host_.notes.add(clock_.now_ms(), line);
        const std::vector<Join> others =
            std::move(creating_.extract(join->request.spec.name).mapped());
        if (!refused) {
          add(made->job);
          const JoinRequest& request = join->request;
          if (!request.caller.id.empty()) {
            owners_[request.spec.name] = {.creator = request.caller, .join_id = request.id};
          }
          made->job->join(request, with_job_token(join));
        } else if (refused->code() == ErrorCode::kFull && freeing_ + host_.ending > 0) {
          waiting_.push_back(join);  // until the memory of ended jobs is free
        } else {
          join->reply({refused->code(), refused->what()});
        }
        for (const Join& other : others) place(other);
      });
}

// What the job goes on from; nothing: it begins. Workers may ask for other numbers of ranks than it
// had, and for other limits; all else is as it was.
std::optional<Manifest> Server::newest_checkpoint(const JoinRequest& request,
                                                  std::vector<std::string>& passed_over) {
  const JobSpec& spec = request.spec;
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
  }
  const std::string different = difference(spec, expected);
  if (!different.empty()) {
    fail(ErrorCode::kMismatch,
         "job '{}' is to go on after round {}, from its checkpoint, and differs from it: {}; join "
         "as before, or use another name",
         spec.name, saved->round, different);
  }
  check_hyper_of(*saved);
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

// On the builder's thread.
std::shared_ptr<RunningJob> Server::make(const PendingJoin& join, const numa::Topology& topology,
                                         std::vector<std::string>& passed_over) {
  const JoinRequest& request = join.request;
  const JobSpec& spec = request.spec;
  const std::optional<Manifest> saved = newest_checkpoint(request, passed_over);
  Transport& link_transport = transport_named(request.transport);
  std::vector<PlanLoad> load;
  for (const auto& [job, of_job] : loads_) load.insert(load.end(), of_job.begin(), of_job.end());
  const std::set<uint32_t> cpus = quotas_.cpus_of(request.caller.id);
  const uint64_t most_cores = std::clamp<uint64_t>(join.quota.cores, 1, ~uint32_t{0});
  Plan plan = make_plan(topology, spec.keys,
                        {.most_cores = static_cast<uint32_t>(most_cores),
                         .preferred_cpus = {cpus.begin(), cpus.end()},
                         .ranks = spec.max_ranks,
                         .chunk_elements = spec.chunk_elements,
                         .shared_memory = link_transport.shares_memory(),
                         .gradient_bytes = element_bytes(spec).gradient,
                         .load = std::move(load)});
  // What the box has nothing of is saved if its ranks save.
  const bool snapshots =
      host_.checkpoints != nullptr && (box_has_state(spec) || request.saves || saved);
  const NodeMemory memory = total_memory(plan, spec, snapshots, saved ? saved->ranks.size() : 0);
  const Quotas::Needs needed = needs_of(spec, plan, memory);
  if (!saved) {  // what went on before may go on
    quotas_.check(request.caller, join.quota, spec.name, needed, [&] {
      return host_.checkpoints ? host_.checkpoints->kept_bytes(request.caller.id)
                               : Quotas::BytesOfJobs();
    });
  }
  host_.budget.reserve(spec, memory);
  SavedLife life{.durable_round = saved ? saved->round : 0,
                 .owner = saved && !saved->owner.empty() ? saved->owner : request.caller.id};
  const std::string owner = life.owner;
  if (saved) {
    life.from = {.epoch = saved->epoch, .round = saved->round};
    life.part_bytes = SavedJobs::parts_of(*saved);
  }
  std::shared_ptr<Job> job;
  try {
    job = std::make_shared<Job>(spec, std::move(plan), link_transport, options_.store, snapshots,
                                saved ? &*saved : nullptr);
    if (saved) host_.checkpoints->load(*saved, *job);
    if (job->takes_snapshots()) {
      life.epoch = host_.checkpoints->begin_life(spec.name);
      life.ended = host_.checkpoints->ended_epoch(spec.name);
    }
    std::vector<uint32_t> cores;
    for (const CorePlan& core : job->plan().cores) {
      const auto at = std::find(core_cpus_.begin(), core_cpus_.end(), core.os_cpu);
      cores.push_back(static_cast<uint32_t>(at - core_cpus_.begin()));
    }
    if (trace_) {
      const uint32_t number = trace_->add_job(*job);
      for (uint32_t i = 0; i < cores.size(); ++i) {
        job->core_job(i).trace(trace_->log(cores[i]), cores[i], number);
      }
    }
    loads_[job.get()] = load_of(job->plan(), spec);
    if (!owner.empty()) quotas_.add(job.get(), owner, spec.name, needed);
    return std::make_shared<RunningJob>(job, request.transport, std::move(cores), host_,
                                        std::move(life));
  } catch (...) {
    loads_.erase(job.get());
    quotas_.remove(job.get());
    job.reset();
    host_.budget.release(memory.total());
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
    job.check_life(join->request.epoch);
    job.check_same(join->request.spec, join->request.transport);
  };
  job.run_beside(host_.coder, check, [this, &job, join](const std::optional<Error>& refused) {
    if (job.ending()) {
      waiting_.push_back(join);
    } else if (refused) {
      join->reply({refused->code(), refused->what()});
    } else {
      job.join(join->request, join->request.id.empty() ? join->reply : with_job_token(join));
    }
  });
}

// The job's name is free at once, its memory when the builder has freed it: that takes a while for
// many gigabytes.
void Server::retire(RunningJob& gone) {
  const std::string name = gone.job().spec().name;
  for (uint32_t i = 0; i < gone.job().cores(); ++i) by_core_job_.erase(&gone.job().core_job(i));
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

// Server: from a join to its job. A new job is made beside the control thread; a join of a job that
// is ending waits until it has ended.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/control/tokens.h"
#include "phub/server.h"
#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/text.h"

namespace phub {

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

// The features that a job has from this server: below a parent, or behind a switch.
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
        const auto refused = error_of([&] {
          made->job = maker_.make({.join = join->request,
                                   .quota = join->quota,
                                   .spec = spec,
                                   .topology = topology,
                                   .shards = shards,
                                   .uplink = uplink},
                                  made->passed_over);
        });
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
    maker_.forget(job->job());
    job.reset();
    host_.budget.release(bytes);
  });
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
        maker_.forget(*job);
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

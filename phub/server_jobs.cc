// Server: from a join to its answer, told downwards (task.h). A new job is made beside the control
// thread; a join of a job that is ending waits until it has ended.
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
  answer(admit(std::make_shared<JoinRequest>(std::move(request))), std::move(reply));
}

// A join, until its rank is admitted.
Task<JoinReply> Server::admit(Join join) {
  const std::string name = join->spec.name, id = join->id, caller = join->caller.id;
  RunningJob* job = nullptr;
  bool has_created = false;
  for (;;) {  // a join that has waited begins anew, as jobs may have come and gone
    if (const auto made = jobs_.making.find(name); made != jobs_.making.end()) {
      co_await made->second.next();
      continue;
    }
    job = jobs_.find(name);
    if (!job && jobs_.all().size() + jobs_.making.size() >= Core::kMaxJobs) {
      fail(ErrorCode::kFull, "this server has {} jobs, which is the limit; remove one",
           Core::kMaxJobs);
    }
    if (job ? job->ending() : shards_.awaits_boxes(name)) {
      co_await retry_.next();
      continue;
    }
    if (job) {
      const auto compare = [&] {
        complete_spec(join->spec);
        job->members().check_life(join->epoch);
        job->members().check_same(join->spec, join->transport);
      };
      const std::optional<Error> differs = co_await beside(*job, host_.coder, compare);
      if (job->ending()) continue;
      if (differs) throw Error(*differs);
      break;
    }
    jobs_.making[name];
    std::optional<Error> refused;
    try {
      job = co_await create(join);
    } catch (const Error& error) {
      refused = error;
    }
    Event made = std::move(jobs_.making.extract(name).mapped());
    co_await made.happen_after_me();
    has_created = !refused;
    if (has_created) break;
    if (refused->code() != ErrorCode::kFull || freeing_ + host_.ending == 0) throw Error(*refused);
    co_await retry_.next();  // until the memory of ended jobs is free
  }

  // The creator of a job gets its token with the answer to the join that created it: a new one when
  // that join is sent again, as the answer before it did not arrive. Only its hash is kept.
  const JobOwner* const created = owner(name);
  const bool gets_token = created != nullptr && created->creator.id == caller &&
                          created->join_id == id && (has_created || !id.empty());
  const auto ask = [&](Reply<JoinReply> reply) {
    const JoinRequest request = std::move(*join);
    job->members().join(request, std::move(reply));
  };
  JoinReply admission = co_await answer_to<JoinReply>(ask);
  if (JobOwner* const there = jobs_.owner(name); gets_token && there != nullptr) {
    admission.job_token = make_token();
    there->token_sha256 = hex_of(sha256(admission.job_token));
  }
  co_return admission;
}

// The features that a job has from this server: below a parent, with a standby, behind a switch.
Features Server::features_here(const JobSpec& spec) const {
  if (options_.parent) return Feature::kBelowParent;
  if (options_.standby && wants_standby(spec)) return Feature::kHasStandby;
  if (options_.through_switch && may_switch(spec)) return Feature::kSwitch;
  return {};
}

// Makes the job that a join asks for, and takes the join's spec for it.
Task<RunningJob*> Server::create(Join join) {
  const Quota quota = options_.quota_of ? options_.quota_of(join->caller) : Quota();
  std::shared_ptr<Uplink> uplink;
  const bool has_standby = options_.standby && wants_standby(join->spec);
  if (options_.parent || has_standby) uplink = co_await uplinks_.join(join);
  const numa::Topology topology = machine_.topology_for(machine_.transport_named(join->transport));
  const std::vector<ShardBox> shards = host_.shards.boxes();
  std::shared_ptr<RunningJob> job;
  std::vector<std::string> passed_over;
  const auto make = [&] {
    complete_spec(join->spec);
    // The job gets the join's own spec. If there is no job, the join may have to wait with it.
    const auto spec = std::make_shared<JobSpec>(std::move(join->spec));
    join->held.reset();  // the job's own memory has it
    const auto refused = error_of([&] {
      job = maker_.make({.join = *join,
                         .quota = quota,
                         .spec = spec,
                         .topology = topology,
                         .shards = shards,
                         .uplink = options_.parent ? uplink : nullptr,
                         .standby = has_standby ? uplink : nullptr},
                        passed_over);
    });
    if (!refused) return;
    join->spec = std::move(*spec);
    throw Error(*refused);
  };
  std::optional<Error> refused = co_await beside(host_.builder, make);
  if (refused && uplink) uplink->leave();
  for (const std::string& line : passed_over) host_.notes.add(clock_.now_ms(), line);
  if (!refused && job->has_remote_parts()) {
    jobs_.add_spread(job);
    const auto make_remote_parts = [&](RemoteParts::Done done) {
      job->make_remote_parts(std::move(done));
    };
    refused = co_await outcome_of(make_remote_parts);
  }
  if (refused) {
    if (job) {
      join->spec = job->job().spec();
      discard(std::move(job));
    }
    throw Error(*refused);
  }
  jobs_.add(job, {.creator = join->caller, .join_id = join->id, .token_sha256 = {}});
  next_tick_ms_ = 0;
  job->start();
  co_return job.get();
}

// One whose parts elsewhere could not be made.
void Server::discard(std::shared_ptr<RunningJob> job) {
  job->drop_remote_parts();
  jobs_.drop_spread(job->number());
  host_.builder.run([this, job = std::move(job)]() mutable {
    const uint64_t bytes = job->counted_bytes();
    maker_.forget(job->job());
    job.reset();
    host_.budget.release(bytes);
  });
}

// The job's name is free at once, its memory when the builder has freed it: that takes a while for
// many gigabytes.
Story Server::retire(std::string name) {
  RunningJob::Remains remains = jobs_.remove(name);
  next_tick_ms_ = 0;
  ++freeing_;
  const auto free = [&] {
    std::optional<Error> not_ended;
    if (remains.over && remains.job->takes_snapshots()) {
      not_ended = error_of([&] { host_.checkpoints->end(name); });
    }
    const uint64_t bytes = remains.job->memory().total();
    maker_.forget(*remains.job);
    remains.job.reset();
    host_.budget.release(bytes);
    if (not_ended) throw Error(*not_ended);
  };
  const std::optional<Error> not_ended = co_await beside(host_.builder, free);
  --freeing_;
  if (not_ended) {
    host_.notes.add(clock_.now_ms(),
                    fmt::format("job '{}' has ended, but the next of its name would go on from its "
                                "checkpoint: {}",
                                name, not_ended->what()));
  }
  for (const Reply<Done>& reply : remains.removals) reply(Done{});
  retry_.happen();
}

}  // namespace phub

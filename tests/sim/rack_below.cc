// The boxes below the root of a simulated rack: their start, their logs, and what goes wrong there.
#include <fmt/format.h>

#include <algorithm>

#include "tests/sim/rack.h"
#include "tests/sim/virtual_clock.h"

namespace phub::sim {
namespace {

constexpr uint64_t kBetweenTriesNs = 100'000;
constexpr uint32_t kTries = 100;

}  // namespace

ControlHandler& Rack::server(uint32_t box) const {
  return box == 0 ? *server_ : *below_[box - 1]->server();
}

ControlNet& Rack::control(uint32_t box) { return box == 0 ? control_ : below_[box - 1]->control(); }

void Rack::start_below() {
  for (uint32_t i = 0; i < plan_.racks.size(); ++i) {
    const RackBoxPlan& box = plan_.racks[i];
    const auto number = static_cast<uint32_t>(boxes_.size());
    add_box(box.cores);
    const auto make = [this, number, cores = box.cores](Parent& parent, const Clock& clock) {
      ServerOptions options;
      options.parent = &parent;
      return make_server(number, 1, cores, std::move(options), clock);
    };
    const SimParent::Way way{.near = near_to(box.above),
                             .budget = budget_of(plan_.uplink_bytes_per_s)};
    below_.push_back(std::make_unique<RackBox>(
        net_, number,
        std::make_unique<ControlNet>(net_, plan_.control_loss, plan_.control_duplicate,
                                     plan_.control_delay_ns, plan_.control_timeout_ns),
        control(box.above),
        [this, above = box.above]() -> ControlHandler& { return server(above); }, watch_on(i + 1),
        way, make));
  }
  wake_all();
}

// What passes between a box and the one above.
SimParent::Watch Rack::watch_on(uint32_t box) {
  const bool below_root = plan_.racks[box - 1].above == 0;
  SimParent::Watch watch;
  watch.admits = [this, below_root](const JoinReply& reply) {
    JobRun& job = job_of(reply.spec.name);
    if (below_root && reply.epoch > 0) job.life_of_epoch[reply.epoch] = life(job);
  };
  watch.begins_state = [this, below_root](const Credential& who) {
    JobRun& job = job_of(who.job);
    if (below_root) job.sets_before_answer[who.rank] = sets_in_log(job);
  };
  watch.joined = [this, box](const JoinReply& reply) {
    JobRun& job = job_of(reply.spec.name);
    job.life_at[box] = {life_below(job, reply.epoch), reply.epoch};
  };
  return watch;
}

JobRun& Rack::job_of(const std::string& name) {
  return **std::ranges::find_if(jobs_,
                                [&name](const auto& job) { return job->plan.spec.name == name; });
}

// Takes the logs of the jobs that have ended at a box.
void Rack::watch_below(uint32_t box) {
  const Server& server = *below_[box - 1]->server();
  for (auto& job : jobs_) {
    if (server.has_job(job->plan.spec.name)) {
      if (!job->ended) job->at_boxes.insert(box);  // else it is another one of that name
    } else if (job->at_boxes.erase(box) > 0) {
      take_log(*job, box);
    }
  }
}

void Rack::take_log(JobRun& job, uint32_t box) {
  job.logs_below.push_back(
      {level_of(plan_, job.plan, box), job.life_at[box], log_at(*below_[box - 1]->server(), job)});
}

// What the box's cores have done is in its logs. What they do in a boundary is not until it is
// over; then they have closed somebody's queue pairs.
bool Rack::has_exact_logs(uint32_t box) {
  size_t live = 0;
  for (const JobStatus& job : below_[box - 1]->server()->status().jobs) {
    live += static_cast<size_t>(std::ranges::count(job.ranks, "live", &RankStatus::state));
  }
  size_t linked = 0;
  const auto count = [&linked](WorkerLink* link) {
    linked += link != nullptr && !SimNet::closed_by_box(*link);
  };
  for (Trainer* trainer : trainers_) {
    if (trainer->box() == box) count(trainer->link());
  }
  for (uint32_t below = 1; below <= below_.size(); ++below) {
    if (plan_.racks[below - 1].above != box) continue;
    for (WorkerLink* link : net_.links_from(below_[below - 1]->box())) count(link);
  }
  return live == linked;
}

void Rack::kill_box_below(uint32_t box, bool silent, uint64_t ms, uint32_t tries) {
  RackBox& dying = *below_[box - 1];
  if (dying.server() == nullptr) return;
  const bool exact = has_exact_logs(box);
  if (!exact && tries > 0) {
    return net_.after(kBetweenTriesNs, [=, this] { kill_box_below(box, silent, ms, tries - 1); });
  }
  net_.trace("a box below dies", box, silent, exact);
  for (auto& job : jobs_) {
    if (job->at_boxes.erase(box) == 0) continue;
    take_log(*job, box);
    job->log_lost |= !exact;
  }
  dying.crash(silent);
  ++box_deaths_below_;
  net_.after(ms * kMs, [this, &dying, box] {
    net_.trace("a box below is started", box);
    dying.start();
    std::ranges::fill(boxes_[dying.box()].cores, CoreState{});
  });
}

void Rack::harm_below_in_time() {
  for (; rack_faults_ < plan_.rack_faults.size() &&
         plan_.rack_faults[rack_faults_].after_pushes < pushes_;
       ++rack_faults_) {
    const RackFault& fault = plan_.rack_faults[rack_faults_];
    const auto box = static_cast<uint32_t>(1 + fault.box % below_.size());
    net_.trace(name_of(fault.kind), box, fault.ms);
    // Not now: some process is in the middle of its pass.
    net_.after(0, [this, &fault, box] { harm_below(fault, box); });
  }
}

void Rack::harm_below(const RackFault& fault, uint32_t box) {
  RackBox& harmed = *below_[box - 1];
  if (harmed.server() == nullptr) return;
  switch (fault.kind) {
    case RackFault::kDies:
    case RackFault::kDiesSilently:
      kill_box_below(box, fault.kind == RackFault::kDiesSilently, fault.ms, kTries);
      break;
    case RackFault::kHangs:
      harmed.hang(fault.ms * kMs);
      break;
    case RackFault::kStandsStill:
      harmed.stand_still(fault.ms);
      break;
    case RackFault::kBreaks:
      for (WorkerLink* link : net_.links_from(harmed.box())) {
        if (net_.break_queue_pair(*link)) break;
      }
      return;
    case RackFault::kMute:
    case RackFault::kDeaf:
      harmed.cut_off(fault.kind == RackFault::kMute, fault.ms * kMs);
      break;
    case RackFault::kRootHangs:
      root_hangs_until_ns_ = net_.now_ns() + fault.ms * kMs;
      net_.after(fault.ms * kMs, [] {});
      break;
  }
  for (auto& job : jobs_) {
    if (!job->ended && !job->plan.box_of.empty()) replace_ranks(*job, fault, box);
  }
}

// Who was lost with a box is followed by others, when the boxes above and below have noticed.
// Until then nobody ends the job.
void Rack::replace_ranks(JobRun& job, const RackFault& fault, uint32_t box) {
  ++job.starting;
  const uint64_t noticed_ms = fault.ms + 3 * uint64_t{job.plan.spec.lease_ms};
  const bool all = fault.kind == RackFault::kRootHangs;
  net_.after(noticed_ms * kMs, [this, &job, box, all] {
    resolved(job);
    for (uint32_t rank = 0; rank < job.plan.spec.world_size; ++rank) {
      if (!all && !is_below(plan_, job.plan.box_of[rank], box)) continue;
      if (std::ranges::any_of(job.trainers, [rank](const auto& t) { return t->is_of(rank); })) {
        continue;
      }
      start(job, {.rank = static_cast<int32_t>(rank), .patient = true}, random().below(kMs));
    }
  });
}

}  // namespace phub::sim

// What goes wrong in a rack, and when: after so many pushes of a worker, a job or all of them.
#include <algorithm>

#include "tests/sim/rack.h"
#include "tests/sim/virtual_clock.h"

namespace phub::sim {

void Rack::kill_server(const BoxFault& fault) {
  if (!server_) return;
  net_.trace("the box dies", life_);
  ++life_;
  dying_ = nullptr;
  control_.server_died();
  server_.reset();
  disk_.disarm();
  using Loss = testing::SimulatedDisk::Loss;
  disk_.restart(fault.power ? Loss::kRandom : Loss::kNothing, losses_);
  for (auto& job : jobs_) {
    if (fault.with_workers && !job->ended) restart_workers(*job, fault.restart_ms);
  }
  net_.after(fault.restart_ms * kMs, [this] {
    net_.trace("the box is started", life_);
    for (auto& job : jobs_) {
      job->seen = job->seen && job->ended;
      job->gone = job->ended;
    }
    start_server();
    control_.server_started();
    set_server_timer();
  });
}

// Other workers go on with the job, more or fewer of them.
void Rack::restart_workers(JobRun& job, uint64_t delay_ms) {
  if (job.restarts == job.plan.later_ranks.size()) return;
  const JobPlan::Ranks& ranks = job.plan.later_ranks[job.restarts++];
  job.spec.world_size = ranks.world_size;
  job.spec.max_ranks = ranks.max_ranks;
  job.spec.quorum = std::min(job.spec.quorum, ranks.world_size);
  for (auto& trainer : job.trainers) {
    if (trainer->done()) continue;
    if (!trainer->joined()) resolved(job);
    trainer->crash(true);
  }
  for (uint32_t r = 0; r < ranks.world_size; ++r) {
    start(job, {.rank = job.plan.fixed_ranks ? static_cast<int32_t>(r) : -1, .patient = true},
          delay_ms * kMs + random().below(kMs));
  }
}

void Rack::kill_server_in_time() {
  while (box_faults_ < plan_.box_faults.size() &&
         plan_.box_faults[box_faults_].after_pushes < pushes_) {
    const BoxFault& fault = plan_.box_faults[box_faults_++];
    if (fault.disk_call == 0) {
      net_.after(fault.delay_ns, [this, &fault] { kill_server(fault); });
    } else if (server_) {
      dying_ = &fault;
      disk_.arm(fault.disk_call, testing::SimulatedDisk::Fault::kCrash);
    }
  }
}

// What it survives.
void Rack::harm_box_in_time() {
  for (; clock_jumps_ < plan_.clock_jumps.size() &&
         plan_.clock_jumps[clock_jumps_].after_pushes < pushes_;
       ++clock_jumps_) {
    net_.trace("clock jumps", plan_.clock_jumps[clock_jumps_].ms);
    clock_.jump(plan_.clock_jumps[clock_jumps_].ms);
  }
  for (; disk_faults_ < plan_.disk_faults.size() &&
         plan_.disk_faults[disk_faults_].after_pushes < pushes_;
       ++disk_faults_) {
    const DiskFault& fault = plan_.disk_faults[disk_faults_];
    if (!server_ || dying_ != nullptr) continue;
    disk_.arm(fault.call, fault.kind);
    make_room_after(fault.room_ms + 1);
  }
}

void Rack::harm_shards_in_time() {
  for (; shard_faults_ < plan_.shard_faults.size() &&
         plan_.shard_faults[shard_faults_].after_pushes < pushes_;
       ++shard_faults_) {
    const ShardFault& fault = plan_.shard_faults[shard_faults_];
    Shard& shard = *shards_[fault.shard % shards_.size()];
    if (shard.server() == nullptr) continue;
    net_.trace(fault.hangs ? "a shard hangs" : "a shard dies", fault.shard);
    if (fault.hangs) {
      shard.hang(fault.ms * kMs);
    } else {
      net_.after(0, [&shard] { shard.crash(); });
    }
    net_.after(fault.ms * kMs, [&shard] {
      if (shard.server() == nullptr) shard.start();
    });
  }
}

void Rack::harm_switch_in_time() {
  if (!switch_) return;
  const std::vector<SwitchFault>& faults = plan_.through_switch->faults;
  for (; switch_faults_ < faults.size() && faults[switch_faults_].after_pushes < pushes_;
       ++switch_faults_) {
    const SwitchFault& fault = faults[switch_faults_];
    net_.trace("the switch is harmed", fault.kind, fault.ms);
    switch_->harm(fault);
  }
}

// Once it is full; a box that dies finds room.
void Rack::make_room_after(uint64_t ms) {
  net_.after(ms * kMs, [this, ms, life = life_] {
    if (life != life_) return;
    if (!disk_.fired()) return make_room_after(ms);
    disk_.make_room();
  });
}

void Rack::schedule_windows() {
  for (const LossWindow& window : plan_.windows) {
    net_.after(window.from_ns, [this, window] { net_.set_loss(window.loss); });
    net_.after(window.to_ns, [this] { net_.set_loss(plan_.net.loss); });
  }
}

void Rack::pushed(JobRun& job, Trainer& trainer) {
  ++job.pushes;
  ++pushes_;
  kill_server_in_time();
  harm_box_in_time();
  harm_shards_in_time();
  harm_switch_in_time();
  harm_below_in_time();
  cut_off_in_time(job);
  while (job.late_started < job.plan.late_ranks &&
         job.plan.late_after_pushes[job.late_started] < job.pushes) {
    ++job.late_started;
    const uint32_t rank = job.plan.spec.world_size + job.late_started - 1;
    if (job.plan.box_of.empty() && job.plan.interest.empty()) {
      start(job, {}, random().below(kMs));
    } else {
      start(job, {.rank = static_cast<int32_t>(rank), .patient = true}, random().below(kMs));
    }
  }
  const auto& device = job.plan.device_fault;
  if (device && !job.device_failed && job.pushes > device->after_pushes) {
    const size_t cores =
        trainer.box() > 0 ? plan_.racks[trainer.box() - 1].cores : job.layout.cores.size();
    const auto core = static_cast<uint32_t>(device->core % cores);
    job.device_failed = net_.fail_device(*trainer.link(), core, device->said);
  }
  for (size_t i = 0; i < job.plan.faults.size(); ++i) {
    const Fault& fault = job.plan.faults[i];
    if (job.fault_done[i] || !trainer.has_rank(fault.rank) || trainer.done() ||
        trainer.pushes() < fault.after_pushes) {
      continue;
    }
    job.fault_done[i] = true;
    apply(job, trainer, fault);
  }
}

void Rack::apply(JobRun& job, Trainer& trainer, const Fault& fault) {
  net_.trace(name_of(fault.kind), trainer.id(), fault.rank);
  const bool harmless = fault.kind == Fault::kStraggle || fault.kind == Fault::kBreak;
  if (!harmless) trainer.disturb();
  if (fault.successor != Fault::kNobody) {
    const bool eager = fault.successor == Fault::kEager;
    if (eager) job.taken_over.insert(fault.rank);
    start(job,
          {.rank = static_cast<int32_t>(fault.rank),
           .replace = eager,
           .patient = !eager,
           .box = trainer.box()},
          fault.successor_ms * kMs);
  }
  switch (fault.kind) {
    case Fault::kCrash:
    case Fault::kSilentCrash:
      // Not now: the process is in the middle of its pass.
      return net_.after(
          0, [&trainer, silent = fault.kind == Fault::kSilentCrash] { trainer.crash(silent); });
    case Fault::kHang:
    case Fault::kStraggle:
      return trainer.hang(fault.hang_ms, false);
    case Fault::kBeatingHang:
      return trainer.hang(fault.hang_ms, true);
    case Fault::kBreak:
      net_.break_queue_pair(*trainer.link());
      return;
    case Fault::kReplace:
      return;
    case Fault::kMute:
    case Fault::kDeaf:
      return trainer.cut_off(fault.kind == Fault::kMute, fault.hang_ms);
    case Fault::kLeave:
      // Somebody must stay: a job ends with its last rank, and who joins then makes a new one.
      if (std::ranges::count_if(job.trainers, [](const auto& t) { return t->staying(); }) > 1) {
        trainer.leave_early();
      }
      return;
  }
}

}  // namespace phub::sim

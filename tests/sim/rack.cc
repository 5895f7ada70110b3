#include "tests/sim/rack.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "numa/topology.h"

namespace phub::sim {
namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kPassNs = 20'000;  // how long a thread that could run may have to wait at least

numa::Topology topology_of(const RackPlan& plan) {
  numa::Topology topology;
  topology.source = "simulated";
  for (uint32_t n = 0; n < plan.nodes; ++n) topology.nodes.push_back({n, 1ull << 34});
  for (uint32_t i = 0; i < plan.cores; ++i) topology.cores.push_back({i % plan.nodes, i});
  return topology;
}

std::string text_of(const JobPlan& job, const LogRecord& record) {
  constexpr const char* kKinds[] = {"admitted", "lost", "left", "hyper", "excluded", "failed"};
  std::string text = fmt::format("log of {}: {} rank {}.{} round {} {}", job.spec.name,
                                 kKinds[static_cast<int>(record.kind)], record.rank,
                                 record.incarnation, record.round, record.reason);
  for (const ChunkSpan& span : record.chunks) {
    text += fmt::format(" {}..{} until {}", span.first, span.last, record.last_round);
  }
  for (const ChunkRange& r : record.last_rounds) {
    text += fmt::format(" {}..{}:{}", r.first, r.last, r.round);
  }
  return text;
}

// The server owns its transports; the simulated one belongs to the network.
class BorrowedTransport final : public Transport {
 public:
  explicit BorrowedTransport(Transport& nic) : transport_(nic) {}
  std::string_view name() const override { return transport_.name(); }
  std::string describe() const override { return transport_.describe(); }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    return transport_.open_job(layout);
  }
  int event_fd() const override { return transport_.event_fd(); }
  bool shares_memory() const override { return transport_.shares_memory(); }
  void handle_events(std::vector<TransportEvent>& out) override { transport_.handle_events(out); }

 private:
  Transport& transport_;
};

}  // namespace

Rack::Rack(const RackPlan& plan, bool verbose)
    : plan_(plan),
      net_(plan.net),
      clock_(net_),
      control_(net_, plan.control_loss, plan.control_duplicate, plan.control_delay_ns),
      losses_(plan.seed) {
  net_.keep_text(verbose);
  const numa::Topology topology = topology_of(plan);
  start_server();
  for (const JobPlan& job : plan.jobs) {
    jobs_.push_back(
        std::make_unique<JobRun>(job, make_plan(topology, job.spec.keys,
                                                {.cores = plan.cores,
                                                 .ranks = job.spec.max_ranks,
                                                 .chunk_elements = job.spec.chunk_elements,
                                                 .shared_memory = plan.net.shared_memory})));
    JobRun& run = *jobs_.back();
    run.fault_done.resize(job.faults.size());
    const uint64_t begin = random().below(2 * kMs);
    for (uint32_t r = 0; r < job.spec.world_size; ++r) {
      start(run, {.rank = job.fixed_ranks ? static_cast<int32_t>(r) : -1, .patient = true},
            begin + random().below(kMs));
    }
  }
  schedule_windows();
  set_server_timer();
}

void Rack::start_server() {
  std::vector<std::unique_ptr<Transport>> nics;
  nics.push_back(std::make_unique<BorrowedTransport>(net_.transport()));
  ServerOptions options{.topology = topology_of(plan_), .cores = plan_.cores, .pin = false};
  if (plan_.checkpoint_every > 0) {
    options.checkpoints = {
        .folder = "/checkpoints", .every = plan_.checkpoint_every, .keep = 2, .files = &disk_};
  }
  server_ = std::make_unique<Server>(std::move(options), std::move(nics), clock_);
  cores_.assign(plan_.cores, {});
  wake_all();
}

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
  net_.after(fault.restart_ms * kMs, [this] {
    net_.trace("the box is started", life_);
    for (auto& job : jobs_) job->seen = job->seen && job->ended;
    start_server();
    control_.server_started();
    set_server_timer();
  });
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

// The server's loop sleeps no longer than it says.
void Rack::set_server_timer() {
  const uint64_t next = net_.now_ns() + server_->poll_interval_ms() * kMs;
  if (net_.now_ns() < server_timer_ns_ && server_timer_ns_ <= next) return;
  server_timer_ns_ = next;
  net_.after(next - net_.now_ns(), [] {});
}

void Rack::fail(const std::string& what) {
  if (failure_.empty()) failure_ = what;
}

void Rack::start(JobRun& job, const Trainer::Start& how, uint64_t delay_ns) {
  ++job.starting;
  net_.after(delay_ns, [this, &job, how] {
    if (job.ended) return resolved(job);
    job.trainers.push_back(
        std::make_unique<Trainer>(*this, job, static_cast<uint32_t>(trainers_.size()), how));
    trainers_.push_back(job.trainers.back().get());
  });
}

void Rack::pushed(JobRun& job, Trainer& trainer) {
  ++job.pushes;
  ++pushes_;
  kill_server_in_time();
  harm_box_in_time();
  while (job.late_started < job.plan.late_ranks &&
         job.plan.late_after_pushes[job.late_started] < job.pushes) {
    ++job.late_started;
    start(job, {}, random().below(kMs));
  }
  const auto& device = job.plan.device_fault;
  if (device && !job.device_failed && job.pushes > device->after_pushes) {
    const auto core = static_cast<uint32_t>(device->core % job.layout.cores.size());
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
    start(job, {.rank = static_cast<int32_t>(fault.rank), .replace = eager, .patient = !eager},
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

bool Rack::runnable(size_t entity) const {
  if (entity <= cores_.size() && !server_) return false;
  if (entity == 0) return true;
  if (entity <= cores_.size()) {
    const auto core = static_cast<uint32_t>(entity - 1);
    if (net_.now_ns() < cores_[core].paused_until_ns) return false;
    return !cores_[core].asleep || net_.now_ns() >= cores_[core].wake_ns ||
           server_->core(core).has_mail() || net_.core_awake(core);
  }
  return trainer(entity).runnable();
}

bool Rack::step_entity(size_t entity) {
  if (entity == 0) {
    server_->poll();
    if (disk_.crashed()) {
      watch_jobs();
      kill_server(*dying_);
      return false;
    }
    set_server_timer();
    watch_jobs();
    for (uint32_t core = 0; core < server_->cores(); ++core) hot_[1 + core] = true;
    return false;
  }
  if (entity <= cores_.size()) return step_core(static_cast<uint32_t>(entity - 1));
  return trainer(entity).poll();
}

// As Core::run() does, but for the sleep itself.
bool Rack::step_core(uint32_t index) {
  CoreState& state = cores_[index];
  Core& core = server_->core(index);
  if (std::exchange(state.asleep, false)) core.disarm();
  if (random().chance(plan_.core_pause_chance)) {
    const uint64_t pause = random().below(3 * kMs);
    state.paused_until_ns = net_.now_ns() + pause;
    net_.after(pause, [] {});
    return false;
  }
  if (core.step()) {
    hot_[0] = true;
    return true;
  }
  int timeout_ms = -1;
  state.asleep = core.arm(timeout_ms);
  if (!state.asleep) core.disarm();
  state.wake_ns = ~0ull;
  if (state.asleep && timeout_ms >= 0) {
    state.wake_ns = net_.now_ns() + static_cast<uint64_t>(timeout_ms) * kMs;
    net_.after(state.wake_ns - net_.now_ns(), [] {});
  }
  return !state.asleep;
}

// Either something happens in the network, or some thread of some process makes one pass.
void Rack::step() {
  ++steps_;
  hot_.resize(entities(), true);
  std::vector<size_t> ready;
  for (size_t e = 0; e < hot_.size(); ++e) {
    if (hot_[e] && runnable(e)) ready.push_back(e);
  }
  // While somebody can run, time does not jump far.
  const bool soon = !net_.idle() && net_.next_ns() < net_.now_ns() + kPassNs;
  if (ready.empty() || (soon && random().chance(0.2))) {
    net_.run_next();
    return wake_all();
  }
  const size_t chosen = ready[random().below(ready.size())];
  const bool moved = step_entity(chosen);
  hot_.resize(entities(), true);
  hot_[chosen] = moved;
  net_.trace("step", chosen, moved);
  const uint64_t before = net_.idle() ? ~0ull : net_.next_ns();
  const uint64_t cost = random().between(50, 500);
  if (net_.now_ns() + cost >= before) wake_all();
  net_.advance(cost);
}

// Takes the log of a job when it ends: what comes under its name afterwards is another job.
void Rack::watch_jobs() {
  const ServerStatus status = server_->status();
  for (auto& job : jobs_) {
    const auto at = std::ranges::find(status.jobs, job->plan.spec.name, &JobStatus::name);
    const bool there = at != status.jobs.end();
    const bool failed = there && at->state == "failed";
    if (there && !job->ended && std::exchange(job->life, life_) != life_) {
      if (at->durable_round < job->durable) {
        fail(fmt::format("{}: round {} was said to be durable, and the job goes on after {}",
                         job->plan.spec.name, job->durable, at->durable_round));
      }
      job->oracle.undo_from(at->durable_round + 1);
      job->restored += at->durable_round > 0;
    }
    const bool not_made = job->life > 0 ? job->life != life_ : disk_faults_ > 0;
    if (!there && !job->seen && not_made && job->starting == 0 &&
        std::ranges::all_of(job->trainers, [](const auto& t) { return t->done(); })) {
      job->ended = job->gone = job->log_lost = true;
    }
    if (job->gone || (there && !failed && !job->ended) || (!there && !job->seen)) {
      job->seen = job->seen || there;
      continue;
    }
    job->ended = true;
    job->gone = !failed;
    if (there && !failed) continue;
    job->log.clear();
    for (bool more = true; more;) {
      more = false;
      server_->log(job->plan.spec.name, job->log.size(), [&](const Result<LogPage>& page) {
        if (!page) return;
        more = page.value->more;
        std::ranges::copy(page.value->records, std::back_inserter(job->log));
      });
    }
  }
}

bool Rack::finished() const {
  if (!server_) return false;
  if (!std::ranges::all_of(trainers_, &Trainer::done)) return false;
  return std::ranges::all_of(jobs_,
                             [](const auto& job) { return job->starting == 0 && job->ended; }) &&
         server_->status().jobs.empty() && server_->status().memory_bytes == 0;
}

// Far more than any run needs in which every wait has its bound.
uint64_t Rack::limit_ns() const {
  uint64_t ms = 5'000;
  for (const auto& job : jobs_) ms += 1'500 * (job->plan.faults.size() + 1);
  ms += 1'500 * plan_.box_faults.size();
  return ms * kMs;
}

RackResult Rack::run() {
  const uint64_t limit = limit_ns();
  while (failure_.empty() && !finished()) {
    step();
    if (net_.now_ns() > limit)
      fail("somebody waits for ever, or memory is kept:\n" + status_text());
  }
  RackResult result;
  check_end(result);
  result.failure = failure_;
  result.trace_hash = net_.trace_hash();
  result.virtual_ns = net_.now_ns();
  result.steps = steps_;
  result.net = net_.stats();
  result.text = net_.text();
  for (const auto& job : jobs_) {
    for (const LogRecord& record : job->log) result.text.push_back(text_of(job->plan, record));
  }
  trainers_.clear();
  for (auto& job : jobs_) job->trainers.clear();  // their links, before the server's
  server_.reset();
  return result;
}

std::string Rack::status_text() {
  std::string text;
  for (const auto& job : jobs_) {
    text += fmt::format("  {}: {}, {} starting, {} pushes\n", job->plan.spec.name,
                        job->ended ? "ended" : "not ended", job->starting, job->pushes);
  }
  if (!server_) return text + "  the box is dead\n";
  for (const JobStatus& job : server_->status().jobs) {
    text += fmt::format("  {}: {}, round {} complete", job.name, job.state, job.completed_round);
    for (uint32_t rank : job.waiting_for) text += fmt::format(", waits for {}", rank);
    for (const RankStatus& rank : job.ranks) {
      text += fmt::format("\n    rank {}.{}: {} from {} {}", rank.rank, rank.incarnation,
                          rank.state, rank.first_round, rank.reason);
    }
    text += "\n";
  }
  for (const Trainer* t : trainers_) text += "  " + t->describe() + "\n";
  return text;
}

void Rack::check_end(RackResult& result) {
  for (auto& job : jobs_) {
    result.observations += job->oracle.observations();
    for (const LogRecord& record : job->log) {
      result.lost += record.kind == LogRecord::Kind::kLost;
      result.admitted += record.kind == LogRecord::Kind::kAdmitted;
      result.failed_jobs += record.kind == LogRecord::Kind::kFailed;
      result.dead_devices += record.reason.find("simulated device") != std::string::npos;
    }
    result.restored += job->restored;
    if (!failure_.empty()) continue;
    if (!job->log_lost) fail(job->oracle.check(job->log));
    if (failure_.empty()) fail(check_outcomes(*job));
  }
  result.box_deaths = life_ - 1;
  if (failure_.empty() && control_.unanswered() != 0) {
    fail(fmt::format("{} control requests were never answered", control_.unanswered()));
  }
}

std::string Rack::check_outcomes(const JobRun& job) const {
  const bool failed = std::ranges::any_of(
      job.log, [](const LogRecord& r) { return r.kind == LogRecord::Kind::kFailed; });
  for (const auto& trainer : job.trainers) {
    if (trainer->error()) {
      if (std::string wrong = check_error(job, *trainer, failed); !wrong.empty()) return wrong;
    } else if (!trainer->left() && !trainer->crashed()) {
      return job.plan.spec.name + ": not done: " + trainer->describe();
    } else if (trainer->left() && !trainer->disturbed() && !trainer->finished_rounds()) {
      return job.plan.spec.name + ": left too early: " + trainer->describe();
    }
  }
  if (plan_.clean && (failed || job.log.size() < 2 * job.plan.spec.world_size)) {
    return job.plan.spec.name + ": nothing was wrong, and yet it did not end well";
  }
  return "";
}

// An error must be of a kind that something which happened explains, and name the rank.
std::string Rack::check_error(const JobRun& job, const Trainer& trainer, bool failed) const {
  const Error& error = *trainer.error();
  const std::string what = error.what();
  const bool control = plan_.control_loss > 0 || plan_.control_duplicate > 0;
  const bool out = trainer.disturbed() || job.taken_over.contains(trainer.rank());
  bool explained = false;
  switch (error.code()) {
    case ErrorCode::kFenced:
      explained = out || control || failed;
      break;
    case ErrorCode::kUnauthorized:  // replaced before it connected, or another job of this name
      explained = out || failed;
      break;
    case ErrorCode::kRankLost:
      explained = failed && (what.find("rank ") != what.npos || life_ > 1);
      break;
    case ErrorCode::kNonFinite:
      explained = std::ranges::any_of(job.plan.bad, [&](const BadGradient& bad) {
        return bad.kind == BadGradient::kOverflow ||
               what.find(fmt::format("rank {} ", bad.rank)) != what.npos;
      });
      break;
    case ErrorCode::kTaken:
    case ErrorCode::kFull:
    case ErrorCode::kNotFound:
      explained = !trainer.joined() || out || control || failed || life_ > 1;
      break;
    case ErrorCode::kInternal:
      if (!trainer.joined() && what.find("Input/output error") != what.npos) {
        return plan_.disk_faults.empty() ? "the disk failed: " + trainer.describe() : "";
      }
      explained = failed && job.device_failed && what.find("simulated device") != what.npos;
      break;
    case ErrorCode::kUnavailable:
      explained = !trainer.joined() && life_ > 1;
      break;
    case ErrorCode::kTimeout:
      explained = !trainer.joined() && control;
      break;
    default:
      break;
  }
  if (explained && !plan_.clean) return "";
  return fmt::format("{}: nothing explains the end of {}", job.plan.spec.name, trainer.describe());
}

RackResult run_rack(const RackPlan& plan, bool verbose) { return Rack(plan, verbose).run(); }

}  // namespace phub::sim

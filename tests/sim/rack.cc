#include "tests/sim/rack.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "numa/topology.h"
#include "tests/sim/virtual_clock.h"

namespace phub::sim {
namespace {

constexpr uint64_t kPassNs = 20'000;  // how long a thread that could run may have to wait at least

numa::Topology topology_of(uint32_t nodes, uint32_t cores) {
  numa::Topology topology;
  topology.source = "simulated";
  for (uint32_t n = 0; n < nodes; ++n) topology.nodes.push_back({n, 1ull << 34});
  for (uint32_t i = 0; i < cores; ++i) topology.cores.push_back({i % nodes, i});
  return topology;
}

std::string text_of(const JobPlan& job, const LogRecord& record, std::string_view whose = "") {
  constexpr const char* kKinds[] = {"admitted", "lost",    "left",   "hyper",     "excluded",
                                    "failed",   "set",     "forked", "scheduled", "discarded",
                                    "killed",   "revived", "late"};
  std::string text = fmt::format("log of {}{}: {} rank {}.{} round {} {}", job.spec.name, whose,
                                 kKinds[static_cast<int>(record.kind)], record.rank,
                                 record.incarnation, record.round, record.reason);
  if (record.branch + record.parent > 0) {
    text += fmt::format(" branch {} of {}", record.branch, record.parent);
  }
  if (record.kind == LogRecord::Kind::kLate) {
    text += fmt::format("until {} of fragment {}", record.last_round, record.fragment);
  }
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
  Windows windows() const override { return transport_.windows(); }
  void handle_events(std::vector<TransportEvent>& out) override { transport_.handle_events(out); }

 private:
  Transport& transport_;
};

}  // namespace

Rack::Rack(const RackPlan& plan, bool verbose)
    : plan_(plan),
      net_(plan.net),
      clock_(net_),
      control_(net_, plan.control_loss, plan.control_duplicate, plan.control_delay_ns,
               plan.control_timeout_ns),
      switch_(plan.through_switch ? std::make_unique<SimSwitch>(net_, *plan.through_switch)
                                  : nullptr),
      losses_(plan.seed) {
  net_.keep_text(verbose);
  const numa::Topology topology = topology_of(plan.nodes, plan.cores);
  start_server();
  start_shards();
  start_below();
  for (const JobPlan& job : plan.jobs) {
    jobs_.push_back(
        std::make_unique<JobRun>(job, make_plan(topology, job.spec.keys,
                                                {.cores = plan.cores,
                                                 .ranks = job.spec.max_ranks,
                                                 .chunk_elements = job.spec.chunk_elements,
                                                 .shared_memory = plan.net.shared_memory,
                                                 .weight_bytes = weight_bytes_of(job.spec),
                                                 .gradient_dtype = job.spec.gradient_dtype})));
    JobRun& run = *jobs_.back();
    run.fault_done.resize(job.faults.size());
    const uint64_t begin = random().below(2 * kMs);
    for (uint32_t r = 0; r < job.spec.world_size; ++r) {
      start(run,
            {.rank = job.fixed_ranks ? static_cast<int32_t>(r) : -1,
             .patient = true,
             .box = job.box_of.empty() ? 0 : job.box_of[r]},
            begin + random().below(kMs));
    }
  }
  schedule_windows();
  set_server_timer();
}

std::unique_ptr<Server> Rack::make_server(uint32_t box, uint32_t nodes, uint32_t cores,
                                          ServerOptions options, const Clock& clock) {
  std::vector<std::unique_ptr<Transport>> nics;
  nics.push_back(nic_of(box));
  options.topology = at_machine(box, topology_of(nodes, cores));
  options.slot_window = plan_.slot_window;
  options.cores = cores;
  options.pin = false;
  return std::make_unique<Server>(std::move(options), std::move(nics), clock);
}

numa::Topology Rack::at_machine(uint32_t box, numa::Topology topology) const {
  for (numa::Node& node : topology.nodes) {
    if (box < plan_.hosts.size()) node.host = plan_.hosts[box];
  }
  return topology;
}

std::unique_ptr<Transport> Rack::nic_of(uint32_t box) {
  auto nic = std::make_unique<BorrowedTransport>(net_.transport(box));
  if (plan_.box_bytes_per_s == 0) return nic;
  return make_paced(std::move(nic), budget_of(plan_.box_bytes_per_s));
}

// As small a burst as may be: a core that waits for tokens sleeps for a millisecond.
NicBudget Rack::budget_of(uint64_t bytes_per_s) {
  return {.bytes_per_s = bytes_per_s, .burst_bytes = 256 + bytes_per_s / 1000, .clock = [this] {
            return net_.now_ns();
          }};
}

uint32_t Rack::near_to(uint32_t box) {
  if (!random().chance(plan_.near_chance)) return SimNet::kNoBox;
  if (box > 0) return below_[box - 1]->box();
  return static_cast<uint32_t>(random().below(1 + plan_.shards.size()));
}

void Rack::add_box(uint32_t cores) {
  BoxState state{.number = static_cast<uint32_t>(boxes_.size())};
  if (!boxes_.empty()) state.first = boxes_.back().first + 1 + boxes_.back().cores.size();
  state.cores.resize(cores);
  boxes_.push_back(std::move(state));
}

void Rack::start_server() {
  ServerOptions options;
  if (plan_.checkpoint_every > 0) {
    options.checkpoints = {
        .folder = "/checkpoints", .every = plan_.checkpoint_every, .keep = 2, .files = &disk_};
  }
  if (switch_) options.through_switch = switch_->of_box();
  server_ = make_server(0, plan_.nodes, plan_.cores, std::move(options), clock_);
  if (boxes_.empty()) add_box(plan_.cores);
  boxes_.front().cores.assign(plan_.cores, {});
  wake_all();
}

void Rack::start_shards() {
  for (uint32_t i = 0; i < plan_.shards.size(); ++i) {
    const uint32_t box = i + 1;
    add_box(plan_.shards[i]);
    const auto make = [this, box, cores = plan_.shards[i]] {
      std::vector<std::unique_ptr<Transport>> nics;
      nics.push_back(nic_of(box));
      ShardServerOptions options;
      options.name = fmt::format("box{}", box);
      options.topology = at_machine(box, topology_of(1, cores));
      options.slot_window = plan_.slot_window;
      options.cores = cores;
      options.pin = false;
      return std::make_unique<ShardServer>(std::move(options), std::move(nics), clock_);
    };
    shards_.push_back(std::make_unique<Shard>(
        net_, control_, clock_, [this]() -> ControlHandler& { return *server_; }, make));
  }
  wake_all();
}

// The server's loop sleeps no longer than it says.
void Rack::set_server_timer() {
  set_timer(server_timer_ns_, net_.now_ns() + server_->poll_interval_ms() * kMs);
}

// Whatever happens in the network wakes everybody, so that an event for each timer of each pass
// would bring forth ever more of them. One that comes sooner will do: whoever it wakes sets the
// next.
void Rack::set_timer(uint64_t& pending_ns, uint64_t at_ns) {
  if (net_.now_ns() < pending_ns && pending_ns <= at_ns) return;
  pending_ns = at_ns;
  net_.after(at_ns - net_.now_ns(), [] {});
}

void Rack::fail(const std::string& what) {
  if (failure_.empty()) failure_ = what;
}

void Rack::start(JobRun& job, Trainer::Start how, uint64_t delay_ns) {
  ++job.starting;
  const bool by_rank = !job.plan.box_of.empty() && how.box == 0;
  if (by_rank) how.box = job.plan.box_of.at(static_cast<uint32_t>(how.rank));
  net_.after(delay_ns, [this, &job, how, restarts = job.restarts] {
    if (job.ended || job.restarts != restarts) return resolved(job);
    job.trainers.push_back(
        std::make_unique<Trainer>(*this, job, static_cast<uint32_t>(trainers_.size()), how));
    trainers_.push_back(job.trainers.back().get());
  });
}

bool Rack::runnable(size_t entity) const {
  const BoxState* const box = box_of(entity);
  if (box == nullptr) return trainer(entity).runnable();
  if (entity == box->first) {
    if (box->number == 0) return server_ != nullptr && net_.now_ns() >= root_hangs_until_ns_;
    const RackBox* const rack = below(*box);
    return rack ? rack->runnable() : shards_[box->number - 1]->runnable();
  }
  const auto index = static_cast<uint32_t>(entity - box->first - 1);
  const Core* const core = core_of(*box, index);
  const CoreState& state = box->cores[index];
  if (core == nullptr || net_.now_ns() < state.paused_until_ns) return false;
  return !state.asleep || net_.now_ns() >= state.wake_ns || core->is_called() ||
         net_.core_awake(index, box->number) || (switch_ && switch_->wakes_box());
}

const Rack::BoxState* Rack::box_of(size_t entity) const {
  if (entity >= first_trainer()) return nullptr;
  return &*std::prev(std::ranges::upper_bound(boxes_, entity, {}, &BoxState::first));
}

RackBox* Rack::below(const BoxState& box) const {
  return box.number > shards_.size() ? below_[box.number - shards_.size() - 1].get() : nullptr;
}

Core* Rack::core_of(const BoxState& box, uint32_t core) const {
  const RackBox* const rack = below(box);
  if (box.number == 0 || rack) {
    Server* const server = rack ? rack->server() : server_.get();
    return server ? &server->machine().core(core) : nullptr;
  }
  ShardServer* const shard = shards_[box.number - 1]->server();
  return shard ? &shard->core(core) : nullptr;
}

bool Rack::step_entity(size_t entity) {
  const BoxState* const box = box_of(entity);
  if (box == nullptr) return trainer(entity).poll();
  if (entity == box->first) return step_control(box->number);
  return step_core(boxes_[box->number], static_cast<uint32_t>(entity - box->first - 1));
}

bool Rack::step_control(uint32_t number) {
  RackBox* const rack = below(boxes_[number]);
  if (rack) {
    rack->poll();
    watch_below(static_cast<uint32_t>(number - shards_.size()));
  } else if (number > 0) {
    shards_[number - 1]->poll();
  } else {
    server_->poll();
    if (disk_.crashed()) {
      watch_jobs();
      kill_server(*dying_);
      return false;
    }
    set_server_timer();
    watch_jobs();
    look_at_learners();
  }
  const BoxState& box = boxes_[number];
  for (size_t core = 0; core < box.cores.size(); ++core) hot_.add(box.first + 1 + core);
  return false;
}

// As Core::run() does, but for the sleep itself.
bool Rack::step_core(BoxState& box, uint32_t index) {
  CoreState& state = box.cores[index];
  Core& core = *core_of(box, index);
  if (std::exchange(state.asleep, false)) core.disarm();
  if (random().chance(plan_.core_pause_chance)) {
    const uint64_t pause = random().below(3 * kMs);
    state.paused_until_ns = net_.now_ns() + pause;
    net_.after(pause, [] {});
    return false;
  }
  if (core.step()) {
    hot_.add(box.first);
    if (RackBox* const rack = below(box)) rack->wake();
    for (uint32_t other = 0; other < box.cores.size(); ++other) {
      if (core_of(box, other)->is_called()) hot_.add(box.first + 1 + other);
    }
    return true;
  }
  int timeout_ms = -1;
  state.asleep = core.arm(timeout_ms);
  if (!state.asleep) core.disarm();
  state.wake_ns = ~0ull;
  if (state.asleep && timeout_ms >= 0) {
    state.wake_ns = net_.now_ns() + static_cast<uint64_t>(timeout_ms) * kMs;
    set_timer(state.timer_ns, state.wake_ns);
  }
  return !state.asleep;
}

// Who cannot run now is asked again when something happened that may have changed it.
std::optional<size_t> Rack::draw_runnable() {
  while (!hot_.empty()) {
    const size_t entity = hot_[random().below(hot_.size())];
    if (runnable(entity)) return entity;
    hot_.remove(entity);
  }
  return std::nullopt;
}

// Either something happens in the network, or some thread of some process makes one pass.
void Rack::step() {
  ++steps_;
  hot_.grow(entities());
  const std::optional<size_t> chosen = draw_runnable();
  // While somebody can run, time does not jump far.
  const bool soon = !net_.idle() && net_.next_ns() < net_.now_ns() + kPassNs;
  if (!chosen || (soon && random().chance(0.2))) {
    net_.run_next();
    return wake_all();
  }
  const bool moved = step_entity(*chosen);
  hot_.grow(entities());
  if (!moved) hot_.remove(*chosen);
  net_.trace("step", *chosen, moved);
  const uint64_t before = net_.idle() ? ~0ull : net_.next_ns();
  const uint64_t cost = random().between(50, 500);
  if (net_.now_ns() + cost >= before) wake_all();
  net_.advance(cost);
}

// It has lost a box, and goes on from its checkpoint without that.
bool Rack::is_rewound(const JobStatus& job) const {
  return plan_.checkpoint_every > 0 && job.error.find("the box 'box") != job.error.npos;
}

// Takes the log of a job when it ends: what comes under its name afterwards is another job.
void Rack::watch_jobs() {
  const ServerStatus status = server_->status();
  for (auto& job : jobs_) {
    const auto at = std::ranges::find(status.jobs, job->plan.spec.name, &JobStatus::name);
    const bool there = at != status.jobs.end();
    const bool failed = there && at->state == "failed";
    if (failed && !job->ended && is_rewound(*at)) {
      if (!std::exchange(job->rewinding, true)) ++job->rewinds;
      job->seen = false;
      continue;
    }
    if (there) job->rewinding = false;
    if (there && !job->ended && std::exchange(job->life, life(*job)) != life(*job)) {
      // What a box reads may hit a fault of the disk: then it takes the one before.
      const bool unreadable = disk_faults_ > 0;
      if (at->durable_round < job->durable && !unreadable) {
        fail(fmt::format("{}: round {} was said to be durable, and the job goes on after {}",
                         job->plan.spec.name, job->durable, at->durable_round));
      }
      job->oracle.undo_from(at->durable_round + 1);
      job->restored += at->durable_round > 0;
      job->restored_round = at->durable_round;
    }
    if (there) job->spread |= std::ranges::any_of(at->cores, &JobCoreStatus::box);
    if (there) job->void_snapshots = std::max(job->void_snapshots, at->void_snapshots);
    if (there) job->switch_chunks = std::max(job->switch_chunks, at->switch_chunks);
    if (there && !at->switch_ended.empty()) job->switch_ended = at->switch_ended;
    const bool not_made = job->life > 0 ? job->life != life(*job) : disk_faults_ > 0;
    if (!there && !job->seen && not_made && job->starting == 0 &&
        std::ranges::all_of(job->trainers, [](const auto& t) { return t->done(); })) {
      job->ended = job->gone = job->log_lost = true;
    }
    if (job->gone || (there && !failed && !job->ended) || (!there && !job->seen)) {
      job->seen = job->seen || there;
      continue;
    }
    job->ended = true;
    // While it is saved at its end, a decision that a rank has asked for may still come into the
    // log.
    job->gone = !failed && !server_->has_job(job->plan.spec.name);
    if (there && !failed) continue;
    job->log = log_of(*job);
  }
}

std::vector<LogRecord> Rack::log_at(Server& server, const JobRun& job) {
  std::vector<LogRecord> log;
  for (bool more = true; more;) {
    more = false;
    server.log(job.plan.spec.name, log.size(), [&](const Result<LogPage>& page) {
      if (!page) return;
      more = page.value->more;
      std::ranges::copy(page.value->records, std::back_inserter(log));
    });
  }
  return log;
}

size_t Rack::sets_in_log(const JobRun& job) {
  const std::vector<LogRecord> log = log_of(job);
  return static_cast<size_t>(std::ranges::count(log, LogRecord::Kind::kSet, &LogRecord::kind));
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
    if (switch_ && job == jobs_.front()) {
      result.text.push_back(fmt::format("{}: {} chunks came through the switch; {}",
                                        job->plan.spec.name, job->switch_chunks,
                                        job->switch_ended));
    }
    for (const BoxLog& log : job->logs_below) {
      const std::string whose = fmt::format(" at level {} in life {}, epoch {}", log.level,
                                            log.life.first, log.life.second);
      for (const LogRecord& record : log.records) {
        result.text.push_back(text_of(job->plan, record, whose));
      }
    }
    for (const LogRecord& record : job->log) result.text.push_back(text_of(job->plan, record));
  }
  trainers_.clear();
  for (auto& job : jobs_) job->trainers.clear();  // their links, before the server's
  below_.clear();
  shards_.clear();
  server_.reset();
  return result;
}

RackResult run_rack(const RackPlan& plan, bool verbose) { return Rack(plan, verbose).run(); }

}  // namespace phub::sim

// Server: construction, threads, and the routing of calls, reports and events to jobs.
#include "phub/server.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

constexpr uint64_t kLeastLateMs = 20;  // a poll may be so late without stopping the jobs' time

const char* how_jobs_go_on(const ServerOptions& options) {
  if (options.parent) return "in the round of the server above";
  if (options.standby) return "at its standby";
  return options.checkpoints.folder.empty() ? "" : "from its checkpoint";
}

}  // namespace

Server::Server(ServerOptions options, std::vector<std::unique_ptr<Transport>> transports,
               const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      started_ms_(clock.now_ms()),
      machine_(options_, std::move(transports), clock),
      jobs_(host_, how_jobs_go_on(options_)),
      uplinks_(options_.parent, options_.standby, host_),
      shards_(host_, jobs_, retry_, options_.parent == nullptr),
      nodes_(machine_, host_),
      maker_({.store = options_.store,
              .kept_checkpoints = options_.checkpoints.keep,
              .has_parent = options_.parent != nullptr,
              .standby_of = options_.standby_of,
              .through_switch = options_.through_switch},
             machine_, host_, trace_),
      folder_(host_),
      host_{.clock = clock,
            .mail = CoreMail(machine_.all_cores()),
            .budget = MemoryBudget(options_.memory_limit_bytes),
            .notes = Notes(options_.note),
            .shards = Shards(options_.shard_lease_ms)} {
  if (!options_.checkpoints.folder.empty()) {
    host_.checkpoints = std::make_unique<SavedJobs>(options_.checkpoints);
  }
  host_.meters.cores.resize(machine_.cores());
  if (options_.trace_events == 0) return;
  trace_ = std::make_unique<ServerTrace>(machine_.cores(), options_.trace_events);
  for (uint32_t i = 0; i < machine_.cores(); ++i) machine_.core(i).trace(trace_->log(i));
}

Server::~Server() {
  stop_threads();
  uplinks_.drop();
  host_.builder.drop();  // its tasks hold parts of ranks, which go before their links
  jobs_.drop();          // links before their transports
}

void Server::start_threads() {
  host_.coder.start();
  host_.builder.start();
  host_.writer.start();
  machine_.start_threads();
}

void Server::stop_threads() {
  host_.coder.stop();
  host_.builder.stop();
  host_.writer.stop();
  machine_.stop_threads();
}

std::vector<int> Server::event_fds() const {
  std::vector<int> fds = machine_.event_fds();
  fds.push_back(host_.coder.event_fd());
  fds.push_back(host_.builder.event_fd());
  fds.push_back(host_.writer.event_fd());
  Parent* const above = options_.parent ? options_.parent : options_.standby;
  if (above && above->event_fd() >= 0) {
    fds.push_back(above->event_fd());
  }
  return fds;
}

void Server::check_ready(Reply<Done> reply) {
  if (draining_) fail(ErrorCode::kUnavailable, "this server is about to end: it saves its jobs");
  if (!host_.checkpoints) return reply(Done{});
  folder_.ask(std::move(reply));
}

void Server::save_all() {
  draining_ = true;
  for (const auto& [name, job] : jobs_.all()) job->saves().save();
}

bool Server::is_saving() const {
  // A job that has ended is to be known as such at the next start.
  if (host_.checkpoints && host_.ending + freeing_ > 0) return true;
  return std::ranges::any_of(jobs_.all(),
                             [](const auto& job) { return job.second->saves().is_saving(); });
}

uint32_t Server::poll_interval_ms() const {
  if (!host_.mail.empty()) return 1;
  const uint64_t now = host_.time.now_ms(), due = jobs_.due_ms();
  return static_cast<uint32_t>(std::min(jobs_.tick_ms(), due > now + 1 ? due - now : 1));
}

void Server::poll() {
  host_.time.begin_round(std::max(2 * jobs_.tick_ms(), kLeastLateMs));
  const uint64_t now = host_.time.now_ms();
  host_.mail.flush();
  nodes_.sample(clock_.now_ms());
  for (const auto& core : machine_.all_cores()) {
    core->clear_report_fd();
    CoreReport report;
    while (core->receive(report)) {
      if (RunningJob* job = jobs_.find(report.job)) job->handle(report);
    }
  }
  do {
    host_.coder.finish();
  } while (host_.builder.finish());  // its ends may give the coder a task
  host_.writer.finish();
  if (options_.parent || options_.standby) uplinks_.poll();
  events_.clear();
  for (const auto& transport : machine_.transports()) transport->handle_events(events_);
  for (const TransportEvent& event : events_) {
    if (event.kind == TransportEvent::kRefused) {
      host_.notes.add(clock_.now_ms(), event.reason);
    } else if (RunningJob* job = jobs_.find(event.link)) {
      job->handle(event);
    }
  }

  if (now >= jobs_.due_ms()) {
    for (const auto& [name, job] : jobs_.all()) job->tick_due(now);
  }
  // Jobs act on events when they happen; ticks are for limits only. So idle jobs cost nothing.
  if (now >= next_tick_ms_) {
    next_tick_ms_ = now + jobs_.tick_ms();
    for (const auto& [name, job] : jobs_.all()) job->tick(now);
    host_.ended.tick(clock_.now_ms());
    folder_.tick();
    shards_.tick(now);
  }
  if (host_.ending == 0) return;
  std::vector<std::string> gone;
  for (const auto& [name, job] : jobs_.all()) {
    if (job->gone()) gone.push_back(name);
  }
  for (const std::string& name : gone) retire(name);
}

// The calls that only find the job's desk and hand on.
#define PHUB_CALL(name, Answer, where, ...)                       \
  void Server::name(const Credential& who, Reply<Answer> reply) { \
    RunningJob& job = jobs_.authenticate(who);                    \
    where;                                                        \
  }
#define PHUB_REQUEST(name, Request, Answer, where, ...)                                   \
  void Server::name(const Credential& who, const Request& request, Reply<Answer> reply) { \
    RunningJob& job = jobs_.authenticate(who);                                            \
    where;                                                                                \
  }
#define PHUB_PIECE(name, where, ...)           \
  void Server::name(__VA_ARGS__) {             \
    RunningJob& job = jobs_.authenticate(who); \
    where;                                     \
  }
#define PHUB_NOTICE(name, where)                   \
  void Server::name(const Credential& who) {       \
    RunningJob* const found = jobs_.find(who.job); \
    if (found == nullptr) return;                  \
    RunningJob& job = *found;                      \
    where;                                         \
  }
#include "transport/control/calls.def"

void Server::losses(const std::string& name, uint64_t from, Reply<LossPage> reply) {
  reply(jobs_.find_running(name).branches().losses(from));
}

const JobOwner* Server::owner(const std::string& name) const {
  const RunningJob* const job = jobs_.find(name);
  return job != nullptr && !job->ending() ? jobs_.owner(name) : nullptr;
}

void Server::expel(const WhyNot& why_not) {
  for (const auto& [name, job] : jobs_.all()) {
    job->members().expel(
        [&why_not, &name = name](const Caller& caller) { return why_not(caller, name); });
  }
}

void Server::log(const std::string& name, uint64_t from, Reply<LogPage> reply) {
  RunningJob* job = jobs_.find(name);
  reply(job ? job->log(from) : host_.ended.log(name, from));
}

void Server::remove(const std::string& name, Reply<Done> reply) {
  if (RunningJob* job = jobs_.find(name)) return job->remove(std::move(reply));
  if (!host_.checkpoints) host_.ended.refuse(name);
  // One that does not run may have checkpoints to go on from.
  const auto ended = std::make_shared<bool>(false);
  host_.builder.run(
      [this, name, ended] { *ended = host_.checkpoints->end(name); },
      [this, name, reply = std::move(reply), ended](const std::optional<Error>& failed) {
        if (failed) return reply({failed->code(), failed->what()});
        if (!*ended) return reply({ErrorCode::kNotFound, host_.ended.not_found(name)});
        reply(Done{});
      });
}

JobStatus Server::job_status(const std::string& name) {
  const RunningJob* job = jobs_.find(name);
  if (!job) host_.ended.refuse(name);
  return job->status();
}

ServerStatus Server::status() {
  ServerStatus status;
  status.topology = options_.topology.source;
  for (const auto& transport : machine_.transports()) {
    status.transports.emplace_back(transport->name());
    status.nics.push_back(transport->describe());
  }
  status.cores = machine_.cores();
  status.memory_bytes = host_.budget.used();
  status.memory_limit_bytes = host_.budget.limit();
  status.uptime_s = static_cast<double>(clock_.now_ms() - started_ms_) / 1000;
  for (const auto& [name, job] : jobs_.all()) {
    if (!job->all_have_left()) status.jobs.push_back(job->status());  // else it is over
  }
  status.nodes = nodes_.status(jobs_.all());
  for (const ShardBox& shard : host_.shards.boxes()) {
    status.shards.push_back({shard.about.name, static_cast<uint32_t>(shard.about.cores.size())});
  }
  if (options_.parent) {
    status.parent = options_.parent->name();
    status.parent_budget_bytes_per_s = options_.parent->nic_bytes_per_s();
  }
  return status;
}

}  // namespace phub

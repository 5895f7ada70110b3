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

}  // namespace

Server::Server(ServerOptions options, std::vector<std::unique_ptr<Transport>> transports,
               const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      started_ms_(clock.now_ms()),
      machine_(options_, std::move(transports), clock),
      maker_({.store = options_.store,
              .kept_checkpoints = options_.checkpoints.keep,
              .has_parent = options_.parent != nullptr,
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
  host_.meters.cores.resize(cores());
  if (options_.trace_events == 0) return;
  trace_ = std::make_unique<ServerTrace>(cores(), options_.trace_events);
  for (uint32_t i = 0; i < cores(); ++i) core(i).trace(trace_->log(i));
}

Server::~Server() {
  stop_threads();
  for (const std::weak_ptr<Uplink>& uplink : uplinks_) {
    if (const std::shared_ptr<Uplink> alive = uplink.lock()) alive->drop();
  }
  host_.builder.drop();  // its tasks hold parts of ranks, which go before their links
  for (auto& [name, job] : jobs_) job->detach_all();
  for (auto& [number, job] : by_number_) job->detach_all();  // also those that are being made
  by_number_.clear();
  jobs_.clear();  // links before their transports
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
  if (options_.parent && options_.parent->event_fd() >= 0) {
    fds.push_back(options_.parent->event_fd());
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
  for (auto& [name, job] : jobs_) job->saves().save();
}

bool Server::is_saving() const {
  // A job that has ended is to be known as such at the next start.
  if (host_.checkpoints && host_.ending + freeing_ > 0) return true;
  return std::any_of(jobs_.begin(), jobs_.end(),
                     [](const auto& job) { return job.second->saves().is_saving(); });
}

void Server::find_tick() {
  tick_ms_ = kIdleMs;
  for (const auto& [name, job] : jobs_) tick_ms_ = std::min(tick_ms_, job->tick_ms());
  next_tick_ms_ = 0;
}

uint32_t Server::poll_interval_ms() const {
  return host_.mail.empty() ? static_cast<uint32_t>(tick_ms_) : 1;
}

void Server::poll() {
  host_.time.begin_round(std::max(2 * tick_ms_, kLeastLateMs));
  const uint64_t now = host_.time.now_ms();
  host_.mail.flush();
  sample_cores(clock_.now_ms());
  for (const auto& core : machine_.all_cores()) {
    core->clear_report_fd();
    CoreReport report;
    while (core->receive(report)) {
      const auto job = by_core_job_.find(report.job);
      if (job != by_core_job_.end()) job->second->handle(report);
    }
  }
  do {
    host_.coder.finish();
  } while (host_.builder.finish());  // its ends may give the coder a task
  host_.writer.finish();
  if (options_.parent) {
    options_.parent->poll();
    std::erase_if(uplinks_, [](const std::weak_ptr<Uplink>& uplink) { return uplink.expired(); });
    for (const std::weak_ptr<Uplink>& uplink : std::vector(uplinks_)) {
      if (const std::shared_ptr<Uplink> alive = uplink.lock()) alive->tick();
    }
  }
  events_.clear();
  for (const auto& transport : machine_.transports()) transport->handle_events(events_);
  for (const TransportEvent& event : events_) handle(event);

  // Jobs act on events when they happen; ticks are for limits only. So idle jobs cost nothing.
  if (now >= next_tick_ms_) {
    next_tick_ms_ = now + tick_ms_;
    for (auto& [name, job] : jobs_) job->tick(now);
    host_.ended.tick(clock_.now_ms());
    folder_.tick();
    for (const ShardBox& lost : host_.shards.tick(now)) {
      lose_shard(lost, fmt::format("no mail came for {} ms", host_.shards.lease_ms()));
    }
    lose_late_shards(now);
    if (!awaited_.empty()) await_no_longer();
  }
  if (host_.ending == 0) return;
  std::vector<std::string> gone;
  for (const auto& [name, job] : jobs_) {
    if (job->gone()) gone.push_back(name);
  }
  for (const std::string& name : gone) retire(name);
}

void Server::handle(const TransportEvent& event) {
  if (event.kind == TransportEvent::kRefused) {
    return host_.notes.add(clock_.now_ms(), event.reason);
  }
  if (RunningJob* job = find(event.link)) job->handle(event);
}

RunningJob* Server::find(const std::string& job) {
  const auto at = jobs_.find(job);
  return at == jobs_.end() ? nullptr : at->second.get();
}

RunningJob* Server::find(const BoxLink* link) {
  for (auto& [name, job] : jobs_) {
    if (&job->job().link() == link) return job.get();
  }
  return nullptr;
}

RunningJob& Server::authenticate(const Credential& who) {
  if (who.is_admin) {
    RunningJob& job = find_running(who.job);
    job.members().check_same_life(who.epoch);
    return job;
  }
  RunningJob* job = find(who.job);
  if (!job) {
    host_.ended.refuse_if_member(who);
    if ((host_.checkpoints || options_.parent) && who.epoch > 0) {
      fail(ErrorCode::kRewound,
           "job '{}' does not run at this server: join again, and it goes on {}", who.job,
           options_.parent ? "in the round of the server above" : "from its checkpoint");
    }
    host_.ended.refuse(who.job);
  }
  if (const auto refused = error_of([&] { job->members().authenticate(who); })) {
    host_.ended.refuse_if_member(who);  // perhaps it was a member of an earlier job of this name
    throw Error(*refused);
  }
  return *job;
}

void Server::heartbeat(const Credential& who, Reply<Pulse> reply) {
  reply(authenticate(who).members().heartbeat(who.rank));
}

void Server::tell(const Credential& who, const RackNews& news, Reply<Done> reply) {
  authenticate(who).members().take_news(who.rank, news);
  reply(Done{});
}

void Server::leave(const Credential& who, Reply<Done> reply) {
  authenticate(who).members().leave(who.rank, std::move(reply));
}

void Server::barrier(const Credential& who, Reply<Done> reply) {
  authenticate(who).members().barrier(who.rank, std::move(reply));
}

void Server::leave_barrier(const Credential& who) {
  if (RunningJob* job = find(who.job)) job->members().leave_barrier(who);
}

void Server::set_hyper(const Credential& who, const HyperRequest& request,
                       Reply<HyperReply> reply) {
  authenticate(who).hyper().set(who.rank, {.round = request.round, .values = request.values},
                                std::move(reply));
}

void Server::change_branches(const Credential& who, const BranchRequest& request,
                             Reply<BranchReply> reply) {
  authenticate(who).branches().change({.action = request.action,
                                       .round = request.round,
                                       .branch = request.branch,
                                       .values = request.values,
                                       .turns = request.turns},
                                      std::move(reply));
}

void Server::report_loss(const Credential& who, const LossRequest& report, Reply<Done> reply) {
  authenticate(who).branches().report_loss(report);
  reply(Done{});
}

void Server::losses(const std::string& name, uint64_t from, Reply<LossPage> reply) {
  reply(find_running(name).branches().losses(from));
}

RunningJob& Server::find_running(const std::string& name) {
  RunningJob* job = find(name);
  if (!job) host_.ended.refuse(name);
  if (job->ending()) fail(ErrorCode::kNotFound, "job '{}' is ending", name);
  return *job;
}

const JobOwner* Server::owner(const std::string& name) const {
  const auto job = jobs_.find(name);
  if (job == jobs_.end() || job->second->ending()) return nullptr;
  const auto at = owners_.find(name);
  return at == owners_.end() ? nullptr : &at->second;
}

void Server::expel(const WhyNot& why_not) {
  for (auto& [name, job] : jobs_) {
    job->members().expel(
        [&why_not, &name = name](const Caller& caller) { return why_not(caller, name); });
  }
}

void Server::reconnect(const Credential& who, Reply<Offer> reply) {
  authenticate(who).reconnections().begin(who, std::move(reply));
}

void Server::check_part(const Credential& who, const PartPiece& place, uint64_t bytes) {
  authenticate(who).parts().check(who, place, bytes);
}

void Server::take_part(const Credential& who, const PartPiece& place, std::string piece,
                       std::shared_ptr<void> charge, Reply<Done> reply) {
  authenticate(who).parts().take(who, place, std::move(piece), std::move(charge), std::move(reply));
}

void Server::restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                           Reply<PartBytes> reply) {
  authenticate(who).parts().read(who.rank, whose, offset, std::move(reply));
}

void Server::begin_state(const Credential& who, const StateRequest& request,
                         Reply<StateReply> reply) {
  authenticate(who).states().begin(request, std::move(reply));
}

void Server::read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) {
  authenticate(who).states().read(who.rank, offset, std::move(reply));
}

void Server::check_state_piece(const Credential& who, uint64_t offset, uint64_t bytes) {
  authenticate(who).states().check_piece(who.rank, offset, bytes);
}

void Server::write_state(const Credential& who, uint64_t offset, std::string piece,
                         std::shared_ptr<void> charge, Reply<Done> reply) {
  authenticate(who).states().write(who.rank, offset, std::move(piece), std::move(charge),
                                   std::move(reply));
}

void Server::apply_state(const Credential& who, Reply<HyperReply> reply) {
  authenticate(who).states().apply(who.rank, std::move(reply));
}

void Server::end_state(const Credential& who, Reply<Done> reply) {
  authenticate(who).states().end(who.rank, std::move(reply));
}

void Server::checkpoint(const Credential& who, const CheckpointRequest& request,
                        Reply<CheckpointReply> reply) {
  authenticate(who).saves().checkpoint(request.round, std::move(reply));
}

void Server::connection_ended(const Credential& who) {
  if (RunningJob* job = find(who.job)) job->members().control_ended(who);
}

void Server::join_unanswered(const Credential& who) {
  if (RunningJob* job = find(who.job)) job->members().join_unanswered(who.rank, who.incarnation);
}

void Server::join_shard(ShardHello hello, Reply<ShardWelcome> reply) {
  if (options_.parent) {
    fail(ErrorCode::kInvalid,
         "this server has a parent, and a rack is one box: start the other one as a rack of its "
         "own, or under the parent");
  }
  const std::string name = hello.name;
  const size_t cores_there = hello.cores.size();
  reply(host_.shards.join(std::move(hello), host_.time.now_ms()));
  host_.notes.add(clock_.now_ms(), fmt::format("the box '{}' serves under this server: {} cores",
                                               name, cores_there));
}

// A report may end a job and destroy it.
void Server::take_mail(uint64_t shard, ShardMail mail, Reply<ShardOrders> reply) {
  const std::vector<ShardReport> reports =
      host_.shards.mail(shard, std::move(mail), std::move(reply), host_.time.now_ms());
  for (const ShardReport& report : reports) {
    if (report.kind == ShardSays::kLeaves) {
      return lose_shard(host_.shards.remove(shard), "it was ended");
    }
    const auto at = by_number_.find(report.job);
    if (at == by_number_.end()) continue;
    const std::shared_ptr<RunningJob> job = at->second;
    const std::optional<Error> nonsense = error_of([&] { job->handle(shard, report); });
    if (!nonsense) continue;
    return lose_shard(host_.shards.remove(shard), nonsense->what());
  }
}

// A job may go by it, so one at a time; the next tick sees the next.
void Server::lose_late_shards(uint64_t now) {
  for (const auto& [number, job] : by_number_) {
    const std::optional<RemoteParts::Late> late = job->late_shard(now);
    if (!late || !host_.shards.has(late->shard)) continue;
    const std::string name = job->job().spec().name;
    return lose_shard(host_.shards.remove(late->shard),
                      fmt::format("{} for job '{}'", late->what, name));
  }
}

// Boxes move one piece at a time, whichever job's it is.
void Server::shard_moved(uint64_t shard, const CopyPlace& place) {
  if (!host_.shards.goes_on(shard, place)) return;
  for (const auto& [number, job] : by_number_) job->shard_moved(shard);
}

RunningJob& Server::find_part(uint64_t number) {
  const auto at = by_number_.find(number);
  if (at == by_number_.end()) {
    fail(ErrorCode::kNotFound, "there is no job of number {} that other boxes have a part of",
         number);
  }
  return *at->second;
}

void Server::read_copy(uint64_t shard, const CopyPlace& place, Reply<PartBytes> reply) {
  RemoteParts& remote = find_part(place.job).remote();
  reply(remote.moves().read(remote.box_of(shard), place));
  shard_moved(shard, place);
}

void Server::check_copy(uint64_t shard, const CopyPlace& place, uint64_t bytes) {
  RemoteParts& remote = find_part(place.job).remote();
  remote.moves().check(remote.box_of(shard), place, bytes);
}

void Server::write_copy(uint64_t shard, const CopyPlace& place, std::string_view piece,
                        Reply<Done> reply) {
  RemoteParts& remote = find_part(place.job).remote();
  remote.moves().write(remote.box_of(shard), place, piece);
  shard_moved(shard, place);
  reply(Done{});
}

void Server::lose_shard(const ShardBox& shard, const std::string& why) {
  host_.notes.add(clock_.now_ms(), fmt::format("the box '{}' is lost: {}", shard.about.name, why));
  const auto jobs = by_number_;
  for (const auto& [number, job] : jobs) {
    const size_t awaited = job->lose_shard(shard.id);
    if (awaited == 0) continue;
    const JobSpec& spec = job->job().spec();
    awaited_[spec.name] = {awaited, clock_.now_ms() + spec.wait_limit_ms};
  }
}

// The boxes are there, or the time is over.
void Server::await_no_longer() {
  const size_t there = host_.shards.boxes().size();
  const size_t gone = std::erase_if(awaited_, [&](const auto& awaited) {
    return there >= awaited.second.shards || clock_.now_ms() > awaited.second.until_ms;
  });
  if (gone == 0) return;
  retry_.happen();
}

void Server::log(const std::string& name, uint64_t from, Reply<LogPage> reply) {
  RunningJob* job = find(name);
  reply(job ? job->log(from) : host_.ended.log(name, from));
}

void Server::remove(const std::string& name, Reply<Done> reply) {
  if (RunningJob* job = find(name)) return job->remove(std::move(reply));
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
  const RunningJob* job = find(name);
  if (!job) host_.ended.refuse(name);
  return job->status();
}

}  // namespace phub

// Server: construction, threads, what happens to cores and transports, actions of the membership.
#include "phub/server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "numa/memory.h"
#include "transport/error.h"
#include "transport/ticket.h"

namespace phub {
namespace {

constexpr size_t kEndedJobs = 64;  // whose logs are kept
constexpr uint32_t kMostProbeMs = 250;
constexpr uint64_t kIdleMs = 500;      // between polls while there are no jobs
constexpr uint64_t kLeastLateMs = 20;  // of a poll, before time stands still for its jobs

constexpr uint64_t kRatesFadeMs = 3000;  // after the last round they are taken until they are 0

// A hundred times as long as a core looks at its chunks.
uint64_t walk_ms(const Job& job) {
  constexpr uint64_t kChunksPerMs = 1600;
  const uint64_t words = job.spec().consistency == "bsp" ? (job.spec().max_ranks + 63) / 64
                                                         : (job.spec().max_ranks + 7) / 8;
  return job.plan().chunks.size() * words / (kChunksPerMs * job.cores());
}

uint64_t probe_interval(const JobSpec& spec) {
  return std::clamp<uint64_t>(std::min(spec.lease_ms, spec.progress_limit_ms) / 8, 10,
                              kMostProbeMs);
}

// What a rank did that no rank does: for the log, and for the rank.
std::string violation_text(const Job& job, const CoreReport& report) {
  const auto sent = [&](std::string_view what) {
    return fmt::format("it sent {} for {}", what, job.where(report.chunk));
  };
  switch (report.violation) {
    case CoreReport::kStream:
      break;
    case CoreReport::kChunk:
      return fmt::format("it sent chunk {} on a queue that has fewer", report.said);
    case CoreReport::kKind:
      return sent(fmt::format("kind {}, which is not expected there,", report.said));
    case CoreReport::kRound:
      return sent(
          fmt::format("round (or part) {} (mod 256) in round {}", report.said, report.round));
    case CoreReport::kBytes:
      return sent(fmt::format("{} bytes, not as many as belong there,", report.said));
    case CoreReport::kPlace:
      return sent(fmt::format("a payload to offset {}, where it does not lie,", report.said));
  }
  return "it sent a batch or a frame that cannot be";
}

// A quarter of the descriptors stays free of ranks, so that others can still be told what is wrong,
// and jobs that run keep their connections. A new descriptor is the lowest free one.
void check_descriptors(int any) {
  rlimit limit{};
  const int lowest = fcntl(any, F_DUPFD_CLOEXEC, 0);
  if (lowest >= 0) close(lowest);
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (lowest >= 0 && static_cast<rlim_t>(lowest) < limit.rlim_cur / 4 * 3) return;
  fail(ErrorCode::kFull,
       "three quarters of the {} file descriptors are in use: end another job, or raise ulimit -n",
       limit.rlim_cur);
}

}  // namespace

Server::Server(ServerOptions options, std::vector<std::unique_ptr<Nic>> nics, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      started_ms_(clock.now_ms()),
      time_(clock),
      nics_(std::move(nics)),
      notes_(options_.note) {
  // Which cores a plan uses depends on topology and options only: any key table shows them. Where
  // there are NICs, cores that are few go to them; a job over one transport may leave some out.
  const std::vector<KeySpec> any_key = {{.name = "key", .elements = 1}};
  numa::Topology topology = options_.topology;
  topology.nics.clear();
  for (const auto& nic : nics_) {
    for (const numa::NicInfo& port : ports_of(*nic)) topology.nics.push_back(port);
  }
  if (options_.cores == 0) topology.nics.clear();
  const Plan plan = make_plan(topology, any_key, {.cores = options_.cores});
  std::vector<numa::Core> used;
  for (const CorePlan& core : plan.cores) {
    cores_.push_back(std::make_unique<Core>(static_cast<uint32_t>(cores_.size())));
    core_cpus_.push_back(core.os_cpu);
    used.push_back({core.node, core.os_cpu});
  }
  topology_ = options_.topology;
  topology_.cores = std::move(used);
  if (options_.trace_events == 0) return;
  trace_ = std::make_unique<ServerTrace>(cores(), options_.trace_events);
  for (uint32_t i = 0; i < cores(); ++i) cores_[i]->trace(trace_->log(i));
}

// The NICs that this transport gives a plan, on their nodes.
std::vector<numa::NicInfo> Server::ports_of(const Nic& nic) const {
  std::vector<numa::NicInfo> ports;
  for (const NicPort& port : nic.ports()) {
    uint32_t node = 0;
    for (uint32_t n = 0; n < options_.topology.nodes.size(); ++n) {
      if (options_.topology.nodes[n].os_node == port.os_node) node = n;
    }
    ports.push_back({node, port.name});
  }
  std::stable_sort(ports.begin(), ports.end(),
                   [](const auto& a, const auto& b) { return a.node < b.node; });
  return ports;
}

Server::~Server() {
  stop_threads();
  builder_.drop();  // what is left of ranks goes before their links
  for (auto& [name, running] : jobs_) {
    // The cores' threads are gone: their part of letting go is done here.
    for (uint32_t i = 0; i < running->job->cores(); ++i) running->job->core_job(i).detach_all();
  }
  jobs_.clear();  // links before their nics
}

void Server::start_threads() {
  background_.start();
  builder_.start();
  const auto cpus = static_cast<uint32_t>(sysconf(_SC_NPROCESSORS_ONLN));
  const int spin_us = options_.spin_us >= 0 ? options_.spin_us : cpus > cores() ? 20 : 0;
  for (uint32_t i = 0; i < cores(); ++i) {
    threads_.emplace_back([this, i, spin_us](const std::stop_token& stop) {
      pthread_setname_np(pthread_self(), fmt::format("phub-core-{}", i % 1000).c_str());
      if (options_.pin) numa::pin_thread(core_cpus_[i]);
      cores_[i]->run(stop, spin_us);
    });
  }
}

void Server::stop_threads() {
  background_.stop();
  builder_.stop();
  for (std::jthread& thread : threads_) thread.request_stop();
  for (auto& core : cores_) core->wake();
  threads_.clear();
}

std::vector<int> Server::event_fds() const {
  std::vector<int> fds;
  for (const auto& core : cores_) fds.push_back(core->report_fd());
  for (const auto& nic : nics_) {
    if (nic->event_fd() >= 0) fds.push_back(nic->event_fd());
  }
  fds.push_back(background_.event_fd());
  fds.push_back(builder_.event_fd());
  return fds;
}

void Server::find_tick() {
  tick_ms_ = kIdleMs;
  for (const auto& [name, running] : jobs_) {
    tick_ms_ = std::min(tick_ms_, probe_interval(running->job->spec()));
  }
  next_tick_ms_ = 0;
}

uint32_t Server::poll_interval_ms() const {
  return mail_.empty() ? static_cast<uint32_t>(tick_ms_) : 1;
}

void Server::poll() {
  time_.begin_round(std::max(2 * tick_ms_, kLeastLateMs));
  const uint64_t now = time_.now_ms();
  flush_mail();
  sample_cores(clock_.now_ms());
  for (auto& core : cores_) {
    core->clear_report_fd();
    CoreReport report;
    while (core->receive(report)) handle(report);
  }
  do {
    background_.finish();
  } while (builder_.finish());  // which may have given the other one something
  events_.clear();
  for (auto& nic : nics_) nic->handle_events(events_);
  for (const NicEvent& event : events_) handle(event);

  // What happens in between is carried out as it happens: many jobs that do nothing cost nothing.
  if (now >= next_tick_ms_) {
    next_tick_ms_ = now + tick_ms_;
    for (auto& [name, running] : jobs_) {
      if (running->ending || now < running->next_tick_ms) continue;
      running->next_tick_ms = now + probe_interval(running->job->spec());
      Membership& membership = running->job->membership();
      for (const auto& [rank, incarnation] : running->answering) {
        if (membership.is_secure(rank, incarnation)) membership.heartbeat(rank, now);
      }
      membership.tick(now);
      probe(*running, now);
      carry_out(*running);
    }
  }
  if (ending_ == 0) return;
  std::vector<Running*> gone;
  for (auto& [name, running] : jobs_) {
    const bool let_go = running->removed == running->job->cores() && running->tasks == 0;
    if (running->ending && let_go) gone.push_back(running.get());
  }
  for (Running* running : gone) finish_end(*running);
}

void Server::handle(const CoreReport& report) {
  Running* running = find(report.job);
  if (!running) return;
  if (report.type == CoreReport::kRemoved) {
    ++running->removed;
    return;
  }
  Job& job = *running->job;
  Membership& membership = job.membership();
  if (report.type == CoreReport::kExcluded) {  // belongs in the log even when the job is ending
    membership.excluded(report.rank, report.incarnation, report.chunk, report.round);
    return count_growth(*running);
  }
  if (running->ending) return;
  const uint64_t now = time_.now_ms();
  switch (report.type) {
    case CoreReport::kAdded:
    case CoreReport::kRemoved:
    case CoreReport::kExcluded:
      break;
    case CoreReport::kHeld:
      membership.held(report, now);
      break;
    case CoreReport::kCommitted:
      membership.committed(report, now);
      break;
    case CoreReport::kProbed:
      if (--running->probes_out == 0) collect_probes(*running);
      break;
    case CoreReport::kDetached:
    case CoreReport::kAttached:
      continue_reconnection(*running, report.rank);
      break;
    case CoreReport::kFailed:
      membership.failed(fmt::format("CPU {} can do no more for it: {}",
                                    core_cpus_[running->cores[report.core]],
                                    report.job->failure()));
      break;
    case CoreReport::kBroken:
      if (!job.link().can_reconnect()) {
        lose(*running, report.rank, report.incarnation, "its queue pair broke");
      }
      break;
    case CoreReport::kViolation:
      lose(*running, report.rank, report.incarnation, violation_text(job, report));
      break;
    case CoreReport::kNonFinite:
      membership.non_finite(report.rank,
                            fmt::format("{}, in round {}", job.where(report.chunk), report.round));
      break;
  }
  carry_out(*running);
}

void Server::handle(const NicEvent& event) {
  if (event.kind == NicEvent::kRefused) return notes_.add(clock_.now_ms(), event.reason);
  Running* running = find(event.link);
  if (!running || running->ending || event.kind == NicEvent::kConnected) return;
  if (event.kind == NicEvent::kFailed) {
    running->job->membership().failed(event.reason);
  } else if (running->job->link().can_reconnect()) {
    Seat& seat = running->seats[event.rank];
    if (seat.incarnation == event.incarnation) seat.data_ended = true;
    check_vanished(*running, event.rank);
  } else {
    lose(*running, event.rank, event.incarnation, "its connection closed: the process ended");
  }
  carry_out(*running);
}

void Server::connection_ended(const Credential& who) {
  Running* running = find(who.job);
  if (!running || running->ending || who.rank >= running->seats.size()) return;
  Seat& seat = running->seats[who.rank];
  if (seat.incarnation != who.incarnation || !same_ticket(seat.offer.ticket, who.ticket)) return;
  seat.control_ended = true;
  check_vanished(*running, who.rank);
  carry_out(*running);
}

// A connection that broke is made again by a process that lives, and its heartbeats go on
// meanwhile. One whose data connection has ended, and that has closed that of its heartbeats as
// well, is gone: waiting for its lease would only hold up the others.
void Server::check_vanished(Running& running, uint32_t rank) {
  const Seat& seat = running.seats[rank];
  if (!seat.data_ended || !seat.control_ended) return;
  lose(running, rank, seat.incarnation, "all its connections closed: the process ended");
}

void Server::lose(Running& running, uint32_t rank, uint32_t incarnation, const std::string& why) {
  Membership& membership = running.job->membership();
  if (!membership.is_secure(rank, incarnation)) return;
  notes_.add(clock_.now_ms(), fmt::format("job '{}': rank {} (incarnation {}) is out: {}",
                                          running.job->spec().name, rank, incarnation, why));
  membership.disconnected(rank, incarnation, why);
}

// What the membership decided, in order. An action may lead to further ones.
void Server::carry_out(Running& running) {
  auto& actions = running.job->membership().actions();
  while (!actions.empty()) {
    MembershipAction action = std::move(actions.front());
    actions.pop_front();
    act(running, action);
  }
  count_growth(running);
}

// What jobs that run grow by counts as what they began with does. Where there is no room, logs lose
// their oldest pages.
void Server::count_growth(Running& running) {
  const auto count = [&] {
    const uint64_t before = std::exchange(running.grown_bytes, running.job->grown_bytes());
    memory_used_ += running.grown_bytes - before;
  };
  count();
  make_room(0);
  if (memory_used_ <= options_.memory_limit_bytes) return;
  MembershipLog& log = running.job->membership().log();
  const uint64_t too_much = memory_used_ - options_.memory_limit_bytes;
  log.limit(log.bytes() - std::min(too_much, log.bytes()));
  count();
}

// Logs of jobs that have ended make room for `bytes` more, the oldest first.
void Server::make_room(uint64_t bytes) {
  uint64_t kept = 0;
  for (const Ended& ended : ended_) kept += ended.log ? ended.log->bytes() : 0;
  const uint64_t limit = options_.memory_limit_bytes;
  const uint64_t wanted = memory_used_ + std::min(bytes, limit);
  for (Ended& ended : ended_) {
    if (wanted + kept <= limit) return;
    if (!ended.log) continue;
    kept -= ended.log->bytes();
    ended.log.reset();
  }
}

void Server::act(Running& running, MembershipAction& action) {
  switch (action.type) {
    case MembershipAction::kHold:
      return broadcast(running, {.type = CoreMessage::kHold});
    case MembershipAction::kAdmit:
      return admit(running, action);
    case MembershipAction::kCommit:
      return commit(running, action);
    case MembershipAction::kRevoke:
      running.admitted.erase(action.rank);
      return give_back(running.job->link().revoke(action.rank));
    case MembershipAction::kFail:
      return end(running, action.code, action.message);
    case MembershipAction::kEnd:
      return end(running, ErrorCode::kInternal, "");
    case MembershipAction::kReply:
      break;
  }
  if (running.joins.contains(action.token)) return answer_join(running, action);
  auto request = running.requests.extract(action.token);
  if (request.empty()) return;
  if (action.ok) {
    request.mapped()(action.first_round);
  } else {
    request.mapped()({action.code, action.message});
  }
}

void Server::admit(Running& running, const MembershipAction& action) {
  ++running.tasks;
  builder_.run(
      [this, &running, rank = action.rank, incarnation = action.incarnation]() -> Background::End {
        const std::optional<Error> refused = error_of([&] {
          check_descriptors(cores_.front()->report_fd());
          running.job->link().prepare(rank);
        });
        return [this, &running, rank, incarnation, refused] {
          --running.tasks;
          if (running.ending) return;
          if (refused) {
            running.job->membership().admitted(rank, false, refused->what());
          } else {
            admitted(running, rank, incarnation);
          }
          carry_out(running);
        };
      });
}

void Server::admitted(Running& running, uint32_t rank, uint32_t incarnation) {
  Membership& membership = running.job->membership();
  const std::optional<Error> refused = error_of([&] {
    running.admitted.insert(rank);
    running.seats[rank] = {.incarnation = incarnation,
                           .offer = running.job->link().admit(rank, incarnation)};
  });
  if (refused) running.admitted.erase(rank);
  membership.admitted(rank, !refused, refused ? refused->what() : "");
}

void Server::commit(Running& running, const MembershipAction& action) {
  Boundary& boundary = running.job->membership().boundary();
  for (Boundary::Admitted& admitted : boundary.admitted) {
    admitted.slots = running.job->link().ingress(admitted.rank);
  }
  if (!action.hyper.empty()) {
    boundary.hyper = running.job->hyper().change(action.hyper, action.lowest_round);
  }
  broadcast(running, {.type = CoreMessage::kCommit, .boundary = &boundary});
}

// The job stops on every core; its memory goes when all of them have let go of it, and with it the
// connections, which is what wakes its workers.
void Server::end(Running& running, ErrorCode code, const std::string& error) {
  if (running.ending) return;
  running.ending = true;
  ++ending_;
  running.error_code = code;
  running.error = error;
  for (auto& [rank, reconnection] : running.reconnections) {
    reconnection.reply({ErrorCode::kFenced, "the job has ended"});
  }
  broadcast(running, {.type = CoreMessage::kRemoveJob});
}

void Server::finish_end(Running& running) {
  Job& job = *running.job;
  for (const uint32_t rank : running.admitted) give_back(job.link().revoke(rank));
  job.link().close();
  const std::string name = job.spec().name;
  ended_.push_back({.name = name,
                    .log = std::move(job.membership().log()),
                    .seats = std::move(running.seats),
                    .error_code = running.error_code,
                    .error = running.error});
  if (ended_.size() > kEndedJobs) ended_.pop_front();
  const ErrorCode code = running.error.empty() ? ErrorCode::kNotFound : running.error_code;
  const std::string message = running.error.empty() ? "the job has ended" : running.error;
  for (auto& [token, join] : running.joins) {
    for (const Reply<JoinReply>& reply : join.replies) reply({code, message});
  }
  for (auto& [token, reply] : running.requests) reply({code, message});
  memory_used_ -= running.grown_bytes;
  make_room(0);
  for (uint32_t i = 0; i < job.cores(); ++i) {
    job.core_job(i).probe(running.probes[i]);  // the cores have let go of it
    by_core_job_.erase(&job.core_job(i));
  }
  count_flow(running);
  give_back(std::move(running.job), std::move(running.removals));
  jobs_.erase(name);
  --ending_;
  find_tick();
}

// Giving back many gigabytes takes a while.
void Server::give_back(std::shared_ptr<Job> job, std::vector<Reply<Done>> removals) {
  ++freeing_;
  builder_.run(
      [this, job = std::move(job), removals = std::move(removals)]() mutable -> Background::End {
        const uint64_t bytes = job->memory().total();
        loads_.erase(job.get());
        job.reset();
        memory_used_ -= bytes;
        return [this, removals = std::move(removals)] {
          --freeing_;
          for (const Reply<Done>& reply : removals) reply(Done{});
          for (const Join& join : std::exchange(waiting_, {})) place(join);
        };
      });
}

// What a rank had. Its successor's memory is prepared after this.
void Server::give_back(BoxLink::Rest rest) {
  if (!rest) return;
  builder_.run([rest = std::move(rest)]() mutable -> Background::End {
    rest.reset();
    return nullptr;
  });
}

void Server::continue_reconnection(Running& running, uint32_t rank) {
  auto at = running.reconnections.find(rank);
  if (at == running.reconnections.end() || ++at->second.answers < running.job->cores()) return;
  Reconnection& reconnection = at->second;
  Job& job = *running.job;
  auto finish = [&](Result<Offer> result) {
    Reply<Offer> reply = std::move(reconnection.reply);
    running.reconnections.erase(at);
    reply(std::move(result));
  };
  if (!job.membership().is_secure(rank, reconnection.incarnation)) {
    return finish(
        {ErrorCode::kFenced, job.membership().why_not_current(rank, reconnection.incarnation)});
  }
  if (reconnection.attaching) return finish(std::move(reconnection.offer));
  // Its ticket is for the new connection; the control port keeps that of the join.
  const std::optional<Error> failed =
      error_of([&] { reconnection.offer = job.link().reconnect(rank); });
  if (failed) return finish({failed->code(), failed->what()});
  reconnection.attaching = true;
  reconnection.answers = 0;
  running.seats[rank].data_ended = false;
  broadcast(running,
            {.type = CoreMessage::kAttach, .rank = rank, .incarnation = reconnection.incarnation});
}

// The cores look at every chunk for it, so they are asked when something has happened, and no more
// often than takes a hundredth of their time.
void Server::probe(Running& running, uint64_t now) {
  if (running.probes_out > 0 || now < running.next_probe_ms) return;
  Job& job = *running.job;
  for (uint32_t i = 0; i < job.cores(); ++i) {
    const uint64_t activity = job.core_job(i).activity();
    if (std::exchange(running.activity[i], activity) != activity) running.active_ms = now;
  }
  if (running.active_ms != now) {  // what they said last still holds
    const bool rates_fade = now - running.active_ms < kRatesFadeMs;
    if (rates_fade || !job.membership().waiting_for().empty()) collect_probes(running);
    return;
  }
  running.next_probe_ms = now + walk_ms(job);
  running.probes_out = running.job->cores();
  for (uint32_t i = 0; i < running.job->cores(); ++i) {
    send(running.cores[i], {.type = CoreMessage::kProbe,
                            .job = &running.job->core_job(i),
                            .probe = &running.probes[i]});
  }
}

void Server::broadcast(Running& running, CoreMessage message) {
  for (uint32_t i = 0; i < running.job->cores(); ++i) {
    message.job = &running.job->core_job(i);
    send(running.cores[i], message);
  }
}

void Server::send(uint32_t core, const CoreMessage& message) {
  if (mail_.empty() && cores_[core]->send(message)) return;
  mail_.emplace_back(core, message);
}

void Server::flush_mail() {
  while (!mail_.empty() && cores_[mail_.front().first]->send(mail_.front().second)) {
    mail_.pop_front();
  }
}

Server::Running* Server::find(const std::string& job) {
  auto at = jobs_.find(job);
  return at == jobs_.end() ? nullptr : at->second.get();
}

Server::Running* Server::find(const CoreJob* core_job) {
  auto at = by_core_job_.find(core_job);
  return at == by_core_job_.end() ? nullptr : at->second;
}

Server::Running* Server::find(const BoxLink* link) {
  for (auto& [name, running] : jobs_) {
    if (&running->job->link() == link) return running.get();
  }
  return nullptr;
}

}  // namespace phub

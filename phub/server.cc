// Server: construction, threads, what happens to cores and transports, actions of the membership.
#include "phub/server.h"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "numa/memory.h"
#include "transport/error.h"

namespace phub {
namespace {

constexpr size_t kEndedJobs = 64;  // whose logs are kept
constexpr uint32_t kMostProbeMs = 250;

uint64_t probe_interval(const JobSpec& spec) {
  return std::clamp<uint64_t>(std::min(spec.lease_ms, spec.progress_limit_ms) / 8, 10,
                              kMostProbeMs);
}

}  // namespace

Server::Server(ServerOptions options, std::vector<std::unique_ptr<Nic>> nics, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      started_ms_(clock.now_ms()),
      nics_(std::move(nics)) {
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
  for (auto& [name, running] : jobs_) {
    // The cores' threads are gone: their part of letting go is done here.
    for (uint32_t i = 0; i < running->job->cores(); ++i) running->job->core_job(i).detach_all();
  }
  jobs_.clear();  // links before their nics
}

void Server::start_threads() {
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
  return fds;
}

uint32_t Server::poll_interval_ms() const {
  uint64_t interval = 500;
  for (const auto& [name, running] : jobs_) {
    interval = std::min(interval, probe_interval(running->job->spec()));
  }
  return mail_.empty() ? static_cast<uint32_t>(interval) : 1;
}

void Server::poll() {
  const uint64_t now = clock_.now_ms();
  flush_mail();
  sample_cores(now);
  for (auto& core : cores_) {
    core->clear_report_fd();
    CoreReport report;
    while (core->receive(report)) handle(report);
  }
  events_.clear();
  for (auto& nic : nics_) nic->handle_events(events_);
  for (const NicEvent& event : events_) handle(event);

  std::vector<Running*> gone;
  for (auto& [name, running] : jobs_) {
    if (!running->ending) {
      running->job->membership().tick(now);
      probe(*running, now);
      carry_out(*running);
    }
    if (running->ending && running->removed == running->job->cores()) gone.push_back(running.get());
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
    return membership.excluded(report.rank, report.incarnation, report.chunk, report.round);
  }
  if (running->ending) return;
  const uint64_t now = clock_.now_ms();
  switch (report.type) {
    case CoreReport::kAdded:
    case CoreReport::kRemoved:
    case CoreReport::kExcluded:
      break;
    case CoreReport::kHeld:
      membership.held(report, now);
      break;
    case CoreReport::kCommitted:
      membership.committed(now);
      break;
    case CoreReport::kProbed:
      if (--running->probes_out == 0) collect_probes(*running, now);
      break;
    case CoreReport::kDetached:
    case CoreReport::kAttached:
      continue_reconnection(*running, report.rank);
      break;
    case CoreReport::kBroken:
      if (!job.link().can_reconnect()) {
        membership.disconnected(report.rank, report.incarnation, "its queue pair broke");
      }
      break;
    case CoreReport::kViolation:
      membership.disconnected(report.rank, report.incarnation,
                              "it sent a chunk or a round that cannot be");
      break;
    case CoreReport::kNonFinite:
      membership.non_finite(report.rank,
                            fmt::format("{}, in round {}", job.where(report.chunk), report.round));
      break;
  }
  carry_out(*running);
}

void Server::handle(const NicEvent& event) {
  Running* running = find(event.link);
  if (!running || running->ending || event.kind != NicEvent::kDisconnected) return;
  if (running->job->link().can_reconnect()) return;  // its lease decides
  running->job->membership().disconnected(event.rank, event.incarnation,
                                          "its connection closed: the process ended");
  carry_out(*running);
}

// What the membership decided, in order. An action may lead to further ones.
void Server::carry_out(Running& running) {
  auto& actions = running.job->membership().actions();
  while (!actions.empty()) {
    MembershipAction action = std::move(actions.front());
    actions.pop_front();
    act(running, action);
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
      return running.job->link().revoke(action.rank);
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
    request.mapped()(Done{});
  } else {
    request.mapped()({action.code, action.message});
  }
}

void Server::admit(Running& running, const MembershipAction& action) {
  Membership& membership = running.job->membership();
  try {
    Offer offer = running.job->link().admit(action.rank, action.incarnation);
    running.seats[action.rank] = {action.incarnation, std::move(offer)};
    membership.admitted(action.rank, true, "");
  } catch (const Error& error) {
    membership.admitted(action.rank, false, error.what());
  }
}

void Server::commit(Running& running, const MembershipAction& action) {
  Boundary& boundary = running.job->membership().boundary();
  for (Boundary::Admitted& admitted : boundary.admitted) {
    admitted.slots = running.job->link().ingress(admitted.rank);
  }
  std::map<std::string, double> values;
  for (const auto& change : action.hyper) {
    for (const auto& [name, value] : change) values[name] = value;
  }
  if (!values.empty()) boundary.hyper = running.job->change_hyper(boundary.round, values);
  broadcast(running, {.type = CoreMessage::kCommit, .boundary = &boundary});
}

// The job stops on every core; its memory goes when all of them have let go of it, and with it the
// connections, which is what wakes its workers.
void Server::end(Running& running, ErrorCode code, const std::string& error) {
  if (running.ending) return;
  running.ending = true;
  running.error_code = code;
  running.error = error;
  for (auto& [rank, reconnection] : running.reconnections) {
    reconnection.reply({ErrorCode::kFenced, "the job has ended"});
  }
  broadcast(running, {.type = CoreMessage::kRemoveJob});
}

void Server::finish_end(Running& running) {
  Job& job = *running.job;
  const std::string name = job.spec().name;
  ended_.push_back({.name = name,
                    .log = job.membership().log(),
                    .seats = std::move(running.seats),
                    .error_code = running.error_code,
                    .error = running.error});
  if (ended_.size() > kEndedJobs) ended_.pop_front();
  const ErrorCode code = running.error.empty() ? ErrorCode::kNotFound : running.error_code;
  const std::string message = running.error.empty() ? "the job has ended" : running.error;
  for (auto& [token, reply] : running.joins) reply({code, message});
  for (auto& [token, reply] : running.requests) reply({code, message});
  std::vector<PendingJoin> waiting = std::move(running.after_end);
  memory_used_ -= job.memory().total();
  for (uint32_t i = 0; i < job.cores(); ++i) {
    job.core_job(i).probe(running.probes[i]);  // the cores have let go of it
    by_core_job_.erase(&job.core_job(i));
  }
  count_flow(running);
  jobs_.erase(name);
  for (PendingJoin& pending : waiting) {
    const Reply<JoinReply> answer = pending.reply;
    try {
      join(std::move(pending.request), std::move(pending.reply));
    } catch (const Error& refused) {
      answer({refused.code(), refused.what()});
    }
  }
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
  try {
    // Its ticket is for the new connection; the control port keeps that of the join.
    reconnection.offer = job.link().reconnect(rank);
  } catch (const Error& error) {
    return finish({error.code(), error.what()});
  }
  reconnection.attaching = true;
  reconnection.answers = 0;
  broadcast(running,
            {.type = CoreMessage::kAttach, .rank = rank, .incarnation = reconnection.incarnation});
}

void Server::probe(Running& running, uint64_t now) {
  if (running.probes_out > 0 || now < running.next_probe_ms) return;
  running.next_probe_ms = now + probe_interval(running.job->spec());
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

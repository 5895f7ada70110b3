// Server: the control port's calls.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/server.h"
#include "transport/error.h"
#include "transport/text.h"
#include "transport/ticket.h"

namespace phub {
Nic& Server::nic(const std::string& name) {
  std::string known;
  for (auto& nic : nics_) {
    if (nic->name() == name) return *nic;
    known += (known.empty() ? "" : ", ") + std::string(nic->name());
  }
  fail(ErrorCode::kInvalid, "transport '{}' is not served here; this server has: {}",
       printable(name), known);
}

Server::Running& Server::create(const JobSpec& spec, const std::string& transport) {
  Nic& link_nic = nic(transport);
  if (jobs_.size() == Core::kMaxJobs) {
    fail(ErrorCode::kFull, "this server has {} jobs, and no more fit: end another one",
         jobs_.size());
  }
  numa::Topology topology = topology_;
  topology.nics = ports_of(link_nic);
  Plan plan = make_plan(topology, spec.keys,
                        {.ranks = spec.max_ranks,
                         .chunk_elements = spec.chunk_elements,
                         .shared_memory = link_nic.shares_memory()});
  const NodeMemory memory = total_memory(plan, spec);
  if (memory.total() >
      options_.memory_limit_bytes - std::min(memory_used_, options_.memory_limit_bytes)) {
    constexpr double kMiB = 1 << 20;
    fail(ErrorCode::kFull,
         "job '{}' needs {:.1f} MiB (gradients of {} ranks {:.1f}, parameters {:.1f}, optimizer "
         "state {:.1f}, bookkeeping {:.1f}); {:.1f} of {:.1f} MiB are in use: end another job, "
         "lower "
         "max_ranks, or raise --memory-limit",
         spec.name, static_cast<double>(memory.total()) / kMiB, spec.max_ranks,
         static_cast<double>(memory.slots) / kMiB,
         static_cast<double>(memory.parameters + memory.master) / kMiB,
         static_cast<double>(memory.state) / kMiB, static_cast<double>(memory.bookkeeping) / kMiB,
         static_cast<double>(memory_used_) / kMiB,
         static_cast<double>(options_.memory_limit_bytes) / kMiB);
  }
  const uint64_t now = clock_.now_ms();
  auto running = std::make_unique<Running>();
  running->job = std::make_unique<Job>(spec, std::move(plan), link_nic, options_.store, now);
  running->seats.resize(spec.max_ranks);
  for (const CorePlan& core : running->job->plan().cores) {
    const auto at = std::find(core_cpus_.begin(), core_cpus_.end(), core.os_cpu);
    running->cores.push_back(static_cast<uint32_t>(at - core_cpus_.begin()));
  }
  if (trace_) {
    const uint32_t number = trace_->add_job(*running->job);
    for (uint32_t i = 0; i < running->cores.size(); ++i) {
      const uint32_t core = running->cores[i];
      running->job->core_job(i).trace(trace_->log(core), core, number);
    }
  }
  running->probes.resize(running->cores.size());
  for (size_t i = 0; i < running->probes.size(); ++i) {
    Probe& probe = running->probes[i];
    probe.arrivals.resize(spec.max_ranks);
    probe.waited_for.resize((spec.max_ranks + 63) / 64);
    probe.lacks.resize(spec.max_ranks);
    probe.queues.resize(running->job->plan().cores[i].queues.size());
  }
  running->core_counters.resize(running->cores.size());
  running->queues.resize(running->job->plan().queues.size());
  running->rate_ms = now;
  running->transport = transport;
  memory_used_ += memory.total();
  for (uint32_t i = 0; i < running->job->cores(); ++i) {
    by_core_job_[&running->job->core_job(i)] = running.get();
  }
  Running& created = *(jobs_[spec.name] = std::move(running));
  broadcast(created, {.type = CoreMessage::kAddJob});
  return created;
}

void Server::join(JoinRequest request, Reply<JoinReply> reply) {
  if (request.version != kProtocolVersion) {
    fail(ErrorCode::kInvalid, "this server speaks protocol version {}, the worker version {}",
         kProtocolVersion, request.version);
  }
  complete_spec(request.spec);
  Running* running = find(request.spec.name);
  if (running && running->ending) {
    running->after_end.push_back({std::move(request), std::move(reply)});
    return;
  }
  if (running) {
    const std::string different = difference(request.spec, running->job->spec());
    if (!different.empty()) {
      fail(ErrorCode::kMismatch, "job '{}' is there already and differs: {}", request.spec.name,
           different);
    }
    if (running->transport != request.transport) {
      fail(ErrorCode::kMismatch,
           "job '{}' runs over {}, this worker asks for {}: where some workers are on the server's "
           "host and some are not, set PHUB_TRANSPORT to the same (tcp or verbs) for all",
           request.spec.name, running->transport, printable(request.transport));
    }
  } else {
    try {
      running = &create(request.spec, request.transport);
    } catch (const Error& error) {
      // The memory of a job that is just ending is nearly there.
      const auto ending = std::find_if(jobs_.begin(), jobs_.end(),
                                       [](const auto& job) { return job.second->ending; });
      if (error.code() != ErrorCode::kFull || ending == jobs_.end()) throw;
      ending->second->after_end.push_back({std::move(request), std::move(reply)});
      return;
    }
  }
  const uint64_t token = next_token_++;
  running->joins[token] = std::move(reply);
  running->job->membership().join(token, request.rank, request.replace, clock_.now_ms());
  carry_out(*running);
}

void Server::answer_join(Running& running, const MembershipAction& action) {
  Reply<JoinReply> reply = std::move(running.joins[action.token]);
  running.joins.erase(action.token);
  if (!action.ok) return reply({action.code, action.message});
  reply(JoinReply{.rank = action.rank,
                  .incarnation = action.incarnation,
                  .first_round = action.first_round,
                  .send_initial = action.send_initial,
                  .offer = running.seats[action.rank].offer,
                  .layout = layout_of(running.job->plan()),
                  .spec = running.job->spec()});
}

// The job if the credential is that of a live incarnation; otherwise the answer is given.
template <typename T>
Server::Running* Server::authenticate(const Credential& who, const Reply<T>& reply) {
  Running* running = find(who.job);
  if (!running) {
    answer_ended(who, reply);
    return nullptr;
  }
  Membership& membership = running->job->membership();
  if (who.rank >= running->seats.size()) {
    reply({ErrorCode::kNotFound, fmt::format("job '{}' has no rank {}", who.job, who.rank)});
  } else if (running->seats[who.rank].incarnation == who.incarnation &&
             !same_ticket(running->seats[who.rank].offer.ticket, who.ticket)) {
    reply({ErrorCode::kUnauthorized,
           fmt::format("this is not the ticket of rank {} of job '{}'", who.rank, who.job)});
  } else if (running->ending && !running->error.empty()) {
    reply({running->error_code, running->error});
  } else if (running->ending || !membership.is_current(who.rank, who.incarnation)) {
    reply({ErrorCode::kFenced, membership.why_not_current(who.rank, who.incarnation)});
  } else {
    return running;
  }
  return nullptr;
}

template <typename T>
void Server::answer_ended(const Credential& who, const Reply<T>& reply) {
  for (auto ended = ended_.rbegin(); ended != ended_.rend(); ++ended) {
    if (ended->name != who.job || who.rank >= ended->seats.size() || ended->error.empty()) continue;
    const Seat& seat = ended->seats[who.rank];
    if (seat.incarnation == who.incarnation && same_ticket(seat.offer.ticket, who.ticket)) {
      return reply({ended->error_code, ended->error});
    }
  }
  reply({ErrorCode::kNotFound, fmt::format("there is no job '{}'", who.job)});
}

void Server::heartbeat(const Credential& who, Reply<Pulse> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  Membership& membership = running->job->membership();
  membership.heartbeat(who.rank, clock_.now_ms());
  reply(Pulse{.completed_round = membership.completed_round(), .missing = membership.missing()});
}

void Server::leave(const Credential& who, Reply<Done> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  const uint64_t token = next_token_++;
  running->requests[token] = std::move(reply);
  running->job->membership().leave(token, who.rank);
  carry_out(*running);
}

void Server::barrier(const Credential& who, Reply<Done> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  const uint64_t token = next_token_++;
  running->requests[token] = std::move(reply);
  running->job->membership().barrier(token, who.rank);
  carry_out(*running);
}

void Server::set_hyper(const Credential& who, const std::map<std::string, double>& values,
                       Reply<Done> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  if (who.rank != 0) {
    return reply({ErrorCode::kUnauthorized,
                  fmt::format("hyperparameters are set by rank 0, not by rank {}", who.rank)});
  }
  check_hyper(values);
  if (values.contains("rmsprop_momentum")) {
    fail(ErrorCode::kInvalid, "rmsprop_momentum cannot change: it decides how much state there is");
  }
  if (values.empty()) return reply(Done{});
  const uint64_t token = next_token_++;
  running->requests[token] = std::move(reply);
  running->job->membership().set_hyper(token, values);
  carry_out(*running);
}

void Server::reconnect(const Credential& who, Reply<Offer> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  Job& job = *running->job;
  if (!job.link().can_reconnect()) {
    return reply(
        {ErrorCode::kFenced, "this job's transport cannot make a broken connection again"});
  }
  if (!job.membership().is_secure(who.rank, who.incarnation) ||
      running->reconnections.contains(who.rank)) {
    return reply({ErrorCode::kTaken,
                  fmt::format("rank {} is being reconnected or fenced: try again", who.rank)});
  }
  running->reconnections[who.rank] = {.incarnation = who.incarnation, .reply = std::move(reply)};
  broadcast(*running, {.type = CoreMessage::kDetach, .rank = who.rank});
}

void Server::log(const std::string& job, Reply<std::vector<LogRecord>> reply) {
  if (Running* running = find(job)) return reply(running->job->membership().log());
  for (auto ended = ended_.rbegin(); ended != ended_.rend(); ++ended) {
    if (ended->name == job) return reply(ended->log);
  }
  reply({ErrorCode::kNotFound, fmt::format("there is no job '{}'", job)});
}

void Server::remove(const std::string& job, Reply<Done> reply) {
  Running* running = find(job);
  if (!running) return reply({ErrorCode::kNotFound, fmt::format("there is no job '{}'", job)});
  running->job->membership().remove();
  carry_out(*running);
  reply(Done{});
}

std::string Server::describe() const {
  std::string text = fmt::format("{} cores", cores());
  for (const auto& nic : nics_) text.append("\n").append(nic->describe());
  return text;
}

}  // namespace phub

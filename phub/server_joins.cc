// Server: from a join to its answer. The job is found, or made in the background; the membership
// decides; the answer is put together in the background.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/server.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

std::vector<PlanLoad> load_of(const Plan& plan, const JobSpec& spec) {
  std::vector<PlanLoad> load;
  const uint64_t bytes = element_bytes(spec).gradient * spec.max_ranks;
  for (size_t q = 0; q < plan.queues.size(); ++q) {
    const QueuePlan& queue = plan.queues[q];
    load.push_back({plan.cores[queue.core].os_cpu, plan.nics[queue.nic].name, 0});
    for (const uint32_t chunk : plan.queue_chunks[q]) {
      load.back().bytes += plan.chunks[chunk].elements * bytes;
    }
  }
  return load;
}

}  // namespace

Nic& Server::nic(const std::string& name) {
  std::string known;
  for (auto& nic : nics_) {
    if (nic->name() == name) return *nic;
    known += (known.empty() ? "" : ", ") + std::string(nic->name());
  }
  fail(ErrorCode::kInvalid, "transport '{}' is not served here; this server has: {}",
       printable(name), known);
}

void Server::join(JoinRequest request, Reply<JoinReply> reply) {
  if (request.version != kProtocolVersion) {
    fail(ErrorCode::kInvalid, "this server speaks protocol version {}, the worker version {}",
         kProtocolVersion, request.version);
  }
  nic(request.transport);
  place(std::make_shared<PendingJoin>(PendingJoin{std::move(request), std::move(reply)}));
}

void Server::place(const Join& join) {
  const std::string& name = join->request.spec.name;
  if (const auto at = creating_.find(name); at != creating_.end()) {
    at->second.push_back(join);
    return;
  }
  Running* running = find(name);
  if (!running) return create(join);
  if (running->ending) {
    waiting_.push_back(join);
  } else {
    compare(*running, join);
  }
}

void Server::create(const Join& join) {
  if (jobs_.size() + creating_.size() >= Core::kMaxJobs) {
    return join->reply(
        {ErrorCode::kFull,
         fmt::format("this server has {} jobs, and no more fit: end another one", Core::kMaxJobs)});
  }
  creating_[join->request.spec.name];
  numa::Topology topology = topology_;
  topology.nics = ports_of(nic(join->request.transport));
  builder_.run([this, join, topology = std::move(topology)]() -> Background::End {
    std::shared_ptr<Running> running;
    const std::optional<Error> refused = error_of([&] {
      complete_spec(join->request.spec);
      running = make(join->request.spec, join->request.transport, topology);
    });
    return [this, join, running = std::move(running), refused] {
      const std::vector<Join> others =
          std::move(creating_.extract(join->request.spec.name).mapped());
      if (!refused) {
        created(join, running);
      } else if (refused->code() == ErrorCode::kFull && someone_ends()) {
        waiting_.push_back(join);  // for the memory, which is nearly there
      } else {
        join->reply({refused->code(), refused->what()});
      }
      for (const Join& other : others) place(other);
    };
  });
}

bool Server::someone_ends() const {
  return freeing_ > 0 || std::any_of(jobs_.begin(), jobs_.end(),
                                     [](const auto& job) { return job.second->ending; });
}

void Server::created(const Join& join, const std::shared_ptr<Running>& running) {
  jobs_[running->job->spec().name] = running;
  find_tick();
  make_room(0);
  for (uint32_t i = 0; i < running->job->cores(); ++i) {
    by_core_job_[&running->job->core_job(i)] = running.get();
  }
  broadcast(*running, {.type = CoreMessage::kAddJob});
  enter(*running, join);
}

std::shared_ptr<Server::Running> Server::make(const JobSpec& spec, const std::string& transport,
                                              const numa::Topology& topology) {
  Nic& link_nic = nic(transport);
  std::vector<PlanLoad> load;
  for (const auto& [job, of_job] : loads_) load.insert(load.end(), of_job.begin(), of_job.end());
  Plan plan = make_plan(topology, spec.keys,
                        {.ranks = spec.max_ranks,
                         .chunk_elements = spec.chunk_elements,
                         .shared_memory = link_nic.shares_memory(),
                         .gradient_bytes = element_bytes(spec).gradient,
                         .load = std::move(load)});
  const NodeMemory memory = total_memory(plan, spec);
  reserve_memory(spec, memory);
  auto running = std::make_shared<Running>();
  try {
    running->job = std::make_shared<Job>(spec, std::move(plan), link_nic, options_.store);
  } catch (...) {
    memory_used_ -= memory.total();
    throw;
  }
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
  running->activity.resize(running->cores.size());
  running->queues.resize(running->job->plan().queues.size());
  running->rate_ms = clock_.now_ms();
  running->transport = transport;
  loads_[running->job.get()] = load_of(running->job->plan(), spec);
  return running;
}

// Jobs are made and freed by the builder only: nobody else reserves at the same time.
void Server::reserve_memory(const JobSpec& spec, const NodeMemory& memory) {
  const uint64_t limit = options_.memory_limit_bytes;
  if (memory.total() > limit - std::min<uint64_t>(memory_used_, limit)) {
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
         static_cast<double>(memory_used_) / kMiB, static_cast<double>(limit) / kMiB);
  }
  memory_used_ += memory.total();
}

// A job is there: does the worker mean the same one?
void Server::compare(Running& running, const Join& join) {
  ++running.tasks;
  background_.run([this, &running, join]() -> Background::End {
    const std::optional<Error> refused = error_of([&] {
      JoinRequest& request = join->request;
      complete_spec(request.spec);
      const std::string different = difference(request.spec, running.job->spec());
      if (!different.empty()) {
        fail(ErrorCode::kMismatch, "job '{}' is there already and differs: {}", request.spec.name,
             different);
      }
      if (running.transport != request.transport) {
        fail(ErrorCode::kMismatch,
             "job '{}' runs over {}, this worker asks for {}: where some workers are on the "
             "server's host and some are not, set PHUB_TRANSPORT to the same (tcp or verbs) for "
             "all",
             request.spec.name, running.transport, printable(request.transport));
      }
    });
    return [this, &running, join, refused] {
      --running.tasks;
      if (running.ending) {
        waiting_.push_back(join);
      } else if (refused) {
        join->reply({refused->code(), refused->what()});
      } else {
        enter(running, join);
      }
    };
  });
}

// A join that came before, and whose answer was lost, gets the same answer.
void Server::enter(Running& running, const Join& join) {
  Membership& membership = running.job->membership();
  const std::string& id = join->request.id;
  for (auto& [token, waiting] : running.joins) {
    if (id.empty() || waiting.id != id) continue;
    waiting.replies.push_back(join->reply);
    return;
  }
  for (uint32_t rank = 0; rank < running.seats.size(); ++rank) {
    const Seat& seat = running.seats[rank];
    if (id.empty() || seat.id != id || !membership.is_secure(rank, seat.incarnation)) continue;
    return answer_join(running, rank, {join->reply});
  }
  const uint64_t token = next_token_++;
  running.joins[token] = {id, {join->reply}};
  membership.join(token, join->request.rank, join->request.replace, time_.now_ms());
  carry_out(running);
}

void Server::answer_join(Running& running, const MembershipAction& action) {
  WaitingJoin waiting = std::move(running.joins.extract(action.token).mapped());
  if (!action.ok) {
    for (const Reply<JoinReply>& reply : waiting.replies) reply({action.code, action.message});
    return;
  }
  Seat& seat = running.seats[action.rank];
  seat.id = std::move(waiting.id);
  seat.first_round = action.first_round;
  seat.send_initial = action.send_initial;
  answer_join(running, action.rank, std::move(waiting.replies));
}

void Server::answer_join(Running& running, uint32_t rank, std::vector<Reply<JoinReply>> replies) {
  ++running.tasks;
  const Seat& seat = running.seats[rank];
  const auto whose = running.answering.emplace(rank, seat.incarnation);
  const auto answer = std::make_shared<JoinReply>(JoinReply{.rank = rank,
                                                            .incarnation = seat.incarnation,
                                                            .first_round = seat.first_round,
                                                            .send_initial = seat.send_initial,
                                                            .offer = seat.offer});
  background_.run(
      [this, &running, answer, whose, replies = std::move(replies)]() -> Background::End {
        const std::optional<Error> failed = error_of([&] {
          answer->layout = routes_of(running.job->plan());
          answer->spec = running.job->spec();
        });
        return [this, &running, answer, whose, replies, failed] {
          for (const Reply<JoinReply>& reply : replies) {
            if (failed) {
              reply({failed->code(), failed->what()});
            } else if (running.ending && !running.error.empty()) {
              reply({running.error_code, running.error});
            } else {
              reply(JoinReply(*answer));
            }
          }
          // Behind the encoding of the replies: from now on it has a lease to keep.
          background_.run([this, &running, whose]() -> Background::End {
            return [this, &running, whose] {
              --running.tasks;
              const auto [rank, incarnation] = *whose;
              running.answering.erase(whose);
              Membership& membership = running.job->membership();
              if (membership.is_secure(rank, incarnation))
                membership.heartbeat(rank, time_.now_ms());
            };
          });
        };
      });
}

}  // namespace phub

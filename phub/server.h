// The server: jobs, cores and transports behind the control port's calls.
//
// One control thread calls everything here; the cores' threads run beside it and are reached
// through their mailboxes only. What takes long goes to two more threads (background.h): one
// decodes and encodes, the other plans and makes jobs, and frees them. poll() never blocks:
// production calls it from the event loop (server_loop.h), the simulator from its scheduler, which
// also steps the cores itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "numa/topology.h"
#include "phub/background.h"
#include "phub/clock.h"
#include "phub/control_handler.h"
#include "phub/core.h"
#include "phub/job.h"
#include "phub/notes.h"
#include "phub/server_trace.h"
#include "transport/nic.h"

namespace phub {

struct ServerOptions {
  numa::Topology topology;
  uint32_t cores = 0;  // 0: all of the topology
  bool pin = true;
  int32_t spin_us = -1;  // of a core with nothing to do; -1: 20 if CPUs are left over
  uint64_t memory_limit_bytes = ~0ull;
  kernels::Store store = kernels::kDefaultStore;
  size_t trace_events = 0;  // the last ones of each core are kept, for write_trace(); 0: no trace
  Notes::Print note;        // who was closed out, and why; null: nobody is told
};

class Server final : public ControlHandler {
 public:
  Server(ServerOptions options, std::vector<std::unique_ptr<Nic>> nics, const Clock& clock);
  ~Server() override;

  // The cores' threads, pinned, and those beside. Without them somebody has to step the cores,
  // and poll() does what takes long.
  void start_threads();
  void stop_threads();
  // What the cores did lately. REQUIRES: their threads have ended; trace_events was not 0.
  void write_trace(TraceWriter& writer) const { trace_->write(writer); }

  void join(JoinRequest request, Reply<JoinReply> reply) override;
  void heartbeat(const Credential& who, Reply<Pulse> reply) override;
  void leave(const Credential& who, Reply<Done> reply) override;
  void barrier(const Credential& who, Reply<Done> reply) override;
  void leave_barrier(const Credential& who) override;
  void set_hyper(const Credential& who, const HyperChange& change,
                 Reply<HyperReply> reply) override;
  void reconnect(const Credential& who, Reply<Offer> reply) override;
  void log(const std::string& job, uint64_t from, Reply<LogPage> reply) override;
  void remove(const std::string& job, Reply<Done> reply) override;
  ServerStatus status() override;
  JobStatus job_status(const std::string& job) override;
  void connection_ended(const Credential& who) override;

  // Everything that is due: reports of the cores, events of the transports, timers.
  void poll();
  uint32_t poll_interval_ms() const;   // how long poll() may wait when no descriptor fires
  std::vector<int> event_fds() const;  // of cores and transports; edge-triggered or eventfds

  Background& background() { return background_; }  // for what is decoded and encoded
  uint32_t cores() const { return static_cast<uint32_t>(cores_.size()); }
  Core& core(uint32_t i) { return *cores_[i]; }
  std::string describe() const;

 private:
  struct Seat {  // what a rank's present incarnation was given
    uint32_t incarnation = 0;
    Offer offer;
    // What its process has closed, and not opened again. With both, it has ended.
    bool data_ended = false;
    bool control_ended = false;
    std::string id;  // of its join
    uint64_t first_round = 0;
    bool send_initial = false;
  };
  struct WaitingJoin {
    std::string id;
    std::vector<Reply<JoinReply>> replies;  // more than one: it was sent again
  };
  struct Reconnection {
    uint32_t incarnation = 0;
    uint32_t answers = 0;
    bool attaching = false;
    Offer offer;
    Reply<Offer> reply;
  };
  struct PendingJoin {
    JoinRequest request;
    Reply<JoinReply> reply;
  };
  using Join = std::shared_ptr<PendingJoin>;
  // What went through a queue of a job, as last seen and when its rate was taken last.
  struct QueueMeter {
    QueueCounters seen, before;
    Flow flow;
  };
  using NicName = std::pair<std::string, std::string>;  // transport, name
  struct NicMeter {
    uint32_t os_node = 0;
    Flow flow;  // of all jobs so far; no rates
  };
  struct CoreMeter {
    Flow flow;  // of all jobs so far; no rates
    uint64_t asleep_ns = 0;
    double awake = 0;
  };
  struct Running {
    std::shared_ptr<Job> job;
    std::string transport;
    std::vector<uint32_t> cores;  // of the server, by core of the job
    std::vector<Seat> seats;
    std::map<uint64_t, WaitingJoin> joins;
    std::map<uint64_t, Reply<uint64_t>> requests;  // of a change: the round that it holds from
    uint64_t grown_bytes = 0;                      // as counted in memory_used_
    std::map<uint32_t, Reconnection> reconnections;
    std::set<uint32_t> admitted;  // ranks that the link has memory and connections of
    // Ranks and incarnations whose join is being answered: they cannot send heartbeats yet.
    std::multiset<std::pair<uint32_t, uint32_t>> answering;
    uint32_t tasks = 0;  // in the background, that use this
    std::vector<Probe> probes;
    uint32_t probes_out = 0;
    uint64_t next_tick_ms = 0;
    uint64_t next_probe_ms = 0;
    std::vector<uint64_t> activity;  // of the cores' parts, when they were probed last
    uint64_t active_ms = 0;          // when that was seen to change last
    uint64_t chunks_completed = 0;   // when the rate was taken last
    uint64_t chunks_so_far = 0;
    EndpointCounters counters;
    std::vector<EndpointCounters> core_counters;
    std::vector<QueueMeter> queues;  // of the plan
    std::vector<Lack> lacks;         // per rank
    double rounds_per_s = 0;
    uint64_t rate_ms = 0;
    uint32_t removed = 0;
    bool ending = false;
    ErrorCode error_code = ErrorCode::kInternal;
    std::string error;
    std::vector<Reply<Done>> removals;  // answered when it is gone
  };
  struct Ended {  // what is still asked about a job that is gone
    std::string name;
    std::optional<MembershipLog> log;  // nothing: it made room for others
    std::vector<Seat> seats;
    ErrorCode error_code = ErrorCode::kInternal;
    std::string error;  // empty: it ended well
  };

  // server_joins.cc
  void place(const Join& join);
  void create(const Join& join);
  void created(const Join& join, const std::shared_ptr<Running>& running);
  void compare(Running& running, const Join& join);
  void enter(Running& running, const Join& join);
  void answer_join(Running& running, const MembershipAction& action);
  void answer_join(Running& running, uint32_t rank, std::vector<Reply<JoinReply>> replies);
  bool someone_ends() const;
  // The builder's.
  std::shared_ptr<Running> make(const JobSpec& spec, const std::string& transport,
                                const numa::Topology& topology);
  void reserve_memory(const JobSpec& spec, const NodeMemory& memory);

  Nic& nic(const std::string& name);
  std::vector<numa::NicInfo> ports_of(const Nic& nic) const;
  template <typename T>
  Running* authenticate(const Credential& who, const Reply<T>& reply);
  template <typename T>
  void answer_ended(const Credential& who, const Reply<T>& reply);
  Running* find(const std::string& job);
  Running* find(const CoreJob* core_job);
  Running* find(const BoxLink* link);

  void carry_out(Running& running);
  void count_growth(Running& running);
  void make_room(uint64_t bytes);
  void act(Running& running, MembershipAction& action);
  void admit(Running& running, const MembershipAction& action);
  void admitted(Running& running, uint32_t rank, uint32_t incarnation);
  void commit(Running& running, const MembershipAction& action);
  void end(Running& running, ErrorCode code, const std::string& error);
  void finish_end(Running& running);
  void give_back(std::shared_ptr<Job> job, std::vector<Reply<Done>> removals);
  void give_back(BoxLink::Rest rest);

  void handle(const CoreReport& report);
  void continue_reconnection(Running& running, uint32_t rank);
  void handle(const NicEvent& event);
  void check_vanished(Running& running, uint32_t rank);
  void lose(Running& running, uint32_t rank, uint32_t incarnation, const std::string& why);
  void find_tick();
  void probe(Running& running, uint64_t now);
  void collect_probes(Running& running);
  void broadcast(Running& running, CoreMessage message);
  void send(uint32_t core, const CoreMessage& message);
  void flush_mail();

  // server_status.cc
  void count_flow(Running& running);
  void take_rates(Running& running, double seconds);
  void sample_cores(uint64_t now);
  JobStatus status_of(const Running& running) const;
  std::vector<NodeStatus> status_of_nodes() const;

  const ServerOptions options_;
  const Clock& clock_;
  const uint64_t started_ms_;
  ServedTime time_;
  std::vector<std::unique_ptr<Nic>> nics_;
  std::vector<std::unique_ptr<Core>> cores_;
  std::vector<uint32_t> core_cpus_;
  numa::Topology topology_;             // with the cores that are used
  std::unique_ptr<ServerTrace> trace_;  // outlives threads and jobs; null: nobody asked
  std::vector<std::jthread> threads_;
  std::map<std::string, std::shared_ptr<Running>> jobs_;
  std::map<std::string, std::vector<Join>> creating_;  // who else wants the job that is being made
  std::vector<Join> waiting_;  // for a job that ends: they need its name, or its memory
  uint32_t freeing_ = 0;       // jobs that have ended and have their memory still
  uint32_t ending_ = 0;        // jobs that the cores have not let go of yet
  uint64_t tick_ms_ = 500;     // the shortest of the jobs' intervals
  uint64_t next_tick_ms_ = 0;
  std::unordered_map<const CoreJob*, Running*> by_core_job_;
  std::deque<Ended> ended_;
  std::deque<std::pair<uint32_t, CoreMessage>> mail_;  // what found a full mailbox
  std::vector<NicEvent> events_;
  std::vector<CoreMeter> core_meters_;
  std::map<NicName, NicMeter> nic_meters_;
  uint64_t sampled_ms_ = 0;
  std::atomic<uint64_t> memory_used_{0};  // changed by the builder, too
  // What the jobs that have memory bring to cores and NICs in a round of each. The builder's.
  std::map<const Job*, std::vector<PlanLoad>> loads_;
  uint64_t next_token_ = 1;
  Notes notes_;
  Background background_;               // decodes and encodes
  Background builder_{"phub-builder"};  // plans, makes and frees
};

}  // namespace phub

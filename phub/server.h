// The server: a registry of jobs. It routes each call, report of a core and event of a transport to
// its job (job/running_job.h).
//
// One control thread calls everything here. The cores' threads are reached through their mailboxes
// only. Long work goes to more threads (background.h): one decodes and encodes messages, one plans,
// makes and frees jobs, one writes checkpoints. poll() never blocks: production calls it from the
// event loop (server_loop.h), the simulator from its scheduler, which also steps the cores.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "phub/background.h"
#include "phub/clock.h"
#include "phub/control/handler.h"
#include "phub/folder_watch.h"
#include "phub/job/parent.h"
#include "phub/job/running_job.h"
#include "phub/job_maker.h"
#include "phub/machine.h"
#include "phub/notes.h"
#include "phub/quotas.h"
#include "phub/server_trace.h"
#include "phub/task.h"
#include "transport/control/rules.h"
#include "transport/transport.h"

namespace phub {

struct ServerOptions : MachineOptions {
  uint64_t memory_limit_bytes = ~0ull;
  kernels::Store store = kernels::kDefaultStore;
  size_t trace_events = 0;  // the number of latest events kept per core, for write_trace(); 0: none
  Notes::Print note;        // is told of closed and refused connections; null: not wanted
  CheckpointOptions checkpoints;
  uint32_t shard_lease_ms = Shards::kLeaseMs;
  Parent* parent = nullptr;  // this box is its rack; it outlives the server; null: there is none
  std::optional<SwitchOptions> through_switch;  // the adding switch of its rack; nullopt: none
  // The quota of the jobs of a creator. Control thread. Null: there are no limits.
  std::function<Quota(const Caller& creator)> quota_of;
};

class Server final : public ControlHandler {
 public:
  static constexpr uint64_t kIdleMs = 500;  // between polls while there are no jobs

  Server(ServerOptions options, std::vector<std::unique_ptr<Transport>> transports,
         const Clock& clock);
  ~Server() override;

  // Starts a thread for each core, pinned, and those for long work. Without them the caller steps
  // the cores, and poll() does the long work.
  void start_threads();
  void stop_threads();
  // Writes the latest events of the cores. REQUIRES: their threads have ended; trace_events > 0.
  void write_trace(TraceWriter& writer) const { trace_->write(writer); }

  void join(JoinRequest request, Reply<JoinReply> reply) override;
  std::shared_ptr<void> hold_for_join(std::string_view text) override {
    return host_.budget.hold_for_join(text);
  }
#define PHUB_CALL(name, Answer, ...) void name(const Credential& who, Reply<Answer> reply) override;
#define PHUB_REQUEST(name, Request, Answer, ...) \
  void name(const Credential& who, const Request& request, Reply<Answer> reply) override;
#include "transport/control/calls.def"
  void leave_barrier(const Credential& who) override;
  void losses(const std::string& job, uint64_t from, Reply<LossPage> reply) override;
  void check_part(const Credential& who, const PartPiece& place, uint64_t bytes) override;
  void take_part(const Credential& who, const PartPiece& place, std::string piece,
                 std::shared_ptr<void> charge, Reply<Done> reply) override;
  void restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                     Reply<PartBytes> reply) override;
  void read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) override;
  void check_state_piece(const Credential& who, uint64_t offset, uint64_t bytes) override;
  void write_state(const Credential& who, uint64_t offset, std::string piece,
                   std::shared_ptr<void> charge, Reply<Done> reply) override;
  void log(const std::string& job, uint64_t from, Reply<LogPage> reply) override;
  void remove(const std::string& job, Reply<Done> reply) override;
  void check_ready(Reply<Done> reply) override;
  ServerStatus status() override;
  JobStatus job_status(const std::string& job) override;
  const JobOwner* owner(const std::string& job) const override;
  void expel(const WhyNot& why_not) override;
  void connection_ended(const Credential& who) override;
  void join_unanswered(const Credential& who) override;
  void join_shard(ShardHello hello, Reply<ShardWelcome> reply) override;
  void take_mail(uint64_t shard, ShardMail mail, Reply<ShardOrders> reply) override;
  void read_copy(uint64_t shard, const CopyPlace& place, Reply<PartBytes> reply) override;
  void check_copy(uint64_t shard, const CopyPlace& place, uint64_t bytes) override;
  void write_copy(uint64_t shard, const CopyPlace& place, std::string_view piece,
                  Reply<Done> reply) override;

  // The server is about to end: saves every job that has something to save, once more. is_saving()
  // until that is done; from now on it is not ready.
  void save_all();
  bool is_saving() const;

  // Handles everything that is due: reports of the cores, events of the transports, timers.
  void poll();
  uint32_t poll_interval_ms() const;   // until the next poll(), when no descriptor fires
  std::vector<int> event_fds() const;  // those of cores and transports; edge-triggered or eventfds

  Background& background() { return host_.coder; }  // decodes and encodes long messages
  bool has_job(const std::string& name) const { return jobs_.contains(name); }
  uint32_t cores() const { return machine_.cores(); }
  Core& core(uint32_t i) { return machine_.core(i); }
  std::string describe() const { return machine_.describe(); }

 private:
  using Join = std::shared_ptr<JoinRequest>;

  // server_jobs.cc
  Task<JoinReply> admit(Join join);     // a join, to its answer
  Task<RunningJob*> create(Join join);  // makes the job of a join
  Task<std::shared_ptr<Uplink>> join_parent(Join join);
  void add(const std::shared_ptr<RunningJob>& job);
  Story retire(std::string name);
  RunningJob* find(const std::string& job);
  RunningJob& find_running(const std::string& job);  // throws kNotFound
  Features features_here(const JobSpec& spec) const;
  RunningJob* find(const BoxLink* link);
  RunningJob& find_part(uint64_t number);
  RunningJob& authenticate(const Credential& who);
  void handle(const TransportEvent& event);
  void lose_shard(const ShardBox& shard, const std::string& why);
  void lose_late_shards(uint64_t now);
  void shard_moved(uint64_t shard, const CopyPlace& place);
  void await_no_longer();
  void discard(std::shared_ptr<RunningJob> job);
  void find_tick();
  void sample_cores(uint64_t now);
  std::vector<NodeStatus> status_of_nodes() const;

  const ServerOptions options_;
  const Clock& clock_;
  const uint64_t started_ms_;
  std::unique_ptr<ServerTrace> trace_;  // outlives threads and jobs; null: no trace
  Machine machine_;
  std::map<std::string, std::shared_ptr<RunningJob>> jobs_;
  std::unordered_map<const CoreJob*, RunningJob*> by_core_job_;
  std::map<uint64_t, std::shared_ptr<RunningJob>> by_number_;  // those with parts elsewhere
  std::map<std::string, JobOwner> owners_;  // for those of jobs_ that were made with a token
  std::map<std::string, Event> creating_;   // jobs that are being made: more joins wait for them
  std::vector<std::weak_ptr<Uplink>> uplinks_;  // those of jobs, and of jobs that are being made
  // Joins wait until a job has ended whose name or memory they need, or boxes are there again.
  Event retry_;
  uint32_t freeing_ = 0;        // jobs that have ended but still hold memory
  uint64_t tick_ms_ = kIdleMs;  // the shortest of the jobs' intervals
  // Jobs that have lost a box, and go on when there are so many other boxes, or at that time.
  struct AwaitedShards {
    size_t shards = 0;
    uint64_t until_ms = 0;
  };
  std::map<std::string, AwaitedShards> awaited_;
  bool draining_ = false;  // save_all() was called
  uint64_t next_tick_ms_ = 0;
  uint64_t sampled_ms_ = 0;
  std::vector<TransportEvent> events_;
  JobMaker maker_;      // the builder's thread uses it
  FolderWatch folder_;  // watches the folder of checkpoints
  JobHost host_;        // last: its threads use the members above
};

}  // namespace phub

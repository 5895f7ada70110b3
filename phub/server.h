// The server: its loop, and the story of a join. It routes each call, report of a core and event of
// a transport to its job (jobs.h, job/running_job.h) or desk.
//
// One control thread calls everything here. The cores' threads are reached through their mailboxes
// only. Long work goes to more threads (background.h): one decodes and encodes messages, one plans,
// makes and frees jobs, one writes checkpoints. poll() never blocks: production calls it from the
// event loop (server_loop.h), the simulator from its scheduler, which also steps the cores.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phub/background.h"
#include "phub/clock.h"
#include "phub/control/handler.h"
#include "phub/folder_watch.h"
#include "phub/job/parent.h"
#include "phub/job/running_job.h"
#include "phub/job_maker.h"
#include "phub/jobs.h"
#include "phub/machine.h"
#include "phub/node_use.h"
#include "phub/notes.h"
#include "phub/quotas.h"
#include "phub/server_trace.h"
#include "phub/shard_desk.h"
#include "phub/task.h"
#include "phub/uplinks.h"
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
  // This box's standby (job/standby.h), which outlives the server; null: there is none. Not with a
  // parent.
  Parent* standby = nullptr;
  std::string standby_of = {};                  // the source for which this box stands by; "": none
  std::optional<SwitchOptions> through_switch;  // the adding switch of its rack; nullopt: none
  // The quota of the jobs of a creator. Control thread. Null: there are no limits.
  std::function<Quota(const Caller& creator)> quota_of;
};

class Server final : public ControlHandler {
 public:
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
#define PHUB_PIECE(name, where, ...) void name(__VA_ARGS__) override;
#define PHUB_NOTICE(name, where) void name(const Credential& who) override;
#include "transport/control/calls.def"
  void losses(const std::string& job, uint64_t from, Reply<LossPage> reply) override;
  void log(const std::string& job, uint64_t from, Reply<LogPage> reply) override;
  void remove(const std::string& job, Reply<Done> reply) override;
  void check_ready(Reply<Done> reply) override;
  ServerStatus status() override;
  JobStatus job_status(const std::string& job) override;
  const JobOwner* owner(const std::string& job) const override;
  void expel(const WhyNot& why_not) override;
  ShardCalls& shards() override { return shards_; }

  // The server is about to end: saves every job that has something to save, once more. is_saving()
  // until that is done; from now on it is not ready.
  void save_all();
  bool is_saving() const;

  // Handles everything that is due: reports of the cores, events of the transports, timers.
  void poll();
  uint32_t poll_interval_ms() const;   // until the next poll(), when no descriptor fires
  std::vector<int> event_fds() const;  // those of cores and transports; edge-triggered or eventfds

  Background& background() { return host_.coder; }  // decodes and encodes long messages
  bool has_job(const std::string& name) const { return jobs_.find(name) != nullptr; }
  Machine& machine() { return machine_; }

 private:
  using Join = std::shared_ptr<JoinRequest>;

  // server_jobs.cc
  Task<JoinReply> admit(Join join);     // a join, to its answer
  Task<RunningJob*> create(Join join);  // makes the job of a join
  Story retire(std::string name);
  void discard(std::shared_ptr<RunningJob> job);
  Features features_here(const JobSpec& spec) const;

  const ServerOptions options_;
  const Clock& clock_;
  const uint64_t started_ms_;
  std::unique_ptr<ServerTrace> trace_;  // outlives threads and jobs; null: no trace
  Machine machine_;
  Jobs jobs_;
  Uplinks uplinks_;
  // Joins wait until a job has ended whose name or memory they need, or boxes are there again.
  Event retry_;
  ShardDesk shards_;
  NodeUse nodes_;
  uint32_t freeing_ = 0;   // jobs that have ended but still hold memory
  bool draining_ = false;  // save_all() was called
  uint64_t next_tick_ms_ = 0;
  std::vector<TransportEvent> events_;
  JobMaker maker_;      // the builder's thread uses it
  FolderWatch folder_;  // watches the folder of checkpoints
  JobHost host_;        // last: its threads use the members above
};

}  // namespace phub

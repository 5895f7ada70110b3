// A whole rack in one process: the production server with its cores and membership, boxes under it
// (shard.h) and below it (rack_box.h), and production sessions, over the simulated network. One
// seeded scheduler decides what steps next.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "phub/plan/plan.h"
#include "phub/server.h"
#include "tests/phub/simulated_disk.h"
#include "tests/sim/control_net.h"
#include "tests/sim/index_set.h"
#include "tests/sim/rack_box.h"
#include "tests/sim/rack_logs.h"
#include "tests/sim/rack_oracle.h"
#include "tests/sim/rack_plan.h"
#include "tests/sim/rack_switch.h"
#include "tests/sim/shard.h"
#include "tests/sim/trainer.h"
#include "tests/sim/virtual_clock.h"
#include "transport/paced/transport.h"
#include "transport/sim/net.h"

namespace phub::sim {

struct RackResult {
  std::string failure;  // empty: everything held
  uint64_t trace_hash = 0;
  uint64_t virtual_ns = 0;
  uint64_t steps = 0;
  uint64_t observations = 0;  // chunk results that were compared
  uint64_t lost = 0, admitted = 0, failed_jobs = 0, dead_devices = 0;
  uint64_t box_deaths = 0, restored = 0;  // jobs that went on from a checkpoint
  uint64_t parts_restored = 0, void_snapshots = 0;
  uint64_t parts_restored_below = 0;                // of them, at racks
  uint64_t coded_jobs = 0, residuals_restored = 0;  // of ranks
  uint64_t jobs_of_schedules = 0;                   // of formats
  uint64_t jobs_of_factors = 0, jobs_of_rows = 0, lazy_jobs = 0, jobs_of_interest = 0;
  uint64_t chunks_carried = 0;       // to a later round
  uint64_t forks = 0, switches = 0;  // of branches
  uint64_t kills = 0, revivals = 0;  // of branches: decided; of those that were on disk
  uint64_t spread_kills = 0, spread_revivals = 0;  // of jobs over several boxes
  uint64_t revived_runs = 0;                       // a branch that had been killed went on
  uint64_t restored_with_branches = 0;
  uint64_t jobs_of_differences = 0;
  uint64_t states = 0;                          // of chunks, that were compared
  uint64_t spread_jobs = 0;                     // over several boxes
  uint64_t ended_shards = 0;                    // jobs that ended with a box that had a part
  uint64_t rewinds = 0;                         // jobs that went on from a checkpoint without one
  uint64_t racked_jobs = 0;                     // with boxes below the root
  uint64_t racks_lost = 0, racks_admitted = 0;  // by the boxes above them
  uint64_t boxes_below_died = 0;
  uint64_t switched_jobs = 0, switch_chunks = 0;  // behind a switch that adds; through it
  uint64_t switch_generations = 0;                // in which some came
  SimStats net;
  OuterCounts outer;
  std::vector<std::string> text;
};

// Runs the rack of a plan from its start to its end. `verbose` keeps the text of the trace.
RackResult run_rack(const RackPlan& plan, bool verbose = false);

// A job as the harness sees it.
struct JobRun {
  JobRun(const JobPlan& job, const Plan& chunks)
      : plan(job), layout(chunks), oracle(plan, layout), spec(job.spec) {}

  const JobPlan& plan;
  const Plan layout;
  Oracle oracle;
  JobSpec spec;  // as workers that come now ask for it
  std::vector<std::unique_ptr<Trainer>> trainers;
  std::vector<bool> fault_done;
  std::set<uint32_t> taken_over;  // ranks that somebody joined with replace
  uint32_t late_started = 0;
  uint32_t starting = 0;  // trainers that are to come, or have not got their rank yet
  uint64_t pushes = 0;
  bool device_failed = false;
  bool seen = false;      // it was there
  bool ended = false;     // and has failed, or is no more
  bool gone = false;      // and is no more
  bool log_lost = false;  // it ended when the box died: nobody came back
  bool spread = false;    // over several boxes
  uint64_t life = 0;      // Rack::life(), in which it was seen
  uint64_t rewinds = 0;   // it goes on from its checkpoint without the box that it lost
  bool rewinding = false;
  uint64_t restored = 0;
  uint64_t restored_round = 0;  // that it went on after in this life; 0: it began
  uint64_t parts_restored = 0, void_snapshots = 0, residuals_restored = 0;
  uint64_t kills = 0, revivals = 0;  // of branches, that were answered; those of branches on disk
  uint64_t carried = 0;              // chunks, to a later round
  uint64_t switch_chunks = 0;        // that came through a switch, as far as was seen
  std::string switch_ended;          // why no more did
  size_t restarts = 0;               // by other workers
  std::set<uint32_t> unsure_racks;   // of which a set may have been carried out, or not
  std::map<uint32_t, size_t> sets_before_answer;  // by rack: in the log, when the root answered it
  uint64_t durable = 0;                           // the last round that a worker was told to be
  std::vector<LogRecord> log;
  std::set<uint32_t> at_boxes;                 // below the root, where it runs
  std::vector<BoxLog> logs_below;              // of its lives there
  std::map<uint32_t, JobLife> life_at;         // by box below the root: of its latest join
  std::map<uint64_t, uint64_t> life_of_epoch;  // of the root's job, as a rack joined it
  OuterCounts outer;
  size_t partitions = 0;  // that have begun
};

class Rack {
 public:
  Rack(const RackPlan& plan, bool verbose);
  RackResult run();

  // For the trainers.
  SimNet& net() { return net_; }
  SimRandom& random() { return net_.random(); }
  // Of a box below the root by 1 + its number in the plan; 0: the root. REQUIRES: it lives, as for
  // all requests that arrive.
  ControlHandler& server(uint32_t box) const;
  ControlNet& control(uint32_t box);
  // A new one after each death of the box, or while it is dead.
  uint64_t box_life(uint32_t box) const {
    if (box == 0) return life_;
    return below_[box - 1]->server() ? below_[box - 1]->life() : 0;
  }
  // Of the job, which has a new one after each death of the box, and of another that has a part.
  uint64_t life(const JobRun& job) const { return life_ + job.rewinds; }
  // That a rank is in which has joined a box below the root.
  uint64_t life_below(const JobRun& job, uint64_t epoch) const {
    return epoch == 0 ? life(job) : job.life_of_epoch.at(epoch);
  }
  void pushed(JobRun& job, Trainer& trainer);
  void joining(JobRun& job) { ++job.starting; }
  void resolved(JobRun& job) { --job.starting; }              // a trainer got its rank, or gave up
  size_t sets_in_log(const JobRun& job);                      // REQUIRES: the box lives
  uint32_t rack_of(const JobRun& job, uint32_t rank) const {  // at the root
    return at_root(job.plan.spec, job.plan.levels, {rank, 1}).rank;
  }
  bool may_leave(const JobRun& job) const { return job.starting == 0; }
  const RackPlan& plan() const { return plan_; }
  SimSwitch* through_switch() { return switch_.get(); }  // null: there is none
  NicBudget budget_of(uint64_t bytes_per_s);
  // Which of the boxes that take part in jobs here (Rack::server()) is on the host of one that
  // sends to them: drawn for it.
  uint32_t near_to(uint32_t box);
  void fail(const std::string& what);

 private:
  struct CoreState {
    uint64_t paused_until_ns = 0;
    bool asleep = false;
    uint64_t wake_ns = 0;  // at the latest
    uint64_t timer_ns = 0;
  };
  struct BoxState {
    uint32_t number = 0;
    size_t first = 0;  // entity
    std::vector<CoreState> cores;
  };

  std::unique_ptr<Server> make_server(uint32_t box, uint32_t nodes, uint32_t cores,
                                      ServerOptions options, const Clock& clock);
  numa::Topology at_machine(uint32_t box, numa::Topology topology) const;
  std::unique_ptr<Transport> nic_of(uint32_t box);
  void add_box(uint32_t cores);
  void start_server();
  void start_shards();
  bool is_rewound(const JobStatus& job) const;
  void harm_shards_in_time();
  void harm_switch_in_time();
  // rack_below.cc
  void start_below();
  SimParent::Watch watch_on(uint32_t box);
  JobRun& job_of(const std::string& name);
  void watch_below(uint32_t box);
  void take_log(JobRun& job, uint32_t box);
  bool has_exact_logs(uint32_t box);
  void kill_box_below(uint32_t box, bool silent, uint64_t ms, uint32_t tries);
  void harm_below_in_time();
  void harm_below(const RackFault& fault, uint32_t box);
  void replace_ranks(JobRun& job, const RackFault& fault, uint32_t box);
  RackBox* below(const BoxState& box) const;  // null: it is the root, or a shard
  // rack_outer.cc
  void cut_off_in_time(JobRun& job);
  void cut_off(JobRun& job, const Partition& cut);
  void look_at_learners();
  void look_at_fragment(JobRun& job, uint32_t fragment);
  std::set<Member> live_ranks(const JobRun& job) const;
  static void count_learners(JobRun& job);

  void kill_server(const BoxFault& fault);
  void kill_server_in_time();
  void harm_box_in_time();
  void restart_workers(JobRun& job, uint64_t delay_ms);
  void make_room_after(uint64_t ms);
  void start(JobRun& job, Trainer::Start how, uint64_t delay_ns);
  void apply(JobRun& job, Trainer& trainer, const Fault& fault);
  void schedule_windows();
  void set_server_timer();
  void set_timer(uint64_t& pending_ns, uint64_t at_ns);
  void step();
  bool step_entity(size_t entity);
  bool step_control(uint32_t box);
  bool step_core(BoxState& box, uint32_t core);
  bool runnable(size_t entity) const;
  // Entities are the control thread of each box with its cores behind it, then the trainers.
  const BoxState* box_of(size_t entity) const;              // null: it is a trainer
  Core* core_of(const BoxState& box, uint32_t core) const;  // null: the box is dead
  size_t first_trainer() const { return boxes_.back().first + 1 + boxes_.back().cores.size(); }
  Trainer& trainer(size_t entity) const { return *trainers_[entity - first_trainer()]; }
  size_t entities() const { return first_trainer() + trainers_.size(); }
  void wake_all() { hot_.fill(entities()); }
  std::optional<size_t> draw_runnable();
  void watch_jobs();
  std::vector<LogRecord> log_of(const JobRun& job) { return log_at(*server_, job); }
  std::vector<LogRecord> log_at(Server& server, const JobRun& job);
  bool finished() const;
  uint64_t unanswered() const;  // control requests, of all servers
  uint64_t limit_ns() const;
  std::string status_text();
  void check_end(RackResult& result);
  void join_logs_of(JobRun& job, RackResult& result);
  std::string check_outcomes(const JobRun& job) const;
  std::string check_error(const JobRun& job, const Trainer& trainer, bool failed) const;

  const RackPlan& plan_;
  SimNet net_;
  VirtualClock clock_;
  ControlNet control_;
  const std::unique_ptr<SimSwitch> switch_;  // null: there is none
  testing::SimulatedDisk disk_;
  std::mt19937_64 losses_;          // of the disk
  std::unique_ptr<Server> server_;  // null: the box is dead
  uint64_t life_ = 1;
  uint64_t pushes_ = 0;
  size_t box_faults_ = 0;  // that have begun, as those of the disk and the clock
  size_t disk_faults_ = 0, clock_jumps_ = 0;
  const BoxFault* dying_ = nullptr;  // in a call to the disk
  std::vector<std::unique_ptr<JobRun>> jobs_;
  std::vector<Trainer*> trainers_;
  IndexSet hot_;                 // entities that may be able to run
  std::vector<BoxState> boxes_;  // the server's, then the shards', then those below
  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<std::unique_ptr<RackBox>> below_;
  size_t shard_faults_ = 0, rack_faults_ = 0, switch_faults_ = 0;  // that have begun
  uint64_t box_deaths_below_ = 0;
  uint64_t root_hangs_until_ns_ = 0;
  uint64_t server_timer_ns_ = 0;
  uint64_t looked_at_learners_ns_ = 0;
  std::string failure_;
  uint64_t steps_ = 0;
};

}  // namespace phub::sim

// What a simulated rack does, drawn from a seed: its box, its network, its jobs and their faults.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/phub/simulated_disk.h"
#include "tests/sim/outer_plan.h"
#include "transport/control/interest.h"
#include "transport/control/job_spec.h"
#include "transport/sim/net.h"
#include "worker/session/send_order.h"

namespace phub::sim {

// Happens to whoever holds `rank` once that worker has pushed `after_pushes` keys.
struct Fault {
  enum Kind {
    kCrash,        // the process ends
    kSilentCrash,  // the host dies: no connection is closed
    kHang,         // nothing runs for a while, heartbeats included
    kBeatingHang,  // only heartbeats go on
    kStraggle,     // as kHang, but short of every limit
    kBreak,        // a queue pair breaks
    kReplace,      // a successor takes the rank away from a living worker
    kLeave,        // leaves before the end
    kMute,         // for a while nothing that it sends arrives,
    kDeaf,         // or nothing that is sent to it
  };
  enum Successor {
    kNobody,
    kEager,    // joins at once, with replace
    kPatient,  // joins without replace, again and again, until the rank is free
  };
  Kind kind = kCrash;
  Successor successor = kNobody;
  uint32_t rank = 0;
  uint64_t after_pushes = 0;
  uint64_t hang_ms = 0;
  uint64_t successor_ms = 0;  // how much later the successor starts
};
std::string_view name_of(Fault::Kind kind);

// A gradient that is not finite, or not once it is summed up.
struct BadGradient {
  enum Kind { kNan, kInfinity, kOverflow };  // kOverflow: the largest finite number from every rank
  Kind kind = kNan;
  uint32_t rank = 0;
  uint32_t key = 0;
  uint64_t round = 0;
};

// The box's device that serves one core of the job dies.
struct DeviceFault {
  uint64_t after_pushes = 0;  // of the whole job
  uint64_t core = 0;          // modulo the cores of the job
  bool said = false;          // by the NIC; else the core's next call fails
};

struct HyperCall {  // by rank 0
  uint64_t after_pushes = 0;
  std::map<std::string, double> values;
};

// A rank gets or sets the state of some keys.
struct StateCall {
  uint32_t rank = 0;
  uint64_t after_pushes = 0;
  bool sets = false;
  std::vector<uint32_t> keys;
};

// A rank forks, schedules or discards branches that it knows of, or asks for them.
struct BranchCall {
  uint32_t rank = 0;
  uint64_t after_pushes = 0;
  uint64_t random = 0;  // what it does
};

struct JobPlan {
  JobSpec spec;
  uint64_t seed = 0;  // of its gradients
  uint64_t rounds = 1;
  bool digits = false;      // the base-4 oracle: element 0 (and 1) of every chunk counts ranks
  bool lockstep = false;    // all keys of a round, then the next round; else each key on its own
  bool barrier = false;     // before leaving
  bool look_again = false;  // after the barrier: when all is quiet
  bool fixed_ranks = true;  // ranks ask for their number; else the server chooses
  double null_chance = 0;
  uint32_t carry_over = 0;                  // rounds; of jobs that are not in lock-step
  double saver_chance = 0;                  // that a worker has state of its own, which it saves
  uint32_t late_ranks = 0;                  // new ranks that join in the middle
  std::vector<uint64_t> late_after_pushes;  // of the whole job, for each late rank
  std::vector<Fault> faults;
  std::optional<DeviceFault> device_fault;
  std::vector<BadGradient> bad;
  std::vector<HyperCall> hyper_calls;
  std::vector<StateCall> state_calls;    // by ascending pushes
  std::vector<BranchCall> branch_calls;  // likewise
  bool kills_branches = false;           // mostly they kill, and revive what is on disk
  // By rank: what it writes and reads, whoever has it. Empty: everything.
  std::vector<std::vector<KeyInterest>> interest;
  struct Ranks {
    uint32_t world_size = 1, max_ranks = 1;
  };
  std::vector<Ranks> later_ranks;  // of each time that it is begun again by other workers
  // By rank the box below the root where it joins, 1 + its number in the plan; empty: the root.
  std::vector<uint32_t> box_of;
  uint32_t levels = 0;             // of boxes below the root
  std::optional<OuterPlan> outer;  // ranks make steps by themselves, and exchange now and then

  bool lock_step() const { return spec.consistency == "bsp"; }
};

// The box dies, and is started again.
struct BoxFault {
  uint64_t after_pushes = 0;  // of all jobs, ever
  uint64_t delay_ns = 0;      // and then so much later,
  uint64_t disk_call = 0;     // or in this call to the disk from then on, if it is not 0
  bool power = false;         // its disk loses some of what was not synced
  uint64_t restart_ms = 0;
  // With it all workers of every job die; others come, as many as the job's `later_ranks` say.
  bool with_workers = false;
};

// The box's disk fails once, or is full for a while.
struct DiskFault {
  uint64_t after_pushes = 0;  // of all jobs, ever
  uint64_t call = 0;          // to the disk, from then on
  testing::SimulatedDisk::Fault kind = testing::SimulatedDisk::Fault::kFail;
  uint64_t room_ms = 0;  // how long it is full
};

// The box's clock goes on, and the box does not: a virtual machine is moved to another host.
struct ClockJump {
  uint64_t after_pushes = 0;
  uint64_t ms = 0;
};

// A box that serves under the server dies, or its control thread stands still.
struct ShardFault {
  uint64_t after_pushes = 0;  // of all jobs
  uint64_t shard = 0;         // modulo their number
  bool hangs = false;
  uint64_t ms = 0;  // until it is started again, or goes on
};

// A box below the root sums what a group of a job's ranks sends.
struct RackBoxPlan {
  uint32_t above = 0;  // 0: the root, else 1 + the number of a box before this one
  uint32_t cores = 1;
};

// What happens to such a box, or to the root.
struct RackFault {
  enum Kind {
    kDies,  // the process ends, and is started again
    kDiesSilently,
    kHangs,        // its control thread stands still
    kStandsStill,  // its clock goes on without it
    kBreaks,       // a queue pair to the box above breaks
    kMute,         // for a while nothing arrives that it sends to the box above, or
    kDeaf,         // nothing of what that answers
    kRootHangs,
  };
  Kind kind = kDies;
  uint64_t after_pushes = 0;  // of all jobs
  uint64_t box = 0;           // modulo their number
  uint64_t ms = 0;            // until it is over
};
std::string_view name_of(RackFault::Kind kind);

// What happens to a switch that adds.
struct SwitchFault {
  enum Kind {
    kForgets,
    kPasses,  // everything as it is, for so long
    kSilent,  // nothing comes through
  };
  Kind kind = kForgets;
  uint64_t after_pushes = 0;  // of all jobs
  uint64_t ms = 0;
};

// The first job's keys in int32 go through a switch that adds.
struct SwitchPlan {
  uint16_t slots = 8;
  uint16_t told = 8;                     // as the box was told that it has
  double loss = 0, twice = 0, late = 0;  // of packets, on each of their two ways
  double no_port = 0;                    // of workers: they cannot hear the answers
  uint64_t retry_ns = 1'000'000;
  uint32_t rounds_between = 0;  // two generations; 0: there is one
  std::vector<SwitchFault> faults;
};

struct LossWindow {
  uint64_t from_ns = 0, to_ns = 0;
  double loss = 0;
};

struct RackPlan {
  uint64_t seed = 0;
  bool clean = false;  // no faults at all: everything must end well
  uint32_t nodes = 1;  // of the box; its cores are dealt out to them
  uint32_t cores = 1;
  SimOptions net;
  std::vector<LossWindow> windows;
  double control_loss = 0;              // of each control message
  double control_duplicate = 0;         // of each request
  uint64_t control_delay_ns = 200'000;  // at most
  uint64_t control_timeout_ns = 4'000'000;
  double core_pause_chance = 0;  // a core is not scheduled for a while
  std::vector<BoxFault> box_faults;
  std::vector<DiskFault> disk_faults;
  std::vector<ClockJump> clock_jumps;
  std::vector<uint32_t> shards;  // boxes that serve under the server: their cores
  std::vector<ShardFault> shard_faults;
  std::vector<uint64_t> hosts;  // the machine of the server and of each shard; empty: unknown
  std::vector<RackBoxPlan> racks;
  std::vector<RackFault> rack_faults;
  std::optional<SwitchPlan> through_switch;
  uint64_t checkpoint_every = 0;  // rounds; 0: none are written
  // What each NIC sends at most, of boxes, of workers, and of racks to the box above; 0: no limit.
  uint64_t box_bytes_per_s = 0, worker_bytes_per_s = 0, uplink_bytes_per_s = 0;
  // That a worker, or a rack, is on the host of one of the boxes that it sends to.
  double near_chance = 0;
  uint64_t slot_window = 0;  // of each box; 0: slots of everything
  SendOrder send_order = SendOrder::kPriority;
  std::vector<JobPlan> jobs;
};

RackPlan make_rack_plan(uint64_t seed);
// A thousand ranks at fifty racks, below five others and a root with eight boxes under it, and all
// that goes wrong (rack_plan_large.cc).
RackPlan make_large_plan(uint64_t seed);
RackPlan thousand_ranks(uint64_t seed);  // nothing goes wrong
// Up to 64 learners that exchange now and then, with a quorum (rack_plan_outer.cc).
RackPlan make_outer_plan(uint64_t seed);

Fault some_fault(SimRandom& random, const JobPlan& job);
void move_states(SimRandom& random, JobPlan& job);

// Boxes below the root (rack_plan_below.cc), by 1 + their number; 0: the root.
//
// Ranks of the job join at racks, with racks above them up to so many levels. REQUIRES: it has
// groups.
void put_over_racks(JobPlan& job, uint32_t levels, uint32_t cores, RackPlan& plan);
void add_racks(SimRandom& random, RackPlan& plan);
void add_rack_faults(SimRandom& random, RackPlan& plan);
bool is_below(const RackPlan& plan, uint32_t box, uint32_t above);  // or is the same
// How many boxes are between this one and those where ranks join. REQUIRES: the job is there.
uint32_t level_of(const RackPlan& plan, const JobPlan& job, uint32_t above);

// The first job is put behind a switch that adds, if it can be (rack_plan_switch.cc).
void put_behind_switch(SimRandom& random, RackPlan& plan);

std::string describe(const RackPlan& plan);
std::string describe(const OuterPlan& outer);

}  // namespace phub::sim

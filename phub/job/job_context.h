// The context that the desks of a running job share. A desk is a class that owns one concern of the
// job (the state of keys, its snapshots, …), and the driver is the class that has the desks
// (running_job.h). Control thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "phub/background.h"
#include "phub/clock.h"
#include "phub/core/mail.h"
#include "phub/job/ended_jobs.h"
#include "phub/job/job.h"
#include "phub/job/job_end.h"
#include "phub/job/meter.h"
#include "phub/job/part.h"
#include "phub/job/remote_parts.h"
#include "phub/job/requests.h"
#include "phub/job/saved_jobs.h"
#include "phub/job/seats.h"
#include "phub/job/shards.h"
#include "phub/job/uplink.h"
#include "phub/notes.h"

namespace phub {

// The parts of a server that its jobs use.
struct JobHost {
  const Clock& clock;
  CoreMail mail;
  MemoryBudget budget;
  Notes notes;
  ServedTime time{clock};  // by which the limits of jobs are measured
  EndedJobs ended = {};
  BoxMeters meters = {};
  uint32_t ending = 0;                          // jobs that have ended but that a core still has
  Background coder{"phub-background"};          // decodes and encodes
  Background builder{"phub-builder"};           // plans, makes and frees
  std::unique_ptr<SavedJobs> checkpoints = {};  // null: none are written
  Background writer{"phub-writer", 10};         // writes checkpoints; the cores' threads go first
  Shards shards{};                              // boxes that serve under this server
  uint64_t next_job = 1;                        // the number by which they know it
};

// The beginning of a job: new, or from a checkpoint.
struct SavedLife {
  uint64_t durable_round = 0;  // the job goes on after this round; 0: from its beginning
  uint64_t docked_bytes = 0;   // in the budget: Job::docked_bytes_for()
  uint64_t epoch = 0;          // higher than that of any life before; 0: the job is not saved
  uint64_t ended = 0;          // epochs up to this one were another job's
  std::string owner = {};      // the hash of the creator's token; "": none
  CheckpointId from = {};      // the checkpoint that the job goes on from
  std::map<uint32_t, uint64_t> part_bytes = {};  // size of each rank's part of that checkpoint
  std::vector<ShardRestored> elsewhere =
      {};  // the message to other boxes about it; none: the job is new
};

// The driver, as desks see it.
class JobDriver {
 public:
  virtual ~JobDriver() = default;
  virtual const JobEnd& end() const = 0;
  // The job is over for its ranks, and the cores let go of it.
  bool has_ended() const { return end().has_come(); }
  // Carries out the membership's actions.
  virtual void carry_out() = 0;
  // Counts the job's growth in the budget.
  virtual void count_growth() = 0;
  // Runs `work` on that thread, then `end` on this one with the error of `work`, if it threw one.
  // The job lives until then.
  virtual void run_beside(Background& thread, Background::Work work, Background::End end) = 0;
};

// All of these outlive the desks.
struct JobContext {
  JobHost& host;
  Job& job;
  Membership& membership;
  Part& local;                        // the job's part in this box
  RemoteParts& remote;                // the parts in other boxes
  std::span<Part* const> everywhere;  // both
  Seats& seats;
  Requests& requests;
  const SavedLife& life;
  Uplink* uplink;   // a rack's; null: there is no parent
  Uplink* standby;  // to the standby; null: there is none
  JobDriver& driver;
};

}  // namespace phub

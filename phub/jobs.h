// The registry of a server's jobs: those that run, by name, connection, core and number; those that
// are being made; and who owns them. Control thread only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "phub/control/handler.h"
#include "phub/job/running_job.h"
#include "phub/task.h"

namespace phub {

class Jobs {
 public:
  using ByName = std::map<std::string, std::shared_ptr<RunningJob>>;
  using ByNumber = std::map<uint64_t, std::shared_ptr<RunningJob>>;
  static constexpr uint64_t kIdleMs = 500;  // between ticks while there are no jobs

  // `host` outlives this. `goes_on` says how a job goes on whose ranks join again; "": none does.
  Jobs(JobHost& host, std::string goes_on) : host_(host), goes_on_(std::move(goes_on)) {}
  // The server ends: frees all jobs. REQUIRES: the cores' threads have ended.
  void drop();

  // Null if there is none.
  RunningJob* find(const std::string& name) const;
  RunningJob* find(const BoxLink* link) const;
  RunningJob* find(const CoreJob* core_job) const;
  RunningJob& find_running(const std::string& name) const;  // throws kNotFound
  // The job of a call. Throws Error if `who` is no member of a job that runs.
  RunningJob& authenticate(const Credential& who) const;
  const ByName& all() const { return by_name_; }
  uint64_t tick_ms() const { return tick_ms_; }  // the shortest of the jobs' intervals
  uint64_t due_ms() const;                       // the earliest of RunningJob::due_ms()

  // Those with parts in other boxes, which know them by number. A job is there before it is added,
  // as soon as other boxes make their parts.
  const ByNumber& spread() const { return by_number_; }
  void add_spread(const std::shared_ptr<RunningJob>& job) { by_number_[job->number()] = job; }
  void drop_spread(uint64_t number) { by_number_.erase(number); }

  // `owner` counts if the job was made with a token.
  void add(const std::shared_ptr<RunningJob>& job, JobOwner owner);
  // REQUIRES: the job is gone. Its name is free now.
  RunningJob::Remains remove(const std::string& name);
  // Null if the job has none, or is not there.
  const JobOwner* owner(const std::string& name) const;
  JobOwner* owner(const std::string& name);

  // Jobs that are being made: more joins wait for them. The maker ends with the event.
  std::map<std::string, Event> making;

 private:
  void find_tick();

  JobHost& host_;
  const std::string goes_on_;
  ByName by_name_;
  std::unordered_map<const CoreJob*, RunningJob*> by_core_job_;
  ByNumber by_number_;
  std::map<std::string, JobOwner> owners_;
  uint64_t tick_ms_ = kIdleMs;
};

}  // namespace phub

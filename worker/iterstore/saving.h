// A store in the checkpoints of its job: what each rank saves beside the rows, which the box has,
// and what it begins with when the job goes on.
//
// The job of the first placing is the one that is saved. A program that goes on makes the same
// calls up to there, so that the rows lie as they did; then the state of the tables, the number of
// clocks and what the program saved come from the checkpoint. A store saves in clock(), when the
// results of a round that the box saves are here.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "worker/iterstore/store.h"
#include "worker/worker.h"

namespace phub::iterstore {

// Throws Error(kInvalid), which names the option: a store with it cannot be saved.
void check_saving(const StoreOptions& options);

// One thread at a time. Outlives the workers of the jobs that it was added to.
class Saving {
 public:
  // Keeps a reference. With no saver among the options it is off.
  explicit Saving(const WorkerOptions& store) : store_(store) {}
  bool is_on() const { return store_.saver != nullptr; }
  // Throws Error(kInvalid): rows were placed already, where a run that goes on finds them.
  void check_may_record(uint64_t placed) const;

  static void leave_out(WorkerOptions& job);  // the box does not save this job
  // The box saves this job, whose rows lie as RowPlan::fingerprint() says. REQUIRES: is_on().
  void add_to(WorkerOptions& job, uint64_t plan);
  // Joins a job with rows. One that is saved and has failed is there until all ranks know that
  // (JobSpec::lease_ms): who wants to go on from its checkpoint joins again, up to join_limit_ms.
  // Throws Error: kTaken, the job has rounds that are not of a checkpoint with this rank;
  // kMismatch, it was saved by another number of ranks.
  static std::unique_ptr<Worker> join(const WorkerOptions& job);
  // Takes what this rank saved: the number of clocks after which the job goes on. Throws
  // Error(kMismatch): the rows lie elsewhere now. REQUIRES: join() returned it, and it is not the
  // job's first round.
  uint64_t clocks_of(const Worker& worker) const;
  // Sends this rank's state after so many clocks, if the box wants it of `round`, the latest of all
  // keys; waits for its results then. Throws what the program's function throws.
  void save_if_due(Worker& worker, uint64_t round, uint64_t clocks);

 private:
  struct Entry {  // the store's own in a rank's state
    uint64_t clocks = 0;
    uint64_t plan = 0;
    uint64_t ranks = 0;
  };
  static std::optional<Entry> entry_of(const Worker& worker);  // nullopt: this rank saved none
  RankState state() const;

  const WorkerOptions& store_;
  Entry at_;
};

}  // namespace phub::iterstore

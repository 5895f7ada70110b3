// The parts of a store. All of its processes make the same calls in the same order: changes here
// are made in a meeting of the process's threads, by one of them.
#pragma once

#include <fmt/format.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "numa/topology.h"
#include "worker/iterstore/meeting.h"
#include "worker/iterstore/pattern_watch.h"
#include "worker/iterstore/recording.h"
#include "worker/iterstore/row_names.h"
#include "worker/iterstore/saving.h"
#include "worker/iterstore/shared_rows.h"
#include "worker/iterstore/store.h"
#include "worker/iterstore/thread_rows.h"

namespace phub::iterstore {

struct Store::Impl {
  explicit Impl(StoreOptions store_options);

  std::string next_job(const char* what) {
    return fmt::format("{}.{}-{}", options.worker.spec.name, ++jobs, what);
  }
  // Begins before anything is known of the accesses.
  void open();
  // Called after an iteration that every thread has recorded; `again` says that the store records
  // by itself.
  void place_anew(bool again);
  void clock();
  Tally own_tally();                    // this rank's tally for this clock
  void change_rows(const Tally& with);  // makes the changes that all ranks asked for
  std::vector<RowChange> changes_of_all();
  States cleared_states();  // the present states, in which deleted rows are as new
  void clear_rows();
  // All ranks call it before they do something together: if a thread of one strays, narrow tables
  // become wide instead, what was pushed early is taken back, and it returns true.
  bool widen();
  // Puts the same rows into another job; threads keep their places.
  void move_rows(RowPlan plan, States states, bool early);
  // Lets threads that make no call use the moved rows.
  void tell_threads();
  std::string name_of_rows();  // the job of a placing
  void check_spare(uint64_t table, uint64_t row, uint64_t left) const;
  Tally accesses() const;  // since rows were placed
  // The job becomes the store's. Returns the one before. Throws Error(kFenced) after abandon().
  std::unique_ptr<SharedRows> replace(std::unique_ptr<SharedRows> rows);
  void abandon() noexcept;
  void check_not_abandoned() const;
  // From now on threads use these.
  void use(std::unique_ptr<SharedRows> rows, std::span<const Recording> recorded);
  void check_clocked(const char* what) const;
  void check_table(uint32_t table) const {
    if (table < tables.size()) return;
    fail(ErrorCode::kInvalid, "there is no table {}, the store has {}", table, tables.size());
  }
  std::optional<uint32_t> os_node_of(uint32_t thread) const;
  class Unpinned;
  void pin(uint32_t thread) const;
  void unpin() const;

  const StoreOptions options;
  const std::vector<Table> tables;
  Meeting meeting;
  std::optional<numa::Topology> topology;  // set if threads are pinned
  cpu_set_t cpus{};                        // the CPUs that they had before
  uint64_t jobs = 0;
  std::atomic<uint64_t> clocks = 0;
  uint64_t placed = 0;
  Saving saving;
  PatternWatch watch;
  Tally counted;                               // the accesses() in the clocks that are over
  std::vector<std::optional<RowNames>> names;  // by table; set for those with spare rows
  std::vector<AskedChanges> asked;             // by thread, since the last clock
  std::vector<RowChange> announced;            // changes that were told with the last clock
  std::vector<RowChange> deleted;              // `row`: the place, which is not cleared yet
  std::set<uint32_t> strays;                   // tables for whose rows threads wait
  bool late = false;                           // a thread waits to update what was pushed early
  uint64_t moves = 0;                          // the number of times that widen() moved rows
  uint64_t widened = 0;                        // the number of times that a table was widened
  std::vector<StoreThread::Impl*> members;     // by thread; null: there is none
  Tally carried;                               // the last clock's, of a job that has ended
  std::vector<Recording> recordings;           // by thread
  std::mutex replacing;                 // held while `shared` becomes another one, and by abandon()
  std::atomic<bool> abandoned = false;  // changes with `replacing` held
  std::unique_ptr<SharedRows> shared;
  std::atomic<SharedRows*> opened = nullptr;  // the same, for threads that have not met since
  std::unique_ptr<SharedRows> kept;           // the job that was saved, after a move to another one
  std::atomic<SharedRows*> saved = nullptr;   // the job of the first placing, if saving.is_on()
  std::vector<std::unique_ptr<ThreadRows>> threads;
};

// A worker's own threads do not share the core of the thread that makes it.
class Store::Impl::Unpinned {
 public:
  explicit Unpinned(const Impl& store) {
    if (sched_getaffinity(0, sizeof own_, &own_) == 0) store.unpin();
  }
  ~Unpinned() { sched_setaffinity(0, sizeof own_, &own_); }
  Unpinned(const Unpinned&) = delete;
  Unpinned& operator=(const Unpinned&) = delete;

 private:
  cpu_set_t own_{};
};

}  // namespace phub::iterstore

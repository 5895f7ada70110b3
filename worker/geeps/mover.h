// Moves rows between host memory, buffers in device memory and the exchange while the application
// computes: a state machine without threads, locks or clocks. Its work is divided into lanes:
//
//   fetch  host rows ─▶ buffer            accesses in `waiting` whose memory is free, rows ready
//   store  buffer ─▶ log, local rows;     released buffers and clocks, those of a piece in order
//          log in device memory ─▶ log
//   push   log ─▶ exchange                when the previous result is here and nothing reads it
//   pull   exchange ─▶ rows ─▶ pinned     when the exchange has returned the key
//
// A table is divided into pieces, contiguous ranges of rows. A piece of parameters is a key of the
// exchange. An access and a clock are divided into parts, one for each piece that has rows of them;
// the last part that finishes completes the whole. So a piece is pushed when its own log is stored,
// and fetched when its own result is here, whatever the other pieces do. All parts of an access
// have rows of one version, but for a staleness. Each partition of the cache has one lane of each
// of the first three kinds; the pieces of a table are dealt out to them. The driver (driver.h) runs
// a task of each lane that is due:
//
//   lock; task = begin(lane); do { unlock; work.run(lane, *task); lock; } while (finish(*task));
//
// Other lanes run between begin() and finish(); a lane has one task at a time. REQUIRES: the caller
// holds the cache's lock, except in the lanes' work.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/cache_trace.h"
#include "worker/geeps/conditions.h"
#include "worker/geeps/first_failure.h"
#include "worker/geeps/follower.h"
#include "worker/geeps/lane_work.h"
#include "worker/geeps/lanes.h"
#include "worker/geeps/reserved_memory.h"
#include "worker/geeps/schedule.h"
#include "worker/geeps/staged_buffers.h"
#include "worker/geeps/table_use.h"
#include "worker/geeps/tasks.h"

namespace phub::geeps {

class Mover {
 public:
  // Throws Error(kInvalid) if tables, options and exchange do not fit together. REQUIRES: device
  // and exchange outlive this.
  Mover(Device& of_device, Exchange& over_exchange, const CacheOptions& cache_options,
        const std::vector<TableSpec>& specs);
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // mover.cc: tasks
  std::optional<Task> begin(Lane& lane);  // nullopt: no task can begin
  bool finish(Task& task);                // true: it is to be run once more
  // Fetches the host rows of an access outside the sequence. The caller runs it in its own lane,
  // between table_use.begin_reading() and end_reading(). REQUIRES: conditions.rows_are_ready().
  Task fill_task(const Outside& outside, float* buffer);

  // mover_order.cc: the order of tasks
  void post(Task task);      // divides it among the store lanes
  void arrived(size_t key);  // the exchange's next() has returned the key
  void add_waiting(Instance instance);
  // Of an access that is being filled, drops the parts that have not begun. It is filled no more
  // when those that have begun are over.
  void cancel_fill(Instance instance);
  // Drops what waits to be filled. False: fills are in progress still.
  bool cancel_fills();
  void install(Schedule placed);      // REQUIRES: no task is in progress or waits
  void open_first();                  // opens the beginning of the sequence
  void open_until(uint64_t phase);    // phases are counted through the iterations
  void leave_out(Instance instance);  // the application has omitted this access
  void release(Instance instance);
  void mark_irregular(Table& table);
  std::vector<const Event*> events_before(const Instance& instance);

  // Keeps the first failure: no task begins any more. Returns whether this is the first.
  bool fail(const std::exception_ptr& error);

  Device& device;
  Exchange& exchange;
  const CacheOptions options;
  StagingPool staging;  // for stores
  std::unique_ptr<CacheTrace> trace;

  // Guarded by the cache's lock.
  std::vector<Table> tables;
  std::optional<Schedule> schedule;  // fixed, except for the progress of accesses and entries
  Follower follower;
  std::vector<Instance> waiting;  // accesses to fill, in the order of opening
  CacheStats stats;
  ReservedMemory reserved;
  FirstFailure failure;
  Lanes lanes{device, options.partitions};
  TableUse table_use{tables, lanes};
  Conditions conditions{tables, schedule, follower};

  LaneWork work{exchange, options, tables, schedule, trace};  // its run() is without the lock

 private:
  struct PieceOfKey {
    uint32_t table, piece;
  };

  void begin_fills();
  void begin_fill(Instance instance);
  void divide(const Task& task, Lane::Kind kind, const std::vector<uint32_t>& pieces);
  void finish_part(Task& task);
  void finish_last(Task& task);
  void end_fill(Instance instance);
  void release_unused(Instance instance);
  void open(Instance instance);

  std::vector<PieceOfKey> pieces_of_keys_;
  size_t opened_ = 0;  // openings done in this circle
  uint64_t opening_circle_ = 0;
};

}  // namespace phub::geeps

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
// have rows of one version. Each partition of the cache has one lane of each of the first three
// kinds; the pieces of a table are dealt out to them. The driver (driver.h) runs a task of each
// lane that is due:
//
//   lock; task = begin(lane); do { unlock; run(lane, *task); lock; } while (finish(*task));
//
// Other lanes run between begin() and finish(); a lane has one task at a time. REQUIRES: the caller
// holds the cache's lock, except in run().
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/error.h"
#include "worker/device/arena.h"
#include "worker/device/device.h"
#include "worker/geeps/branch_rows.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/cache_trace.h"
#include "worker/geeps/follower.h"
#include "worker/geeps/host_rows.h"
#include "worker/geeps/rows.h"
#include "worker/geeps/schedule.h"
#include "worker/geeps/staged_buffers.h"

namespace phub::geeps {

// Contiguous rows of a table: where they are in host memory, the log of their updates, and the
// state of their exchange. Local data has no log, and is not exchanged.
struct Piece {
  uint32_t first_row = 0, row_count = 0;
  size_t key = 0;               // in the exchange
  const float* rows = nullptr;  // of its first row, in host memory
  float* log = nullptr;

  // Guarded by the cache's mutex.
  uint64_t handed_over = 0;  // the table's clocks that were pushed
  uint64_t version = 0;      // those whose result is in `rows`
  bool refreshing = false;   // `rows` are being replaced
  uint32_t moving = 0;       // fetches of this piece alone that are in progress
  uint64_t pushed_ns = 0;    // set only with a trace

  // Used by the piece's store lane.
  std::vector<HostLog> loose_log;  // by row, of rows in no entry

  std::unique_ptr<Event> refreshed;  // pinned rows are those of `version`
  std::unique_ptr<Event> fetched;    // the latest copy from `rows` has completed
  std::unique_ptr<Event> logged;     // the updates so far are in the host's log
  std::unique_ptr<Event> saved;      // local: the saves so far are in `rows`
};

// A table, and its pieces.
struct Table {
  explicit Table(TableSpec s) : spec(std::move(s)), map(spec.keys), row_floats(spec.row_floats) {}
  Table(const Table&) = delete;
  Table(Table&&) = default;

  size_t floats() const { return spec.keys.size() * row_floats; }
  // Before these rows of a piece are replaced in `own_rows`. Any thread; others replace other rows.
  void keep_rows(const Piece& piece, std::span<const Run> runs) const {
    if (branches) branches->keep(runs, piece.first_row);
  }
  size_t first_float_of(const Piece& piece) const { return size_t{piece.first_row} * row_floats; }
  float* own_rows_of(const Piece& piece) const {
    return own_rows.floats().data() + first_float_of(piece);
  }
  bool is_refreshing() const {
    return std::ranges::any_of(pieces, [](const Piece& piece) { return piece.refreshing; });
  }

  TableSpec spec;
  RowMap map;
  uint32_t row_floats;
  RowSplit split;
  std::vector<Piece> pieces;
  uint32_t first_partition = 0;  // the partition of its first piece: others for other tables
  int32_t priority = 0;
  bool kept_twice = false;  // rows and log are the cache's own memory, not the exchange's
  HostMemory own_rows, own_log;
  std::unique_ptr<BranchRows> branches;  // local, by branch: of `own_rows`
  DeviceMemory factors;  // with samples: those of a clock, in the application's order

  // Guarded by the cache's mutex.
  uint64_t clocks = 0;            // number of TableClocks
  uint64_t handed_over = 0;       // those that were pushed, of every piece
  uint64_t version = 0;           // those whose result is here, of every piece
  bool replacing = false;         // local: rows are being replaced
  bool refreshed_unseen = false;  // the application's work has not waited for `refreshed` of pieces
  uint32_t moving = 0;            // reads of rows of any piece, or of pinned rows, in progress
  uint32_t jobs = 0;              // releases and clocks that the store lane has not finished
  uint32_t held = 0;              // buffers that the application holds
  uint64_t regular_from = 0;      // local: before this iteration calls deviated from the sequence
  uint64_t changes = 0;           // local: saves by calls outside the sequence
  bool clocked_last = false;      // the table's latest call was TableClock
  bool unclocked = false;         // it was updated since then

  bool loose_rows = true;  // the table has rows in no entry

  std::unique_ptr<Event> gathered;  // kept twice: the latest read of pinned rows has completed
  std::unique_ptr<Event> clocked;   // the updates before the latest TableClock have completed
};

// An access of the sequence, in an iteration.
struct Instance {
  uint32_t access;
  uint64_t iteration;
  bool operator==(const Instance&) const = default;
};

// An access outside the sequence. Its buffer is in the reserved memory.
struct Outside {
  ListPlan list;
  size_t offset = 0;  // its place in the reserved memory
  std::unique_ptr<Event> computed;
};

// The state that the parts of a task share.
struct TaskParts {
  TaskParts(uint32_t parts, StagingPool& pool) : left(parts), staged(pool) {}

  uint32_t left;  // the parts that have not finished
  StagedBuffers staged;
};

struct Task {
  enum class Kind : uint8_t { kFill, kUpdate, kSave, kFree, kClock, kPush, kPull };
  Kind kind;
  uint32_t table;
  uint64_t clock = 0;  // the table's clock, for traces
  // kFill, kUpdate, kSave, kFree: the access, in the sequence or outside of it
  std::optional<Instance> planned = {};
  std::shared_ptr<Outside> outside = {};  // shared by all parts
  const ListPlan* list = nullptr;
  float* buffer = nullptr;
  std::vector<const Event*> after = {};   // the device's work waits for these
  bool after_saves = false;               // kFill: and for the saves so far
  bool after_fills = false;               // kSave: no fill of the table is in progress
  Event* done = nullptr;                  // recorded at the end; null: run() waits for the end
  std::optional<uint32_t> piece = {};     // the piece of this part; nullopt: all rows
  std::shared_ptr<TaskParts> parts = {};  // for an access or a clock
  // kFill: the part begins when its piece's rows are ready. False: all rows are ready, and the
  // table is read until the last part has finished.
  bool by_piece = false;
  uint64_t clocks_before = 0;             // kUpdate, kClock: number of TableClocks before it
  std::vector<uint32_t> used_logs = {};   // kClock: pinned entries with updates
  std::vector<FactorPairs> factors = {};  // kClock, kPush: of a table with samples, in its log
  bool null = false;                      // kClock, kPush: there are no updates
  bool handed_over = false;               // kPush: only the call of the exchange is left
  bool poisons = false;                   // all parts have run: only the poison is left
  bool refreshed = false;                 // kPull: there are pinned rows
  uint64_t bytes = 0, staged = 0;         // moved by run()
};

struct Lane {
  enum class Kind : uint8_t { kFetch, kStore, kPush, kPull };
  Kind kind;
  std::unique_ptr<Stream> stream;  // null: kPush
  std::unique_ptr<HostRows> rows;
  uint32_t partition = 0;
  std::deque<Task> tasks = {};  // in the order of post() or, of kFetch, of the accesses' beginning
  bool due = false;             // the result of begin() may have changed
  // Of the latest tasks: so few are on the stream, and a task that is more urgent waits for no
  // more.
  std::array<std::unique_ptr<Event>, 2> enqueued = {};
  size_t next_enqueued = 0;
};

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
  void run(Lane& lane, Task& task);
  bool finish(Task& task);  // true: it is to be run once more
  // Fetches the host rows of an access outside the sequence. The caller runs it in its own lane,
  // between begin_reading() and end_reading(). REQUIRES: rows_are_ready().
  Task fill_task(const Outside& outside, float* buffer);
  // Between these calls the table's rows are not replaced, and its pieces are not pushed.
  void begin_reading(Table& table) { ++table.moving; }
  void end_reading(Table& table);
  // Between these calls a local table's rows are replaced, and no task begins to read them.
  void begin_replacing(Table& table) { table.replacing = true; }
  void end_replacing(Table& table);  // buffers that were filled before are filled again
  bool fills_replaced() const;       // a task reads the rows of such a table

  // Completes a piece's log, of a clock with updates, in host memory.
  void complete_log(HostRows& rows, uint32_t table, uint32_t piece,
                    const std::vector<uint32_t>& used_logs, StagedBuffers& staged);

  // mover_order.cc: the order of tasks
  void post(Task task);      // divides it among the store lanes
  void arrived(size_t key);  // the exchange's next() has returned the key
  void add_waiting(Instance instance);
  void fills_may_begin() { make_due(Lane::Kind::kFetch); }
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
  bool memory_is_free(const Instance& instance) const;
  bool reserved_is_free(size_t offset, size_t bytes) const;  // nothing there is being released
  std::vector<const Event*> events_before(const Instance& instance);
  // Whether the instance's buffer still has the rows of the access before it, and they are fresh
  // enough. REQUIRES: that access was released.
  bool is_kept(const Instance& instance, uint64_t back) const;
  // Whether the table's rows may be read. Local rows: their saves have completed. Parameters: they
  // are at most `back` clocks older than the clock that is `ahead` clocks from now.
  bool rows_are_ready(const Table& table, uint64_t back, uint64_t ahead = 0) const;

  // Keeps the first failure: no task begins any more. Returns whether this is the first.
  bool fail(const std::exception_ptr& error);
  bool failed() const { return !failure_.empty(); }
  Error failure() const { return Error(failure_code_, failure_); }
  void throw_if_failed() const {
    if (failed()) throw failure();
  }

  // The lane of a table's piece.
  Lane& lane(Lane::Kind kind, const Table& table, uint32_t piece) {
    return lane(kind, (table.first_partition + piece) % options.partitions);
  }
  std::vector<Lane>& lanes() { return lanes_; }
  Lane& pull_lane() { return lanes_.back(); }
  // Calls `enqueue`, which enqueues work on the stream. A trace gets the time of the work on the
  // device.
  void traced(Stream& stream, CacheTrack track, const char* name, const Task& task,
              const std::function<void()>& enqueue);

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
  // Device memory for accesses outside the sequence, and the buffers there that are in use. The
  // place of a buffer does not depend on what is still being released: that has an offset and bytes
  // below.
  std::unique_ptr<Arena> reserved;
  std::map<size_t, size_t> releasing;

 private:
  using Tasks = std::deque<Task>;
  struct PieceOfKey {
    uint32_t table, piece;
  };

  void add_table(const TableSpec& spec);
  void connect(Table& table);
  void add_lanes();
  Lane& lane(Lane::Kind kind, uint32_t partition) {
    return lanes_[3 * partition + static_cast<size_t>(kind)];
  }
  uint64_t clocks_ahead(const Instance& instance) const;
  bool fills_by_piece(const Instance& instance) const;
  bool can_fill(const Instance& instance) const;
  void begin_fills();
  void begin_fill(Instance instance);
  void divide(const Task& task, Lane::Kind kind, const std::vector<uint32_t>& pieces);
  void make_due(Lane::Kind kind);
  void finish_part(Task& task);
  void finish_last(Task& task);
  void end_fill(Instance instance);
  void release_unused(Instance instance);
  bool can_begin(const Task& task) const;
  Tasks::iterator next_store(Tasks& tasks) const;
  Tasks::iterator next_task(Lane& lane);
  void open(Instance instance);
  void fill(Lane& lane, Task& task);
  void store(Lane& lane, Task& task);
  void store_clock(Lane& lane, Task& task);
  void end_release(Stream& stream, const Task& task);
  void poison(Stream& stream, const Task& task);
  void log(HostRows& rows, Table& table, const HostPart& part, const StoredBuffer& buffer);
  void push(Task& task);
  void pull(Lane& lane, Task& task);

  std::vector<Lane> lanes_;  // those of the partitions, then the pull lane
  std::vector<PieceOfKey> pieces_of_keys_;
  size_t opened_ = 0;  // openings done in this circle
  uint64_t opening_circle_ = 0;
  ErrorCode failure_code_ = ErrorCode::kInternal;
  std::string failure_;  // empty: none
};

}  // namespace phub::geeps

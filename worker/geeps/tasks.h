// What a mover's lanes work on: tables in pieces, and tasks that move rows of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/branch_rows.h"
#include "worker/geeps/cache.h"
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
  uint64_t handed_over = 0;     // the table's clocks that were pushed
  uint64_t version = 0;         // those whose result is in `rows`
  bool refreshing = false;      // `rows` are being replaced
  uint32_t moving = 0;          // fetches of this piece alone that are in progress
  uint64_t pushed_ns = 0;       // set only with a trace
  uint64_t seen_in_choice = 0;  // Lane::choices, when its store lane chose a task last

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
  uint64_t clocks = 0;       // number of TableClocks
  uint64_t handed_over = 0;  // those that were pushed, of every piece
  uint64_t version = 0;      // those whose result is here, of every piece
  bool replacing = false;    // local: rows are being replaced
  // The piece whose pinned rows were refreshed last, until the application's work has waited for
  // it: so it has for all, which are refreshed on one stream.
  std::optional<uint32_t> refreshed_last;
  uint32_t moving = 0;        // reads of rows of any piece, or of pinned rows, in progress
  uint32_t jobs = 0;          // releases and clocks that the store lane has not finished
  uint32_t held = 0;          // buffers that the application holds
  uint64_t regular_from = 0;  // local: before this iteration calls deviated from the sequence
  uint64_t changes = 0;       // local: saves by calls outside the sequence
  bool clocked_last = false;  // the table's latest call was TableClock
  bool unclocked = false;     // it was updated since then

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

  // The push of what this part of a clock has stored. REQUIRES: it has finished.
  Task push_of_clock() {
    return {.kind = Kind::kPush,
            .table = table,
            .piece = piece,
            .factors = std::move(factors),
            .null = null};
  }
};

}  // namespace phub::geeps

// A placed sequence: the places of the rows of every list, the accesses that each buffer must wait
// for, and the progress of the accesses. All but the progress is fixed until the next sequence.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/placement.h"
#include "worker/geeps/rows.h"
#include "worker/geeps/sequence.h"

namespace phub::geeps {

// The log, in host memory, of the clock in progress.
enum class HostLog : uint8_t {
  kOld,   // still has updates of an earlier clock
  kZero,  // no updates: it is filled with zeros
  kUsed,  // has updates
};

// The rows of an entry that are in a piece of the table.
struct EntryPart {
  uint32_t piece = 0;
  uint32_t rows = 0;
  std::vector<Run> runs;             // row of the entry -> row of the piece
  Stretch stretch = {};              // the entry's, with all runs: stored with other parts
  HostLog host_log = HostLog::kOld;  // used by the piece's store lane
};

// Rows that are always used together.
struct PlacedEntry {
  uint32_t table = 0;
  bool pinned = false;
  float* rows = nullptr;  // place in device memory, if pinned
  float* log = nullptr;   // the updates of a clock, beside the rows; null: in host memory
  uint32_t count = 0;
  std::vector<EntryPart> parts;  // by piece: of those that have rows of it

  EntryPart& part_of(uint32_t piece);  // REQUIRES: the piece has rows of it
  const EntryPart& part_of(uint32_t piece) const;

  // Used by the application's thread.
  bool log_used = false;  // `log` has updates of this clock
  bool dirty = false;     // pinned local rows are newer than those in host memory
};

constexpr uint32_t kNoEntry = ~uint32_t{0};  // for rows that are not in the sequence

// The rows of a list that are in a pinned entry.
struct PinnedPart {
  uint32_t entry;
  uint32_t rows;
  std::vector<Run> runs;               // row of the list -> row of the entry
  std::optional<RowIndex> index = {};  // by row of the entry: the row of the list
};

// The rows of a list that are in host memory: those in a piece of the table, of one entry or of
// none.
struct HostPart {
  uint32_t piece;
  uint32_t entry;  // an entry, or kNoEntry
  uint32_t rows;
  std::vector<Run> runs;  // row of the list -> row of the piece
  Stretch stretch = {};   // the list's, with all runs: stored with other parts
};

// The places of the rows of a list.
struct ListPlan {
  uint32_t table = 0;
  uint32_t rows = 0;
  std::vector<PinnedPart> pinned;
  std::vector<HostPart> host;         // by piece
  std::vector<uint32_t> pieces = {};  // those of `host`, each once

  // The host's parts of a piece; nullopt: of all.
  std::span<const HostPart> host_of(std::optional<uint32_t> piece) const;
};

// An instance of an access must wait until `access` was released `behind` iterations before.
struct Dependency {
  uint32_t access;
  uint32_t behind;
};

// An access of the sequence. Its instance k is the one in iteration k.
struct PlannedAccess {
  Call call = Call::kRead;
  uint32_t list = 0;
  uint32_t step = 0;
  uint32_t phase = 0;
  float* data = nullptr;
  bool in_place = false;
  bool fetch = true, save = true;  // as recorded
  bool last_update = false;        // the last one of its table
  // The access whose buffer this one continues to use, with its rows; and whether a later access
  // continues to use this one's.
  std::optional<uint32_t> kept_from;
  bool kept_on = false;
  std::vector<Dependency> waits_for = {};

  // Progress over the iterations. Guarded by the cache's lock.
  uint64_t filled = 0;      // instances whose fetch from host memory was enqueued (event `ready`)
  uint64_t released = 0;    // instances before this one were released (event `done`)
  uint64_t skipped_to = 0;  // instances before this one are omitted, once those before are released
  bool filling = false;     // some of its pieces are being fetched, or wait for that
  bool cancelled = false;   // set while filling: not all of its pieces will be fetched
  bool left_out = false;    // set while filling: the application omits this instance
  bool held = false;
  bool done_recorded = false;                                 // false: there is nothing to wait for
  uint64_t version = 0, changes = 0;                          // those of the table when it was
                                                              // filled
  uint64_t back = 0;                                          // the age in clocks that its rows may
                                                              // have
  std::vector<std::unique_ptr<Event>> ready = {}, done = {};  // by partition of the cache
  std::unique_ptr<Event> computed = {};
};

// From this phase on, an access of this iteration or of the next may get its buffer.
struct Opening {
  uint32_t phase;
  uint32_t next_iteration;  // 0 or 1
  uint32_t access;
};

struct Schedule {
  Sequence sequence;
  Placement placement;
  uint32_t phases = 1;
  std::vector<PlacedEntry> entries;
  std::vector<ListPlan> lists;
  std::vector<PlannedAccess> accesses;
  std::vector<uint32_t> access_of_step;
  std::vector<Opening> openings;                     // by phase
  std::vector<std::vector<uint32_t>> table_entries;  // by table: its entries
  // By table and piece: the entries that have rows there.
  std::vector<std::vector<std::vector<uint32_t>>> piece_entries;
  std::vector<std::vector<uint32_t>> entry_of_row;  // by table and row; kNoEntry
  std::vector<std::vector<uint32_t>> row_in_entry;  // by table and row
};

// The places of a table's rows, in the order of a list. For an update, rows of a pinned entry
// without a log count as rows in host memory, since their log is there, and an entry is named with
// every piece that has rows of it. Without a schedule all rows are in host memory.
ListPlan plan_list(const Schedule* schedule, uint32_t table, const RowSplit& split,
                   std::span<const uint32_t> rows, bool for_update);

// `demand` is that of the sequence, `placement` was made for it, `rows` and `splits` are those of
// the tables.
// Blocks until the indexes are on the device.
Schedule make_schedule(Sequence sequence, const SequenceDemand& demand, Placement placement,
                       std::span<const RowMap* const> rows, std::span<const RowSplit> splits,
                       Device& device, std::byte* memory);

}  // namespace phub::geeps

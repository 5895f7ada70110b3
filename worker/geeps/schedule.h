// A placed sequence, worked out once: where the rows of every list lie, and what each buffer has to
// wait for. Fixed until the next sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/placement.h"
#include "worker/geeps/rows.h"
#include "worker/geeps/sequence.h"

namespace phub::geeps {

// Rows that are always used together.
struct EntryPlan {
  uint32_t table = 0;
  bool pinned = false;
  float* rows = nullptr;  // in device memory, if pinned
  float* log = nullptr;   // the updates of a clock, beside them
  uint32_t count = 0;
  std::vector<Run> runs;  // row of the entry -> row of the table
};

// The rows of a pinned entry in a list.
struct PinnedPart {
  uint32_t entry;
  uint32_t first;                 // where they begin in the list, if they are there in order
  std::optional<RowIndex> index;  // otherwise: the row of the list of each
  std::vector<Run> runs;          // the same: row of the list -> row of the entry
};

// The rows of an entry in host memory: row of the list -> row of the table.
struct HostPart {
  uint32_t entry;
  std::vector<Run> runs;
};

struct ListPlan {
  uint32_t table = 0;
  uint32_t rows = 0;
  std::vector<PinnedPart> pinned;
  std::vector<HostPart> host;
};

// An instance of an access must wait until this one, so many iterations before, is given back.
struct Dependency {
  uint32_t access;
  uint32_t behind;
};

struct AccessPlan {
  Call call = Call::kRead;
  uint32_t list = 0;
  uint32_t step = 0;
  uint32_t phase = 0;
  float* data = nullptr;
  bool in_place = false;
  bool fetch = true, save = true;  // as recorded
  bool last_update = false;        // of its table
  // The access whose buffer it takes over with the rows in it, and whether another takes over its.
  std::optional<uint32_t> kept_from;
  bool kept_on = false;
  std::vector<Dependency> waits_for;
};

// From this phase on, an access of this iteration (or of the next) may be given its buffer.
struct Opening {
  uint32_t phase;
  uint32_t next_iteration;  // 0 or 1
  uint32_t access;
};

struct Schedule {
  Sequence sequence;
  Placement placement;
  uint32_t phases = 1;
  std::vector<EntryPlan> entries;
  std::vector<ListPlan> lists;
  std::vector<AccessPlan> accesses;
  std::vector<uint32_t> access_of_step;
  std::vector<Opening> openings;                     // by phase
  std::vector<std::vector<uint32_t>> table_entries;  // by table: its entries
  std::vector<std::vector<uint32_t>> entry_of_row;   // by table and row; kNoEntry
  std::vector<std::vector<uint32_t>> row_in_entry;   // by table and row
  static constexpr uint32_t kNoEntry = ~uint32_t{0};
};

// `demand` is the sequence's, placed in `memory`; `rows` are the tables'. Blocks until the indexes
// are on the device.
Schedule make_schedule(Sequence sequence, const SequenceDemand& demand, Placement placement,
                       std::span<const RowMap> rows, Device& device, std::byte* memory);

}  // namespace phub::geeps

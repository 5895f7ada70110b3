// GeePS's Algorithm 2: what stays in device memory, what lives in host memory, and where every
// buffer of an iteration lies. A pure function of the sequence of accesses and the budget.
//
// Time is a circle of phases: a phase is one or more acquisitions (Read, PreUpdate, LocalAccess),
// the computation with them, and the releases until the next acquisition. Accesses are live
// together if and only if they share a phase. With a lead of n phases a buffer into which rows are
// fetched is given out n phases before it is asked for: the time to fill it during the computations
// before. One from which rows are saved is kept for a phase longer, to empty it. A lead of 1 is
// double buffering. Rows that are read again, and would be fetched again before the buffer that has
// them is given back or at once then, stay there.
//
// Where this differs from the paper's listing: the pool is what the packed buffers really take
// instead of twice the peak, after every move; indexes and update logs are charged; parameters and
// local data compete by the bytes that a byte of memory saves (local data usually wins); what is
// read again soon is not fetched again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace phub::geeps {

// Rows that are always used together: the unit of placement.
struct Entry {
  std::string name;
  bool local = false;      // this worker's own data; otherwise parameters
  uint64_t bytes = 0;      // its rows
  uint64_t log_bytes = 0;  // the updates of a clock, beside its rows when pinned
};

// A list of keys, as accesses name it: rows of one or more entries.
struct BatchPart {
  uint32_t entry;
  uint64_t rows;
  uint64_t bytes;
};
struct Batch {
  std::string name;
  std::vector<BatchPart> parts;
  // Local data that is one entry in the order of the batch: if pinned, used where it lies.
  bool in_place = false;
};

enum class AccessKind : uint8_t { kRead, kUpdate, kLocal };

struct Access {
  AccessKind kind = AccessKind::kRead;
  uint32_t batch = 0;
  uint32_t step = 0;                         // where it is acquired in the sequence, for messages
  uint32_t first_phase = 0, last_phase = 0;  // last < first: released in the next iteration
  bool fetch = true, save = true;            // of local data
  // Of a read: an access that read the same batch before, with nothing in between that changes its
  // rows; given back when this one is acquired, and not taken up by another.
  std::optional<uint32_t> again = {};
};

struct Demand {
  uint32_t phases = 1;
  std::vector<Entry> entries;
  std::vector<Batch> batches;
  std::vector<Access> accesses;
};

struct PlacementOptions {
  uint64_t budget_bytes = 0;
  uint64_t reserved_bytes = 0;  // for accesses that are not in the sequence
  uint32_t max_lead = 4;        // phases, at least 1
};

// How far buffers are given out before they are needed.
enum class Buffering : uint8_t {
  kSingle,  // some as soon as they are asked for, or all
  kDouble,  // each at least one phase before
};

struct EntryPlace {
  bool pinned = false;
  uint64_t offset = 0, log_offset = 0;  // in device memory, if pinned
};
struct IndexPlace {  // of the rows of a pinned entry that a batch copies
  uint32_t batch, entry;
  uint64_t offset, bytes;
};
struct AccessPlace {
  bool in_place = false;  // at its entry's offset
  uint64_t offset = 0;    // of its buffer in device memory
  uint32_t lead = 0;      // phases; 0 if nothing is fetched
  bool kept = false;      // the buffer of the access before (Access::again), with its rows
};

// Device memory from 0 on: pinned entries, indexes, the pool of buffers, what is reserved.
struct Placement {
  Buffering buffering = Buffering::kSingle;
  uint32_t lead = 0;  // of all buffers that have the room for it; 0: not of all
  std::vector<EntryPlace> entries;
  std::vector<IndexPlace> indexes;
  std::vector<AccessPlace> accesses;
  uint64_t pinned_bytes = 0, index_bytes = 0, pool_bytes = 0, reserved_bytes = 0;
  uint64_t pool_offset = 0, reserved_offset = 0;
  uint64_t moved_bytes = 0;  // between host and device by the accesses of one iteration

  uint64_t total_bytes() const { return reserved_offset + reserved_bytes; }
};

// Throws Error(kFull) if even single buffers of the fullest phase do not fit: how much is needed,
// and for which step; Error(kInvalid) if the demand contradicts itself. With a larger budget the
// buffering is never worse, and with max_lead 1, at double buffering, no more bytes are moved.
Placement place(const Demand& demand, const PlacementOptions& options);

// What place() takes for granted: numbers in range, and no access as long as the circle or longer.
void check(const Demand& demand);

// The least budget at which place() does not throw, without what is reserved.
uint64_t least_budget(const Demand& demand);

}  // namespace phub::geeps

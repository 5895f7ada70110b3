// GeePS's Algorithm 2: which rows stay in device memory, which live in host memory, and the place
// of every buffer of an iteration. A pure function of the sequence of accesses and the budget.
//
// Time is a circle of phases. A phase is one or more acquisitions (Read, PreUpdate, LocalAccess),
// the computation with them, and the releases until the next acquisition. Two accesses are live at
// the same time if and only if they share a phase. With a lead of n phases, a buffer that must be
// filled is allocated n phases before its acquisition, so that it is filled during earlier
// computations. A buffer from which rows are saved is kept for a phase after its release. A lead of
// 1 is double buffering. If rows are read again so soon that the next fetch would begin before
// their buffer is released, or right then, they stay in that buffer.
//
// Differences from the paper's listing: the pool is as large as the packed buffers, after every
// move, instead of twice the peak; indexes and update logs are charged; parameters and local data
// compete by the bytes that a byte of memory saves (local data usually wins), unless
// PlacementOptions::peak_first; rows that are read again soon are not fetched again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace phub::geeps {

// Rows that are always used together: the unit of placement.
struct Entry {
  std::string name;
  bool local = false;      // this worker's own data; false: parameters
  uint64_t bytes = 0;      // its rows
  uint64_t log_bytes = 0;  // the log of a clock's updates, beside the rows if pinned
};

// The list of keys of an access: rows of one or more entries.
struct BatchPart {
  uint32_t entry;
  uint64_t rows;
  uint64_t bytes;
};
struct Batch {
  std::string name;
  std::vector<BatchPart> parts;
  // Local data that is one entry in the order of the batch: if pinned, it is used in place.
  bool in_place = false;
};

enum class AccessKind : uint8_t { kRead, kUpdate, kLocal };

struct Access {
  AccessKind kind = AccessKind::kRead;
  uint32_t batch = 0;
  uint32_t step = 0;                         // its acquisition in the sequence, for messages
  uint32_t first_phase = 0, last_phase = 0;  // last < first: released in the next iteration
  bool fetch = true, save = true;            // for local data
  // For a read: an earlier read of the same batch, released before this one is acquired, without a
  // change of the rows in between. Not more than one access names it.
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
  // Entries are pinned in the order of the paper's listing, as far as they fit: local data of the
  // fullest phase, other local data, parameters; each in their order.
  bool peak_first = false;
};

// Says how early buffers are allocated.
enum class Buffering : uint8_t {
  kSingle,  // some only at their acquisition
  kDouble,  // each at least one phase before
};

struct EntryPlace {
  bool pinned = false;
  uint64_t offset = 0, log_offset = 0;  // places in device memory, if pinned
};
struct IndexPlace {  // the index by which a batch copies rows of a pinned entry
  uint32_t batch, entry;
  uint64_t offset, bytes;
};
struct AccessPlace {
  bool in_place = false;  // at its entry's offset
  uint64_t offset = 0;    // the place of its buffer in device memory
  uint32_t lead = 0;      // phases; 0 if nothing is fetched
  bool kept = false;      // it continues to use the buffer of Access::again, with its rows
};

// The layout of device memory: pinned entries, indexes, the pool of buffers, reserved memory.
struct Placement {
  Buffering buffering = Buffering::kSingle;
  uint32_t lead = 0;  // the lead of all accesses that have room for it; 0: some have none
  std::vector<EntryPlace> entries;
  std::vector<IndexPlace> indexes;
  std::vector<AccessPlace> accesses;
  uint64_t pinned_bytes = 0, index_bytes = 0, pool_bytes = 0, reserved_bytes = 0;
  uint64_t pool_offset = 0, reserved_offset = 0;
  uint64_t moved_bytes = 0;  // copied between host and device in an iteration

  uint64_t total_bytes() const { return reserved_offset + reserved_bytes; }
};

// Throws Error(kFull) if even single buffers of the fullest phase do not fit; the message has the
// memory and the step. Throws Error(kInvalid) if the demand contradicts itself. With a larger
// budget the buffering is never worse; at double buffering with max_lead 1, without peak_first, no
// more bytes are moved.
Placement place(const Demand& demand, const PlacementOptions& options);

// The least budget at which place() does not throw, without reserved memory.
uint64_t least_budget(const Demand& demand);

}  // namespace phub::geeps

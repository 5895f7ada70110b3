// The operations of an iteration, recorded in a virtual or real one, and their demand of device
// memory. Plain data, without devices or threads.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "worker/geeps/placement.h"

namespace phub::geeps {

// GeePS's Table 1.
enum class Call : uint8_t {
  kRead,
  kPostRead,
  kPreUpdate,
  kUpdate,
  kLocalAccess,
  kPostLocalAccess,
  kTableClock,
};
std::string_view name_of(Call call);
bool is_acquisition(Call call);     // a call that returns a buffer
Call release_of(Call acquisition);  // the call that releases that buffer

struct TableInfo {
  std::string name;
  uint32_t row_floats = 0;
  bool local = false;  // this worker's own data; false: parameters
};

struct KeyList {
  uint32_t table;
  std::vector<uint64_t> keys;
  bool operator==(const KeyList&) const = default;
};

struct Operation {
  Call call;
  uint32_t table;
  uint32_t list = 0;      // the keys of an acquisition
  uint32_t acquired = 0;  // the step of the acquisition that a release ends
  bool moves = true;      // LocalAccess: fetches; PostLocalAccess: saves
  bool operator==(const Operation&) const = default;
};

struct Sequence {
  std::vector<TableInfo> tables;
  std::vector<KeyList> lists;         // each once
  std::vector<Operation> operations;  // by step
};

// Not thread-safe. The calls answer or take the step that asked for a buffer. Errors are
// Error(kInvalid), name the step and the table, and record nothing.
class Recorder {
 public:
  explicit Recorder(std::vector<TableInfo> tables);

  uint32_t acquire(Call call, uint32_t table, std::span<const uint64_t> keys, bool fetch = true);
  void release(Call call, uint32_t step, bool save = true);
  uint32_t read(uint32_t table, std::span<const uint64_t> keys) {
    return acquire(Call::kRead, table, keys);
  }
  void post_read(uint32_t step) { release(Call::kPostRead, step); }
  uint32_t pre_update(uint32_t table, std::span<const uint64_t> keys) {
    return acquire(Call::kPreUpdate, table, keys);
  }
  void update(uint32_t step) { release(Call::kUpdate, step); }
  uint32_t local_access(uint32_t table, std::span<const uint64_t> keys, bool fetch = true) {
    return acquire(Call::kLocalAccess, table, keys, fetch);
  }
  void post_local_access(uint32_t step, bool save = true) {
    release(Call::kPostLocalAccess, step, save);
  }
  void table_clock(uint32_t table);

  const Sequence& sequence() const { return sequence_; }  // the recorded part
  // Ends the iteration. Throws Error(kInvalid) if a buffer was not released.
  Sequence finish();

 private:
  void check_table(Call call, uint32_t table) const;
  uint32_t list_of(Call call, uint32_t table, std::span<const uint64_t> keys);
  uint32_t step() const { return static_cast<uint32_t>(sequence_.operations.size()); }

  Sequence sequence_;
  std::map<std::pair<uint32_t, std::vector<uint64_t>>, uint32_t> lists_;
  std::vector<bool> released_;  // by step
  std::vector<bool> clocked_;   // by table
};

// Adds a TableClock after the last Update of each table that has none.
Sequence with_inferred_clocks(const Sequence& sequence);

// The input of place(), and the rows of its entries. Rows that are in the same lists form an entry;
// list i is batch i.
struct SequenceDemand {
  Demand demand;
  std::vector<KeyList> entries;  // the rows of each entry, in their order in memory
};
SequenceDemand demand_of(const Sequence& sequence);

}  // namespace phub::geeps

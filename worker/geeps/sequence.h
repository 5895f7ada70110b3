// The operations of one iteration, recorded in a virtual iteration (nothing but recorded) or in the
// first real one, and what they demand of device memory. Plain data: no device, no threads.
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
bool is_acquisition(Call call);     // it asks for a buffer
Call release_of(Call acquisition);  // what gives that buffer back

struct TableInfo {
  std::string name;
  uint32_t row_floats = 0;
  bool local = false;  // this worker's own data; otherwise parameters
};

struct KeyList {
  uint32_t table;
  std::vector<uint64_t> keys;
  bool operator==(const KeyList&) const = default;
};

struct Operation {
  Call call;
  uint32_t table;
  uint32_t list = 0;      // of what asks for a buffer: the keys
  uint32_t acquired = 0;  // of what gives one back: the step that asked for it
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

  uint32_t read(uint32_t table, std::span<const uint64_t> keys);
  void post_read(uint32_t step);
  uint32_t pre_update(uint32_t table, std::span<const uint64_t> keys);
  void update(uint32_t step);
  uint32_t local_access(uint32_t table, std::span<const uint64_t> keys, bool fetch = true);
  void post_local_access(uint32_t step, bool save = true);
  void table_clock(uint32_t table);

  const Sequence& sequence() const { return sequence_; }  // so far
  // The end of the iteration: every buffer must be given back.
  Sequence finish();

 private:
  uint32_t acquire(Call call, uint32_t table, std::span<const uint64_t> keys, bool fetch);
  void release(Call call, uint32_t step, bool save);
  void check_table(Call call, uint32_t table) const;
  uint32_t list_of(Call call, uint32_t table, std::span<const uint64_t> keys);
  uint32_t step() const { return static_cast<uint32_t>(sequence_.operations.size()); }

  Sequence sequence_;
  std::map<std::pair<uint32_t, std::vector<uint64_t>>, uint32_t> lists_;
  std::vector<bool> released_;  // by step
  std::vector<bool> clocked_;   // by table
};

// With a TableClock after the last Update of each table that has none.
Sequence with_inferred_clocks(const Sequence& sequence);

// What place() takes, and which rows are meant. Rows that are in the same lists are one entry; a
// list is a batch of the same number.
struct SequenceDemand {
  Demand demand;
  std::vector<KeyList> entries;  // the rows of each entry, as they lie in memory
};
SequenceDemand demand_of(const Sequence& sequence);

}  // namespace phub::geeps

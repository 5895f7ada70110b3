#include "worker/geeps/sequence.h"

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "transport/error.h"

namespace phub::geeps {
namespace {

AccessKind kind_of(Call acquisition) {
  switch (acquisition) {
    case Call::kRead:
      return AccessKind::kRead;
    case Call::kPreUpdate:
      return AccessKind::kUpdate;
    default:
      return AccessKind::kLocal;
  }
}

}  // namespace

bool is_acquisition(Call call) {
  return call == Call::kRead || call == Call::kPreUpdate || call == Call::kLocalAccess;
}

Call release_of(Call acquisition) {
  switch (acquisition) {
    case Call::kRead:
      return Call::kPostRead;
    case Call::kPreUpdate:
      return Call::kUpdate;
    default:
      return Call::kPostLocalAccess;
  }
}

std::string_view name_of(Call call) {
  constexpr std::array<std::string_view, 7> kNames = {
      "Read", "PostRead", "PreUpdate", "Update", "LocalAccess", "PostLocalAccess", "TableClock"};
  return kNames.at(static_cast<size_t>(call));
}

Recorder::Recorder(std::vector<TableInfo> tables) {
  for (const TableInfo& table : tables) {
    if (table.row_floats == 0) fail(ErrorCode::kInvalid, "table '{}' has empty rows", table.name);
  }
  clocked_.resize(tables.size());
  sequence_.tables = std::move(tables);
}

void Recorder::table_clock(uint32_t table) {
  check_table(Call::kTableClock, table);
  if (clocked_[table]) {
    fail(ErrorCode::kInvalid, "step {}: TableClock of '{}' for the second time in an iteration",
         step(), sequence_.tables[table].name);
  }
  clocked_[table] = true;
  sequence_.operations.push_back({.call = Call::kTableClock, .table = table});
  released_.push_back(true);
}

Sequence Recorder::finish() {
  for (uint32_t i = 0; i < released_.size(); ++i) {
    if (released_[i]) continue;
    const Operation& operation = sequence_.operations[i];
    fail(ErrorCode::kInvalid, "step {}: the buffer of {} of '{}' is not given back with {}", i,
         name_of(operation.call), sequence_.tables[operation.table].name,
         name_of(release_of(operation.call)));
  }
  return std::move(sequence_);
}

uint32_t Recorder::acquire(Call call, uint32_t table, std::span<const uint64_t> keys, bool fetch) {
  check_table(call, table);
  const uint32_t list = list_of(call, table, keys);
  sequence_.operations.push_back({.call = call, .table = table, .list = list, .moves = fetch});
  released_.push_back(false);
  return step() - 1;
}

void Recorder::release(Call call, uint32_t acquired, bool save) {
  if (acquired >= step() || !is_acquisition(sequence_.operations[acquired].call) ||
      release_of(sequence_.operations[acquired].call) != call) {
    fail(ErrorCode::kInvalid, "step {}: {} of step {}, which has no such buffer", step(),
         name_of(call), acquired);
  }
  const uint32_t table = sequence_.operations[acquired].table;
  if (released_[acquired]) {
    fail(ErrorCode::kInvalid, "step {}: {} of '{}' gives the buffer of step {} back again", step(),
         name_of(call), sequence_.tables[table].name, acquired);
  }
  released_[acquired] = true;
  sequence_.operations.push_back(
      {.call = call, .table = table, .acquired = acquired, .moves = save});
  released_.push_back(true);
}

void Recorder::check_table(Call call, uint32_t table) const {
  if (table >= sequence_.tables.size()) {
    fail(ErrorCode::kInvalid, "step {}: {} of table {}, of {}", step(), name_of(call), table,
         sequence_.tables.size());
  }
  const bool local = call == Call::kLocalAccess;
  if (sequence_.tables[table].local != local) {
    fail(ErrorCode::kInvalid, "step {}: {} of '{}', which holds {}", step(), name_of(call),
         sequence_.tables[table].name, local ? "parameters" : "local data");
  }
}

uint32_t Recorder::list_of(Call call, uint32_t table, std::span<const uint64_t> keys) {
  const std::string& name = sequence_.tables[table].name;
  if (keys.empty()) {
    fail(ErrorCode::kInvalid, "step {}: {} of no rows of '{}'", step(), name_of(call), name);
  }
  std::vector<uint64_t> list(keys.begin(), keys.end());
  if (const auto known = lists_.find({table, list}); known != lists_.end()) return known->second;
  std::unordered_set<uint64_t> seen;
  for (const uint64_t key : keys) {
    if (seen.insert(key).second) continue;
    fail(ErrorCode::kInvalid, "step {}: {} of row {} of '{}' twice", step(), name_of(call), key,
         name);
  }
  const auto number = static_cast<uint32_t>(sequence_.lists.size());
  sequence_.lists.push_back({table, list});
  lists_.emplace(std::pair(table, std::move(list)), number);
  return number;
}

namespace {

// Finds the entries: rows that are in the same lists, in the order of the first of these.
std::vector<KeyList> entries_of(const Sequence& sequence) {
  std::vector<std::unordered_map<uint64_t, std::vector<uint32_t>>> lists(sequence.tables.size());
  for (uint32_t i = 0; i < sequence.lists.size(); ++i) {
    const KeyList& list = sequence.lists[i];
    for (const uint64_t key : list.keys) lists[list.table][key].push_back(i);
  }
  std::vector<KeyList> entries;
  std::map<std::vector<uint32_t>, size_t> entry_of_lists;
  for (uint32_t i = 0; i < sequence.lists.size(); ++i) {
    const KeyList& list = sequence.lists[i];
    for (const uint64_t key : list.keys) {
      const std::vector<uint32_t>& with = lists[list.table][key];
      if (with.front() != i) continue;  // it was added with an earlier list
      const auto [at, is_new] = entry_of_lists.try_emplace(with, entries.size());
      if (is_new) entries.push_back({list.table, {}});
      entries[at->second].keys.push_back(key);
    }
  }
  return entries;
}

// The lists as batches of parts of entries.
void add_batches(const Sequence& sequence, SequenceDemand& result) {
  std::vector<std::unordered_map<uint64_t, uint32_t>> entry_of(sequence.tables.size());
  for (uint32_t entry = 0; entry < result.entries.size(); ++entry) {
    for (const uint64_t key : result.entries[entry].keys) {
      entry_of[result.entries[entry].table][key] = entry;
    }
  }
  for (const KeyList& list : sequence.lists) {
    Batch batch{.name = sequence.tables[list.table].name};
    std::unordered_set<uint32_t> seen;
    for (const uint64_t key : list.keys) {
      const uint32_t entry = entry_of[list.table][key];
      if (!seen.insert(entry).second) continue;
      batch.parts.push_back(
          {entry, result.entries[entry].keys.size(), result.demand.entries[entry].bytes});
    }
    batch.in_place = sequence.tables[list.table].local && batch.parts.size() == 1 &&
                     result.entries[batch.parts[0].entry].keys == list.keys;
    result.demand.batches.push_back(std::move(batch));
  }
}

// A phase begins with the first acquisition after another kind of call.
void add_accesses(const Sequence& sequence, Demand& demand) {
  std::vector<uint32_t> access_of(sequence.operations.size());  // by step
  // By list: a read in this clock that was released, and whose buffer no other read continues to
  // use.
  std::vector<std::optional<uint32_t>> read_before(sequence.lists.size());
  uint32_t phase = 0;
  bool acquiring = true;
  for (uint32_t step = 0; step < sequence.operations.size(); ++step) {
    const Operation& operation = sequence.operations[step];
    if (is_acquisition(operation.call)) {
      if (!acquiring && !demand.accesses.empty()) ++phase;
      acquiring = true;
      access_of[step] = static_cast<uint32_t>(demand.accesses.size());
      demand.accesses.push_back({.kind = kind_of(operation.call),
                                 .batch = operation.list,
                                 .step = step,
                                 .first_phase = phase,
                                 .last_phase = phase,
                                 .fetch = operation.moves});
      if (operation.call == Call::kRead) {
        demand.accesses.back().again = std::exchange(read_before[operation.list], {});
      }
      continue;
    }
    acquiring = false;
    if (operation.call == Call::kTableClock) {
      for (uint32_t list = 0; list < read_before.size(); ++list) {
        if (sequence.lists[list].table == operation.table) read_before[list].reset();
      }
      continue;
    }
    Access& access = demand.accesses[access_of[operation.acquired]];
    access.last_phase = phase;
    access.save = operation.moves;
    if (operation.call == Call::kPostRead) {
      read_before[access.batch] = access_of[operation.acquired];
    }
  }
  demand.phases = phase + 1;
}

}  // namespace

Sequence with_inferred_clocks(const Sequence& sequence) {
  const auto steps = static_cast<uint32_t>(sequence.operations.size());
  std::vector<bool> clocked(sequence.tables.size());
  std::vector<std::optional<uint32_t>> last_update(sequence.tables.size());
  for (uint32_t step = 0; step < steps; ++step) {
    const Operation& operation = sequence.operations[step];
    if (operation.call == Call::kTableClock) clocked[operation.table] = true;
    if (operation.call == Call::kUpdate) last_update[operation.table] = step;
  }
  Sequence result{sequence.tables, sequence.lists, {}};
  std::vector<uint32_t> new_step(steps);
  for (uint32_t step = 0; step < steps; ++step) {
    Operation operation = sequence.operations[step];
    const uint32_t table = operation.table;
    operation.acquired = new_step[operation.acquired];
    new_step[step] = static_cast<uint32_t>(result.operations.size());
    result.operations.push_back(operation);
    if (last_update[table] == step && !clocked[table]) {
      result.operations.push_back({.call = Call::kTableClock, .table = table});
    }
  }
  return result;
}

SequenceDemand demand_of(const Sequence& sequence) {
  SequenceDemand result;
  result.entries = entries_of(sequence);
  for (const KeyList& rows : result.entries) {
    const TableInfo& table = sequence.tables[rows.table];
    const uint64_t bytes = rows.keys.size() * uint64_t{table.row_floats} * sizeof(float);
    result.demand.entries.push_back({.name = table.name, .local = table.local, .bytes = bytes});
  }
  add_batches(sequence, result);
  add_accesses(sequence, result.demand);
  for (const Access& access : result.demand.accesses) {
    if (access.kind != AccessKind::kUpdate) continue;
    for (const BatchPart& part : result.demand.batches[access.batch].parts) {
      result.demand.entries[part.entry].log_bytes = part.bytes;
    }
  }
  return result;
}

}  // namespace phub::geeps

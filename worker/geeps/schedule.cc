#include "worker/geeps/schedule.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/moves.h"

namespace phub::geeps {
namespace {

constexpr uint32_t kAhead = 16;  // phases

float* at(std::byte* memory, uint64_t offset) { return reinterpret_cast<float*>(memory + offset); }

// Stretches of parts whose rows lie among each other are the same.
template <class Part>
void set_stretches(std::vector<Part>& parts) {
  std::vector<Stretch*> stretches;
  for (Part& part : parts) {
    part.stretch = stretch_of(part.runs);
    stretches.push_back(&part.stretch);
  }
  join_overlapping(std::move(stretches));
}

// Rows of a table that are in one of its pieces.
struct RowsOfPiece {
  std::vector<uint32_t> positions;  // indexes into the list of rows
  std::vector<uint32_t> rows;       // counted in the piece
};
std::map<uint32_t, RowsOfPiece> rows_by_piece(std::span<const uint32_t> rows,
                                              const RowSplit& split) {
  std::map<uint32_t, RowsOfPiece> pieces;
  for (uint32_t i = 0; i < rows.size(); ++i) {
    const uint32_t piece = split.piece_of(rows[i]);
    RowsOfPiece& in = pieces[piece];
    in.positions.push_back(i);
    in.rows.push_back(rows[i] - split.range_of(piece).first);
  }
  return pieces;
}

std::vector<EntryPart> parts_of(std::span<const uint32_t> rows, const RowSplit& split) {
  std::vector<EntryPart> parts;
  for (const auto& [piece, in] : rows_by_piece(rows, split)) {
    parts.push_back({.piece = piece,
                     .rows = static_cast<uint32_t>(in.rows.size()),
                     .runs = runs_of(in.positions, in.rows)});
  }
  set_stretches(parts);
  return parts;
}

void add_entries(const SequenceDemand& demand, std::span<const RowMap* const> rows,
                 std::span<const RowSplit> splits, std::byte* memory, Schedule& schedule) {
  schedule.table_entries.resize(rows.size());
  for (const RowSplit& split : splits) schedule.piece_entries.emplace_back(split.pieces());
  for (const RowMap* table : rows) {
    schedule.entry_of_row.emplace_back(table->rows(), kNoEntry);
    schedule.row_in_entry.emplace_back(table->rows(), 0);
  }
  for (uint32_t i = 0; i < demand.entries.size(); ++i) {
    const KeyList& keys = demand.entries[i];
    const EntryPlace& place = schedule.placement.entries[i];
    std::vector<uint32_t> sources;
    for (const uint64_t key : keys.keys) {
      const auto row = rows[keys.table]->find(key);
      PHUB_CHECK(row.has_value());
      schedule.entry_of_row[keys.table][*row] = i;
      schedule.row_in_entry[keys.table][*row] = static_cast<uint32_t>(sources.size());
      sources.push_back(*row);
    }
    PlacedEntry entry{.table = keys.table,
                      .pinned = place.pinned,
                      .count = static_cast<uint32_t>(sources.size()),
                      .parts = parts_of(sources, splits[keys.table])};
    if (place.pinned) {
      entry.rows = at(memory, place.offset);
      if (demand.demand.entries[i].log_bytes > 0) entry.log = at(memory, place.log_offset);
    }
    schedule.table_entries[keys.table].push_back(i);
    for (const EntryPart& part : entry.parts) {
      schedule.piece_entries[keys.table][part.piece].push_back(i);
    }
    schedule.entries.push_back(std::move(entry));
  }
}

void add_lists(std::span<const RowMap* const> rows, std::span<const RowSplit> splits,
               Device& device, std::byte* memory, Schedule& schedule) {
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> index_places;
  for (const IndexPlace& place : schedule.placement.indexes) {
    index_places[{place.batch, place.entry}] = place.offset;
  }
  for (uint32_t i = 0; i < schedule.sequence.lists.size(); ++i) {
    const KeyList& list = schedule.sequence.lists[i];
    std::vector<uint32_t> numbers;
    for (const uint64_t key : list.keys) numbers.push_back(*rows[list.table]->find(key));
    ListPlan plan = plan_list(&schedule, list.table, splits[list.table], numbers, false);
    for (PinnedPart& part : plan.pinned) {
      if (part.runs.size() == 1) continue;  // a plain copy
      std::vector<uint32_t> positions;
      for (const Run& run : part.runs) {
        for (uint32_t row = 0; row < run.rows; ++row) positions.push_back(run.first + row);
      }
      const auto place = index_places.find({i, part.entry});
      PHUB_CHECK(place != index_places.end());
      part.index.emplace(device, memory + place->second, positions);
    }
    schedule.lists.push_back(std::move(plan));
  }
}

struct Lying {  // an access with a buffer in the pool
  uint64_t begin, end;
  uint32_t access;
};

int64_t floor_of(int64_t value, int64_t by) {
  return value >= 0 ? value / by : -((-value + by - 1) / by);
}

// Iterations back to the last instance of a buffer that begins before one which begins `later`
// phases after it (in the same iteration).
uint32_t iterations_back(int64_t later, uint32_t phases) {
  const auto circle = static_cast<int64_t>(phases);
  PHUB_CHECK(later <= circle);  // else they would overlap in time
  return static_cast<uint32_t>(-floor_of(later - 1, circle));
}

void add_waits_for_memory(const Demand& demand, Schedule& schedule) {
  std::vector<Lying> pool;
  for (uint32_t i = 0; i < demand.accesses.size(); ++i) {
    if (schedule.placement.accesses[i].in_place) continue;
    uint64_t bytes = 0;
    for (const BatchPart& part : demand.batches[demand.accesses[i].batch].parts) {
      bytes += part.bytes;
    }
    const uint64_t begin = schedule.placement.accesses[i].offset;
    pool.push_back({begin, begin + bytes, i});
  }
  std::sort(pool.begin(), pool.end(),
            [](const Lying& a, const Lying& b) { return a.begin < b.begin; });
  const auto begins = [&](uint32_t access) {
    return static_cast<int64_t>(demand.accesses[access].first_phase) -
           static_cast<int64_t>(schedule.placement.accesses[access].lead);
  };
  const auto add = [&](uint32_t access, uint32_t other) {
    schedule.accesses[access].waits_for.push_back(
        {other, iterations_back(begins(access) - begins(other), schedule.phases)});
  };
  for (size_t i = 0; i < pool.size(); ++i) {
    add(pool[i].access, pool[i].access);
    for (size_t j = i + 1; j < pool.size() && pool[j].begin < pool[i].end; ++j) {
      add(pool[i].access, pool[j].access);
      add(pool[j].access, pool[i].access);
    }
  }
}

// Local data is fetched after the preceding access, in the application's order, has saved it.
void add_waits_for_rows(const Demand& demand, Schedule& schedule) {
  std::vector<std::vector<uint32_t>> users(demand.entries.size());  // in order
  for (uint32_t i = 0; i < demand.accesses.size(); ++i) {
    if (demand.accesses[i].kind != AccessKind::kLocal) continue;
    for (const BatchPart& part : demand.batches[demand.accesses[i].batch].parts) {
      users[part.entry].push_back(i);
    }
  }
  for (const auto& accesses : users) {
    for (size_t i = 0; i < accesses.size(); ++i) {
      for (size_t back = 1; back <= accesses.size(); ++back) {  // to the last that saves
        const size_t j = (i + accesses.size() - back) % accesses.size();
        if (!demand.accesses[accesses[j]].save) continue;
        schedule.accesses[accesses[i]].waits_for.push_back({accesses[j], j < i ? 0u : 1u});
        break;
      }
    }
  }
}

// If memory is free earlier than planned, buffers are filled earlier.
void add_openings(const Demand& demand, Schedule& schedule) {
  const auto phases = static_cast<int64_t>(schedule.phases);
  for (uint32_t i = 0; i < demand.accesses.size(); ++i) {
    const Access& access = demand.accesses[i];
    const uint32_t lead = std::max(schedule.placement.accesses[i].lead,
                                   std::min(kAhead, longest_lead(access, schedule.phases)));
    const int64_t begins = static_cast<int64_t>(access.first_phase) - static_cast<int64_t>(lead);
    const bool before = begins < 0;
    schedule.openings.push_back(
        {static_cast<uint32_t>(before ? begins + phases : begins), before ? 1u : 0u, i});
  }
  std::stable_sort(
      schedule.openings.begin(), schedule.openings.end(), [](const Opening& a, const Opening& b) {
        return std::pair(a.phase, a.next_iteration) < std::pair(b.phase, b.next_iteration);
      });
}

void add_host(ListPlan& plan, uint32_t entry, const RowSplit& split,
              std::span<const uint32_t> positions, std::span<const uint32_t> rows) {
  for (auto& [piece, in] : rows_by_piece(rows, split)) {
    for (uint32_t& position : in.positions) position = positions[position];
    plan.host.push_back(
        {piece, entry, static_cast<uint32_t>(in.rows.size()), runs_of(in.positions, in.rows)});
  }
}

// An update of some rows of an entry zeroes the log of the others, wherever they are.
void add_untouched(ListPlan& plan, uint32_t number, const PlacedEntry& entry) {
  std::set<uint32_t> touched;
  for (const HostPart& part : plan.host) {
    if (part.entry == number) touched.insert(part.piece);
  }
  for (const EntryPart& part : entry.parts) {
    if (!touched.contains(part.piece)) plan.host.push_back({part.piece, number, 0, {}});
  }
}

}  // namespace

const EntryPart& PlacedEntry::part_of(uint32_t piece) const {
  const auto found = std::ranges::lower_bound(parts, piece, {}, &EntryPart::piece);
  PHUB_CHECK(found != parts.end() && found->piece == piece);
  return *found;
}

EntryPart& PlacedEntry::part_of(uint32_t piece) {
  return const_cast<EntryPart&>(std::as_const(*this).part_of(piece));
}

std::span<const HostPart> ListPlan::host_of(std::optional<uint32_t> piece) const {
  if (!piece) return host;
  const auto begin = std::ranges::lower_bound(host, *piece, {}, &HostPart::piece);
  return {begin, std::ranges::upper_bound(host, *piece, {}, &HostPart::piece)};
}

ListPlan plan_list(const Schedule* schedule, uint32_t table, const RowSplit& split,
                   std::span<const uint32_t> rows, bool for_update) {
  ListPlan plan{
      .table = table, .rows = static_cast<uint32_t>(rows.size()), .pinned = {}, .host = {}};
  std::map<uint32_t, std::vector<uint32_t>> positions;  // by entry
  for (uint32_t i = 0; i < rows.size(); ++i) {
    positions[schedule ? schedule->entry_of_row[table][rows[i]] : kNoEntry].push_back(i);
  }
  for (auto& [number, at] : positions) {
    const auto count = static_cast<uint32_t>(at.size());
    const PlacedEntry* entry = number == kNoEntry ? nullptr : &schedule->entries[number];
    std::vector<uint32_t> sources;
    if (entry == nullptr || !entry->pinned || (for_update && entry->log == nullptr)) {
      for (const uint32_t position : at) sources.push_back(rows[position]);
      add_host(plan, number, split, at, sources);
      if (for_update && entry != nullptr) add_untouched(plan, number, *entry);
      continue;
    }
    const auto& row_in_entry = schedule->row_in_entry[table];
    std::ranges::sort(at, {}, [&](uint32_t position) { return row_in_entry[rows[position]]; });
    for (const uint32_t position : at) sources.push_back(row_in_entry[rows[position]]);
    plan.pinned.push_back({number, count, runs_of(at, sources)});
  }
  set_stretches(plan.host);
  std::ranges::stable_sort(plan.host, {}, &HostPart::piece);
  for (const HostPart& part : plan.host) {
    if (plan.pieces.empty() || plan.pieces.back() != part.piece) plan.pieces.push_back(part.piece);
  }
  return plan;
}

Schedule make_schedule(Sequence sequence, const SequenceDemand& demand, Placement placement,
                       std::span<const RowMap* const> rows, std::span<const RowSplit> splits,
                       Device& device, std::byte* memory) {
  Schedule schedule{.sequence = std::move(sequence),
                    .placement = std::move(placement),
                    .phases = demand.demand.phases};
  add_entries(demand, rows, splits, memory, schedule);
  add_lists(rows, splits, device, memory, schedule);
  schedule.access_of_step.resize(schedule.sequence.operations.size());
  for (uint32_t i = 0; i < demand.demand.accesses.size(); ++i) {
    const Access& access = demand.demand.accesses[i];
    const AccessPlace& place = schedule.placement.accesses[i];
    schedule.access_of_step[access.step] = i;
    schedule.accesses.push_back({.call = schedule.sequence.operations[access.step].call,
                                 .list = access.batch,
                                 .step = access.step,
                                 .phase = access.first_phase,
                                 .data = at(memory, place.offset),
                                 .in_place = place.in_place,
                                 .fetch = access.fetch,
                                 .save = access.save});
  }
  for (uint32_t i = 0; i < demand.demand.accesses.size(); ++i) {
    if (!schedule.placement.accesses[i].kept) continue;
    const uint32_t before = *demand.demand.accesses[i].again;
    schedule.accesses[i].kept_from = before;
    schedule.accesses[before].kept_on = true;
  }
  std::vector<std::optional<uint32_t>> last_update(schedule.sequence.tables.size());
  for (const Operation& operation : schedule.sequence.operations) {
    if (operation.call != Call::kUpdate) continue;
    last_update[operation.table] = schedule.access_of_step[operation.acquired];
  }
  for (const std::optional<uint32_t>& access : last_update) {
    if (access) schedule.accesses[*access].last_update = true;
  }
  add_waits_for_memory(demand.demand, schedule);
  add_waits_for_rows(demand.demand, schedule);
  add_openings(demand.demand, schedule);
  return schedule;
}

}  // namespace phub::geeps

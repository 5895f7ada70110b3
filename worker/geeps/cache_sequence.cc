// Sequences: recording, placing, and moving the tables from one placement to the next.
#include <algorithm>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_impl.h"

namespace phub::geeps {

void Cache::Impl::begin(bool virtually) {
  if (recorder_) fail(ErrorCode::kInvalid, "the sequence is being recorded already");
  if (const Held* held = held_.first()) {
    fail(ErrorCode::kInvalid, "a sequence begins with a buffer of '{}' in use",
         table_of(*held).spec.name);
  }
  std::vector<TableInfo> infos;
  for (const Table& table : mover_.tables) {
    infos.push_back({table.spec.name, table.row_floats, table.spec.local});
  }
  recorder_.emplace(std::move(infos));
  virtual_ = virtually;
}

void Cache::Impl::finish_sequence() {
  if (!recorder_) {
    fail(ErrorCode::kInvalid, "finish_sequence without begin_virtual or begin_gathering");
  }
  if (const Held* held = held_.first()) {
    fail(ErrorCode::kInvalid, "the sequence ends with a buffer of '{}' in use",
         table_of(*held).spec.name);
  }
  std::vector<bool> inferred(mover_.tables.size(), options_.infer_clocks);
  std::vector<bool> updated(mover_.tables.size());
  for (const Operation& operation : recorder_->sequence().operations) {
    if (operation.call == Call::kTableClock) inferred[operation.table] = false;
    if (operation.call == Call::kUpdate) updated[operation.table] = true;
  }
  if (!virtual_) {
    const Lock lock(waits_);
    mover_.failure.check();
    std::vector<uint32_t> clocks;
    for (uint32_t table = 0; table < mover_.tables.size(); ++table) {
      if (!inferred[table] || !updated[table] || mover_.tables[table].clocked_last) continue;
      check_may_clock(mover_.tables[table]);
      clocks.push_back(table);
    }
    for (const uint32_t table : clocks) clock(table);
  }
  waits_.for_results();  // after a timeout the caller may try again
  Sequence sequence = recorder_->finish();
  recorder_.reset();
  virtual_ = false;
  if (options_.infer_clocks) sequence = with_inferred_clocks(sequence);
  install(std::move(sequence));
  inferred_ = std::move(inferred);  // last: after a failure the old sequence stays in use
}

Placement Cache::Impl::place_anew(const Sequence& sequence, SequenceDemand& demand) const {
  // Rows that are read with their log always have one, and are read again after each update.
  for (size_t i = 0; i < demand.entries.size(); ++i) {
    Entry& entry = demand.demand.entries[i];
    if (mover_.tables[demand.entries[i].table].spec.read_my_writes) entry.log_bytes = entry.bytes;
  }
  for (Access& access : demand.demand.accesses) {
    if (mover_.tables[sequence.lists[access.batch].table].spec.read_my_writes) access.again.reset();
  }
  PlacementOptions options{.budget_bytes = budget_,
                           .reserved_bytes = options_.reserved_bytes,
                           .max_lead = options_.max_lead,
                           .peak_first = options_.peak_first};
  if (options.reserved_bytes > 0) return place(demand.demand, options);
  for (const KeyList& list : sequence.lists) {
    options.reserved_bytes =
        std::max<uint64_t>(options.reserved_bytes,
                           list.keys.size() * mover_.tables[list.table].row_floats * sizeof(float));
  }
  try {
    return place(demand.demand, options);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::kFull) throw;
  }
  options.reserved_bytes = 0;
  return place(demand.demand, options);
}

// REQUIRES: the results of all clocked updates are here.
void Cache::Impl::install(Sequence sequence) {
  Lock lock(waits_);
  waits_.until(
      lock, 0, [&] { return mover_.cancel_fills(); }, [] { return "copies that are in progress"; });
  for (const Lane& lane : mover_.lanes.all()) {
    if (lane.stream) lane.stream->synchronize();
  }
  SequenceDemand demand = demand_of(sequence);
  Placement placement = place_anew(sequence, demand);  // may throw: nothing has changed so far
  std::vector<const RowMap*> maps;
  std::vector<RowSplit> splits;
  for (const Table& table : mover_.tables) {
    maps.push_back(&table.map);
    splits.push_back(table.split);
  }
  try {
    const std::vector<bool> unclocked = copies_.save_dirty();
    mover_.install(make_schedule(std::move(sequence), demand, std::move(placement), maps, splits,
                                 device_, static_cast<std::byte*>(memory_.data())));
    reserved_offset_ = mover_.schedule->placement.reserved_offset;
    mover_.reserved.begin(budget_ - reserved_offset_);
    copies_.load_pinned(unclocked);
    mover_.open_first();
  } catch (const Error& e) {  // the tables are in between two placements
    fail(ErrorCode::kInternal, "while the sequence changed: {}", e.what());
  }
}

}  // namespace phub::geeps

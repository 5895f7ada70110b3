// Sequences: how they are placed, and which instances of their accesses are open.
#include <algorithm>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_wait.h"

namespace phub::geeps {

void Cache::Impl::begin(bool virtually) {
  if (recorder_) fail(ErrorCode::kInvalid, "the sequence is being recorded already");
  if (!held_.empty()) {
    fail(ErrorCode::kInvalid, "a sequence begins with a buffer of '{}' in use",
         tables_[held_.front().table].spec.name);
  }
  std::vector<TableInfo> infos;
  for (const Table& table : tables_) {
    infos.push_back({table.spec.name, table.row_floats, table.spec.local});
  }
  recorder_.emplace(std::move(infos));
  virtual_ = virtually;
}

void Cache::Impl::finish_sequence() {
  if (!recorder_) {
    fail(ErrorCode::kInvalid, "finish_sequence without begin_virtual or begin_gathering");
  }
  if (!held_.empty()) {
    fail(ErrorCode::kInvalid, "the sequence ends with a buffer of '{}' in use",
         tables_[held_.front().table].spec.name);
  }
  std::vector<bool> inferred(tables_.size(), options_.infer_clocks);
  std::vector<bool> updated(tables_.size());
  for (const Operation& operation : recorder_->sequence().operations) {
    if (operation.call == Call::kTableClock) inferred[operation.table] = false;
    if (operation.call == Call::kUpdate) updated[operation.table] = true;
  }
  if (!virtual_) {
    const Lock lock(mutex_);
    throw_if_failed();
    for (uint32_t table = 0; table < tables_.size(); ++table) {
      if (inferred[table] && updated[table] && !tables_[table].clocked_last) clock(table);
    }
  }
  wait_all();  // where that takes too long, this can be called again
  Sequence sequence = recorder_->finish();
  recorder_.reset();
  virtual_ = false;
  if (options_.infer_clocks) sequence = with_inferred_clocks(sequence);
  install(std::move(sequence));
  inferred_ = std::move(inferred);  // where that failed, the sequence before goes on, with its own
}

Placement Cache::Impl::place_anew(const Sequence& sequence, SequenceDemand& demand) const {
  // What is read with its log has one, updated or not, and is read anew after each update.
  for (size_t i = 0; i < demand.entries.size(); ++i) {
    Entry& entry = demand.demand.entries[i];
    if (tables_[demand.entries[i].table].spec.read_my_writes) entry.log_bytes = entry.bytes;
  }
  for (Access& access : demand.demand.accesses) {
    if (tables_[sequence.lists[access.batch].table].spec.read_my_writes) access.again.reset();
  }
  PlacementOptions options{.budget_bytes = budget_,
                           .reserved_bytes = options_.reserved_bytes,
                           .max_lead = options_.max_lead};
  if (options.reserved_bytes > 0) return place(demand.demand, options);
  for (const KeyList& list : sequence.lists) {
    options.reserved_bytes = std::max<uint64_t>(
        options.reserved_bytes, list.keys.size() * tables_[list.table].row_floats * sizeof(float));
  }
  try {
    return place(demand.demand, options);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::kFull) throw;
  }
  options.reserved_bytes = 0;
  return place(demand.demand, options);
}

// REQUIRES: what was clocked is here.
void Cache::Impl::install(Sequence sequence) {
  Lock lock(mutex_);
  for (Partition& partition : partitions_) partition.waiting.clear();
  wait_here(
      lock, 0,
      [&] {
        return std::none_of(accesses_.begin(), accesses_.end(),
                            [](const AccessState& state) { return state.filling; });
      },
      [] { return "copies that are under way"; });
  for (Partition& partition : partitions_) {
    partition.fetch_stream->synchronize();
    partition.store_stream->synchronize();
  }
  for (const Table& table : tables_) table.refreshed->wait();  // into rows that are pinned so far

  SequenceDemand demand = demand_of(sequence);
  Placement placement = place_anew(sequence, demand);  // nothing has changed so far
  try {
    change_to(std::move(sequence), demand, std::move(placement));
  } catch (const Error& e) {  // of any kind: the tables are neither here nor there
    fail(ErrorCode::kInternal, "while the sequence changed: {}", e.what());
  }
}

// REQUIRES: nothing is under way, and the lock is held.
void Cache::Impl::change_to(Sequence sequence, const SequenceDemand& demand, Placement placement) {
  const std::vector<bool> unclocked = save_dirty();
  Follower follower(sequence);
  schedule_ = make_schedule(std::move(sequence), demand, std::move(placement), maps_, device_,
                            static_cast<std::byte*>(memory_.data()));
  follower_ = std::move(follower);
  reserved_offset_ = schedule_->placement.reserved_offset;
  reserved_ = std::make_unique<Arena>(budget_ - reserved_offset_);

  accesses_ = std::vector<AccessState>(schedule_->accesses.size());
  for (AccessState& state : accesses_) {
    state.ready = device_.make_event();
    state.computed = device_.make_event();
    state.done = device_.make_event();
  }
  entries_ = std::vector<EntryState>(schedule_->entries.size());
  for (uint32_t i = 0; i < tables_.size(); ++i) {
    Table& table = tables_[i];
    table.regular_from = 0;
    if (table.spec.local) continue;
    table.loose_log.assign(table.spec.keys.size(), HostLog::kOld);
    table.loose_rows = false;
    for (uint32_t row = 0; row < table.loose_log.size(); ++row) {
      if (entry_of(i, row) != Schedule::kNoEntry) continue;
      table.loose_rows = true;
      if (unclocked[i]) table.loose_log[row] = HostLog::kUsed;
    }
    // What is read first is wanted first.
    const std::vector<Operation>& operations = schedule_->sequence.operations;
    const auto read = std::find_if(operations.begin(), operations.end(), [&](const Operation& o) {
      return o.call == Call::kRead && o.table == i;
    });
    table.priority = -static_cast<int32_t>(read - operations.begin());
  }
  load_pinned(unclocked);
  opened_ = 0;
  opening_circle_ = 0;
  for (const Opening& opening : schedule_->openings) {
    if (opening.next_iteration == 1) open({opening.access, 0});
  }
}

// `unclocked`: tables whose log holds updates.
void Cache::Impl::load_pinned(const std::vector<bool>& unclocked) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const EntryPlan& entry = schedule_->entries[i];
    const Table& table = tables_[entry.table];
    if (unclocked[entry.table]) entries_[i].host_log = HostLog::kUsed;
    if (!entry.pinned) continue;
    own_rows_->fetch(entry.rows, table.rows, nullptr, entry.runs, table.row_floats);
    if (!unclocked[entry.table] || entry.log == nullptr) continue;
    own_rows_->fetch(entry.log, table.log, nullptr, entry.runs, table.row_floats);
    entries_[i] = {.log_used = true};
  }
  own_stream_->synchronize();
}

// What is newer in device memory goes to the host's. By table: its log holds updates.
std::vector<bool> Cache::Impl::save_dirty() {
  if (work_.in_stream()) work_.stream()->synchronize();
  std::vector<bool> unclocked;
  for (uint32_t table = 0; table < tables_.size(); ++table) {
    std::vector<uint32_t> used_logs;
    if (schedule_) {
      for (const uint32_t entry : schedule_->table_entries[table]) {
        if (entries_[entry].log_used) used_logs.push_back(entry);
      }
    }
    unclocked.push_back(!tables_[table].spec.local && !finish_log(*own_rows_, table, used_logs));
  }
  if (!schedule_) return unclocked;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].dirty) continue;
    const EntryPlan& entry = schedule_->entries[i];
    const Table& table = tables_[entry.table];
    own_rows_->store(entry.rows, table.own_rows.floats().data(), entry.runs, table.row_floats);
    entries_[i].dirty = false;
  }
  own_stream_->synchronize();
  return unclocked;
}

// It may be filled from here on. Updates that are not clocked yet are known when it is asked for.
void Cache::Impl::open(Instance instance) {
  const AccessPlan& access = schedule_->accesses[instance.access];
  const Table& table = tables_[schedule_->lists[access.list].table];
  if (!options_.prefetch || !access.fetch || access.kept_from) return;
  if (!table.spec.read_my_writes) add_waiting(instance);
}

// Phases are counted through the iterations.
void Cache::Impl::open_until(uint64_t phase) {
  const std::vector<Opening>& openings = schedule_->openings;
  while (opening_circle_ * schedule_->phases + openings[opened_].phase <= phase) {
    const Opening& opening = openings[opened_];
    open({opening.access, opening_circle_ + opening.next_iteration});
    if (++opened_ == openings.size()) {
      opened_ = 0;
      ++opening_circle_;
    }
  }
}

void Cache::Impl::add_waiting(Instance instance) {
  const AccessPlan& access = schedule_->accesses[instance.access];
  const ListPlan& list = schedule_->lists[access.list];
  if (access.call == Call::kPreUpdate || list.host.empty()) return;
  Partition& partition = partitions_[tables_[list.table].partition];
  if (std::find(partition.waiting.begin(), partition.waiting.end(), instance) ==
      partition.waiting.end()) {
    partition.waiting.push_back(instance);
  }
  partition.fetch.notify_one();
}

// The application did not ask for it, and will not.
void Cache::Impl::leave_out(Instance instance) {
  const AccessPlan& access = schedule_->accesses[instance.access];
  AccessState& state = accesses_[instance.access];
  Table& table = tables_[schedule_->lists[access.list].table];
  if (access.call == Call::kLocalAccess) mark_irregular(table);
  Partition& partition = partitions_[table.partition];
  std::erase(partition.waiting, instance);
  if (state.released < instance.iteration) {  // one before is still in use
    state.skipped_to = instance.iteration + 1;
    return;
  }
  if (state.filling) {
    state.left_out = true;
    return;
  }
  if (state.filled > instance.iteration) {
    partition.fetch_stream->record(*state.done);
    state.done_recorded = true;
  }
  set_released(instance);
  changed_.notify_all();
}

// Who saves its rows last is not who did so in the sequence, in this iteration and to the next.
void Cache::Impl::mark_irregular(Table& table) {
  if (schedule_) table.regular_from = follower_.next() / follower_.length() + 2;
}

void Cache::Impl::set_released(Instance instance) {
  AccessState& state = accesses_[instance.access];
  state.released = std::max(instance.iteration + 1, state.skipped_to);
  for (Partition& partition : partitions_) {
    if (!partition.waiting.empty()) partition.fetch.notify_one();
  }
}

bool Cache::Impl::waits_are_over(const Instance& instance) const {
  const AccessPlan& access = schedule_->accesses[instance.access];
  return std::all_of(access.waits_for.begin(), access.waits_for.end(), [&](const Dependency& d) {
    return instance.iteration < d.behind ||
           accesses_[d.access].released > instance.iteration - d.behind;
  });
}

std::vector<const Event*> Cache::Impl::events_before(const Instance& instance) const {
  std::vector<const Event*> events;
  for (const Dependency& d : schedule_->accesses[instance.access].waits_for) {
    if (instance.iteration < d.behind) continue;
    const AccessState& before = accesses_[d.access];
    if (before.done_recorded && !before.done->done()) events.push_back(before.done.get());
  }
  return events;
}

// Its buffer still has the rows of the access before, and they are fresh enough. That one is given
// back: else this one would be served outside of the sequence.
bool Cache::Impl::is_kept(const Instance& instance, uint64_t back) const {
  const AccessPlan& access = schedule_->accesses[instance.access];
  if (!access.kept_from) return false;
  const AccessState& before = accesses_[*access.kept_from];
  const Table& table = tables_[schedule_->lists[access.list].table];
  return before.filled == instance.iteration + 1 && before.version + back >= table.clocks;
}

bool Cache::Impl::can_fill(const Instance& instance) const {
  const AccessPlan& access = schedule_->accesses[instance.access];
  const AccessState& state = accesses_[instance.access];
  const Table& table = tables_[schedule_->lists[access.list].table];
  if (state.filling || state.filled > instance.iteration || !waits_are_over(instance)) return false;
  if (access.call == Call::kLocalAccess) {
    return instance.iteration >= table.regular_from || table.jobs == 0;
  }
  if (table.refreshing) return false;
  if (table.spec.read_my_writes && table.jobs > 0) return false;
  const uint64_t step = instance.iteration * follower_.length() + access.step;
  const auto number = schedule_->lists[access.list].table;
  return table.version + state.back >= table.clocks + follower_.clocks_before(number, step);
}

}  // namespace phub::geeps

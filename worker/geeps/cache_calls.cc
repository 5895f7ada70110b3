// The calls that ask for buffers, and TableClock.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_wait.h"

namespace phub::geeps {
namespace {

bool share_a_key(std::span<const uint64_t> a, std::span<const uint64_t> b) {
  if (a.size() > b.size()) std::swap(a, b);
  if (a.size() <= 2) {
    return std::any_of(a.begin(), a.end(),
                       [&](uint64_t key) { return std::find(b.begin(), b.end(), key) != b.end(); });
  }
  const std::unordered_set<uint64_t> keys(a.begin(), a.end());
  return std::any_of(b.begin(), b.end(), [&](uint64_t key) { return keys.contains(key); });
}

}  // namespace

void Cache::Impl::check_table(Call call, uint32_t table) const {
  if (table >= tables_.size()) {
    fail(ErrorCode::kInvalid, "{} of table {}: there are {}", name_of(call), table, tables_.size());
  }
  const bool wants_local = call == Call::kLocalAccess;
  if (tables_[table].spec.local != wants_local) {
    fail(ErrorCode::kInvalid, "{} of '{}', which holds {}", name_of(call), tables_[table].spec.name,
         wants_local ? "parameters" : "local data");
  }
}

void Cache::Impl::check_not_held(uint32_t table, std::span<const uint64_t> keys) const {
  if (tables_[table].held == 0) return;
  for (const Held& held : held_) {
    if (held.table != table || !share_a_key(held.keys, keys)) continue;
    fail(ErrorCode::kInvalid,
         "LocalAccess of rows of '{}' that are in use: give them back with PostLocalAccess first",
         tables_[table].spec.name);
  }
}

uint64_t Cache::Impl::clocks_back(uint32_t table, std::optional<uint32_t> staleness) const {
  if (!staleness) return 0;
  const TableSpec& spec = tables_[table].spec;
  const std::optional<uint32_t> slack = exchange_.slack();
  if (!slack) {
    fail(ErrorCode::kInvalid,
         "a read of '{}' with staleness {}: the job is asynchronous, and "
         "promises none",
         spec.name, *staleness);
  }
  if (*staleness < *slack) {
    fail(ErrorCode::kInvalid,
         "a read of '{}' with staleness {}: the job's slack is {}, others may "
         "lag behind by so much",
         spec.name, *staleness, *slack);
  }
  if (*staleness > std::max(spec.max_staleness, *slack)) {
    fail(ErrorCode::kInvalid, "a read of '{}' with staleness {}: the table's max_staleness is {}",
         spec.name, *staleness, spec.max_staleness);
  }
  return spec.read_my_writes ? 0 : *staleness - *slack;
}

std::optional<uint64_t> Cache::Impl::age_of(uint64_t version) const {
  const std::optional<uint32_t> slack = exchange_.slack();
  if (!slack) return {};
  return version - std::min<uint64_t>(version, *slack);
}

Buffer Cache::Impl::acquire(Call call, uint32_t table, std::span<const uint64_t> keys, bool fetch,
                            std::optional<uint32_t> staleness) {
  check_table(call, table);
  if (keys.empty()) {
    fail(ErrorCode::kInvalid, "{} of no rows of '{}'", name_of(call), tables_[table].spec.name);
  }
  Held held{.call = call, .table = table};
  held.buffer = {.rows = keys.size(), .row_floats = tables_[table].row_floats};
  if (virtual_) {
    resolve(table, keys);
    if (call == Call::kLocalAccess) check_not_held(table, keys);
    held.recorded = call == Call::kRead        ? recorder_->read(table, keys)
                    : call == Call::kPreUpdate ? recorder_->pre_update(table, keys)
                                               : recorder_->local_access(table, keys, fetch);
    held.own_keys.assign(keys.begin(), keys.end());
    return hold(std::move(held));
  }
  const uint64_t back = call == Call::kRead ? clocks_back(table, staleness) : 0;
  Lock lock(mutex_);
  throw_if_failed();
  if (call == Call::kLocalAccess) check_not_held(table, keys);
  ++stats_.calls;
  if (call == Call::kPreUpdate) wait_for_log_handed_over(lock, table);
  const std::optional<Instance> instance = follow(call, table, keys);
  if (const auto step = follower_.last()) {
    const uint32_t access = schedule_->access_of_step[*step % follower_.length()];
    held.last_update = schedule_->accesses[access].last_update;
  }
  if (instance) {
    held.planned = instance;
    held.keys = schedule_->sequence.lists[schedule_->accesses[instance->access].list].keys;
    const Buffer got = acquire_planned(lock, *instance, fetch, back);
    held.buffer.data = got.data;
    held.buffer.age = got.age;
  } else {
    held.own_keys.assign(keys.begin(), keys.end());
    held = acquire_outside(lock, std::move(held), fetch, back);
  }
  if (recorder_) {
    held.recorded = call == Call::kRead        ? recorder_->read(table, keys)
                    : call == Call::kPreUpdate ? recorder_->pre_update(table, keys)
                                               : recorder_->local_access(table, keys, fetch);
  }
  return hold(std::move(held));
}

Buffer Cache::Impl::hold(Held held) {
  held.handle = next_handle_++;
  held.buffer.handle = held.handle;
  if (trace_ && !virtual_) held.since_ns = trace_now_ns();
  ++tables_[held.table].held;
  if (!virtual_) tables_[held.table].clocked_last = false;
  held_.push_back(std::move(held));
  Held& kept = held_.back();
  if (!kept.planned) kept.keys = kept.own_keys;
  return kept.buffer;
}

// Moves the place in the sequence. Nothing: the call is served outside of it.
std::optional<Instance> Cache::Impl::follow(Call call, uint32_t table,
                                            std::span<const uint64_t> keys) {
  if (!schedule_) return {};
  const uint64_t before = follower_.next();
  const std::optional<uint64_t> step = follower_.follow(call, table, keys);
  if (!step) {
    if (options_.strict && !recorder_) {
      fail(ErrorCode::kInvalid, "outside of the sequence: {}",
           follower_.deviation(call, table, keys));
    }
    return {};
  }
  const uint64_t steps = follower_.length();
  const auto instance_of = [&](uint64_t at) {
    return Instance{schedule_->access_of_step[at % steps], at / steps};
  };
  const Instance instance = instance_of(*step);
  open_until(instance.iteration * schedule_->phases + schedule_->accesses[instance.access].phase);
  std::optional<uint64_t> left_out;
  for (uint64_t skipped = before; skipped < *step; ++skipped) {
    if (!is_acquisition(schedule_->sequence.operations[skipped % steps].call)) continue;
    leave_out(instance_of(skipped));
    if (!left_out) left_out = skipped % steps;
  }
  if (left_out && options_.strict && !recorder_) {
    leave_out(instance);
    fail(ErrorCode::kInvalid, "outside of the sequence: step {} was left out", *left_out);
  }
  if (blocked_by_held(instance)) {
    leave_out(instance);
    return {};
  }
  return instance;
}

// The application holds a buffer, longer than was recorded, that must be given back first.
bool Cache::Impl::blocked_by_held(const Instance& instance) const {
  const AccessPlan& access = schedule_->accesses[instance.access];
  return std::any_of(access.waits_for.begin(), access.waits_for.end(), [&](const Dependency& d) {
    return accesses_[d.access].held && instance.iteration >= d.behind &&
           accesses_[d.access].released <= instance.iteration - d.behind;
  });
}

Buffer Cache::Impl::acquire_planned(Lock& lock, Instance instance, bool fetch, uint64_t back) {
  const AccessPlan& access = schedule_->accesses[instance.access];
  AccessState& state = accesses_[instance.access];
  const ListPlan& list = schedule_->lists[access.list];
  Table& table = tables_[list.table];
  const bool reads = access.call == Call::kRead;
  Buffer buffer{.data = access.data};
  state.held = true;
  try {
    const auto fresh = [&] {
      return !reads || (table.version + back >= table.clocks && !table.refreshing);
    };
    const bool fetched = !list.host.empty() &&
                         (reads || (access.call == Call::kLocalAccess && (fetch || access.fetch)));
    if (fetched && is_kept(instance, back)) {
      state.filled = instance.iteration + 1;
      state.version = accesses_[*access.kept_from].version;
      buffer.age = age_of(state.version);
      ++stats_.prefetched;
      wait_for_memory(lock, instance, list.table);
    } else if (fetched) {
      state.back = back;
      const auto is_filled = [&] {
        if (state.filled <= instance.iteration) return false;
        if (reads ? state.version + back >= table.clocks : state.changes == table.changes) {
          return true;
        }
        state.filled = instance.iteration;  // of an older state: again
        return false;
      };
      const auto filled_or_asked = [&] {
        if (is_filled()) return true;
        if (!state.filling) add_waiting(instance);
        return false;
      };
      if (state.filled > instance.iteration) ++stats_.prefetched;
      if (!filled_or_asked()) {
        wait_here(lock, list.table, filled_or_asked, [&] { return describe_read(table, back); });
      }
      buffer.age = age_of(state.version);
      lock.unlock();
      wait_for(*state.ready, list.table);
      lock.lock();
    } else if (!access.in_place) {
      if (!waits_are_over(instance)) {
        wait_here(
            lock, list.table, [&] { return waits_are_over(instance); },
            [&] { return fmt::format("memory for '{}'", table.spec.name); });
      }
      wait_for_memory(lock, instance, list.table);
    }
    if (access.in_place || list.pinned.empty() || access.call == Call::kPreUpdate ||
        (access.call == Call::kLocalAccess && !fetch)) {
      return buffer;
    }
    if (!fresh()) {
      wait_here(lock, list.table, fresh, [&] { return describe_read(table, back); });
    }
    if (reads && !fetched) buffer.age = age_of(table.version);
    const bool refreshed = std::exchange(table.refreshed_unseen, false);
    const Reading reading(*this, lock, table);
    if (refreshed) wait_for(*table.refreshed, list.table);
    read_pinned(list, access.data);
    if (table.kept_twice) work_.record(*table.gathered);
    return buffer;
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    state.held = false;
    leave_out(instance);
    throw;
  }
}

// What is enqueued for the memory of its buffer comes before it.
void Cache::Impl::wait_for_memory(Lock& lock, Instance instance, uint32_t table) {
  const std::vector<const Event*> events = events_before(instance);
  if (events.empty()) return;
  lock.unlock();
  for (const Event* event : events) wait_for(*event, table);
  lock.lock();
}

void Cache::Impl::read_pinned(const ListPlan& list, float* buffer) {
  const Table& table = tables_[list.table];
  const size_t row_floats = table.row_floats;
  const Rows rows{buffer, list.rows, row_floats};
  for (const PinnedPart& part : list.pinned) {
    const EntryPlan& entry = schedule_->entries[part.entry];
    if (part.index) {
      work_.scatter(entry.rows, *part.index, rows);
    } else {
      work_.copy(buffer + part.first * row_floats, entry.rows, entry.count * row_floats);
    }
    if (!table.spec.read_my_writes || !entries_[part.entry].log_used) continue;
    for (const Run& run : part.runs) {
      work_.add(buffer + run.first * row_floats, entry.log + run.source * row_floats,
                run.rows * row_floats, -1);
    }
  }
}

void Cache::Impl::table_clock(uint32_t number) {
  if (number >= tables_.size()) {
    fail(ErrorCode::kInvalid, "TableClock of table {}: there are {}", number, tables_.size());
  }
  Table& table = tables_[number];
  if (table.spec.local) {
    fail(ErrorCode::kInvalid, "TableClock of '{}', which holds local data", table.spec.name);
  }
  if (virtual_) return recorder_->table_clock(number);
  Lock lock(mutex_);
  throw_if_failed();
  if (table.clocked_last) {
    fail(ErrorCode::kInvalid, "TableClock of '{}' twice, with no other call for it in between",
         table.spec.name);
  }
  if (recorder_) recorder_->table_clock(number);
  ++stats_.calls;
  clock(number);
}

// REQUIRES: the lock is held.
void Cache::Impl::clock(uint32_t number) {
  Table& table = tables_[number];
  table.clocked_last = true;
  Job job{.kind = Job::Kind::kClock, .table = number};
  if (schedule_) {
    for (const uint32_t entry : schedule_->table_entries[number]) {
      if (std::exchange(entries_[entry].log_used, false)) job.used_logs.push_back(entry);
    }
    follower_.clock(number);
  }
  work_.record(*table.clocked);  // after it nothing reads the rows of this clock
  ++table.clocks;
  ++table.jobs;
  Partition& partition = partitions_[table.partition];
  partition.jobs.push_back(std::move(job));
  partition.reclaim.notify_one();
}

}  // namespace phub::geeps

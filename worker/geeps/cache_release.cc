// The calls that release buffers, and TableClock.
#include <algorithm>
#include <limits>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_impl.h"

namespace phub::geeps {
namespace {

void check_factors(const Device& device, const Table& table, std::span<const FactorPairs> factors) {
  const TableSpec& spec = table.spec;
  uint64_t pairs = 0;
  for (const FactorPairs& part : factors) pairs += part.pairs;
  if (pairs > spec.samples) {
    fail(ErrorCode::kInvalid, "TableClock of '{}' with {} pairs of factors: its samples are {}",
         spec.name, pairs, spec.samples);
  }
  const auto check = [&](const float* memory, uint64_t floats, const char* side) {
    if (device.holds(memory, floats * sizeof(float))) return;
    fail(ErrorCode::kInvalid,
         "TableClock of '{}': {} floats of the {} factors are not inside memory of {}", spec.name,
         floats, side, device.name());
  };
  for (const FactorPairs& part : factors) {
    if (part.pairs == 0) continue;
    check(part.left, part.pairs * spec.keys.size(), "left");
    check(part.right, uint64_t{part.pairs} * spec.row_floats, "right");
  }
}

// In the application's order. Returns where they will be in host memory. The latest that were
// copied have been pushed: since then the table was read, which waited for their result.
std::vector<FactorPairs> copy_factors(DeviceWork& work, const Table& table,
                                      std::span<const FactorPairs> factors) {
  std::vector<FactorPairs> in_host;
  size_t at = 0;
  const auto copy = [&](const float* from, size_t floats) {
    work.copy(table.factors.floats() + at, from, floats);
    return table.pieces.front().log + std::exchange(at, at + floats);
  };
  for (const FactorPairs& part : factors) {
    if (part.pairs == 0) continue;
    const float* const left = copy(part.left, part.pairs * table.spec.keys.size());
    const float* const right = copy(part.right, size_t{part.pairs} * table.row_floats);
    in_host.push_back({left, right, part.pairs});
  }
  return in_host;
}

}  // namespace

void Cache::Impl::release(Call call, uint64_t handle, bool use) {
  const bool discards = !use && call == Call::kUpdate;  // any buffer
  const Held& found = held_.find(call, handle, discards);
  const bool is_virtual = virtual_ || found.buffer.data == nullptr;
  if (use && found.call == Call::kPreUpdate && !is_virtual) {
    // A log in device memory must not be written while it is copied for the last clock.
    Lock lock(waits_);
    mover_.failure.check();
    if (found.outside || !list_of(found).pinned.empty()) waits_.for_log(lock, found.table);
  }
  if (recorder_ && found.recorded) {
    const bool saves = use || found.call != Call::kLocalAccess;
    recorder_->release(release_of(found.call), *found.recorded, saves);
  }
  // While recording, finish_sequence() clocks the table.
  const bool clocks = use && found.last_update && inferred_[found.table] && !recorder_;
  if (clocks) check_may_clock(table_of(found));
  Held held = held_.take(found);
  const uint32_t table = held.table;
  if (is_virtual) return;
  if (mover_.trace) {
    const auto add = [trace = mover_.trace.get(), since = held.since_ns, table,
                      clock = table_of(held).clocks] {
      trace->add(CacheTrack::kCompute, "in use", table, clock, since);
    };
    work_.in_stream() ? work_.stream()->call(add) : add();
  }
  Lock lock(waits_);
  mover_.failure.check();
  ++mover_.stats.calls;
  table_of(held).clocked_last = false;
  if (use && call == Call::kUpdate) table_of(held).unclocked = true;
  give_back(lock, std::move(held), use);
  lock.unlock();
  if (clocks) table_clock(table, {});
}

// Updates or saves pinned rows at once; the store lane does the rest.
void Cache::Impl::give_back(Lock& lock, Held held, bool use) {
  Table& table = table_of(held);
  const ListPlan& list = list_of(held);
  PlannedAccess* const access = held.planned ? &access_of(*held.planned) : nullptr;
  float* const buffer = held.buffer.data;
  const bool in_place = access != nullptr && access->in_place;
  const bool saves = use && held.call == Call::kLocalAccess;
  const bool updates = use && held.call == Call::kPreUpdate;
  if (saves && (access == nullptr || !access->save)) mover_.mark_irregular(table);
  const std::span<PlacedEntry> entries =
      mover_.schedule ? std::span(mover_.schedule->entries) : std::span<PlacedEntry>();
  if (saves && in_place) entries[list.pinned.front().entry].dirty = true;
  const bool background = access == nullptr || ((updates || saves) && !list.host.empty());
  Event& computed = access == nullptr ? *held.outside->computed : *access->computed;
  lock.unlock();
  if (updates) work_.update_pinned(list, entries, table.row_floats, buffer);
  if (saves && !in_place) work_.save_pinned(list, entries, table.row_floats, buffer);
  if (background) {
    work_.record(computed);
  } else if (!in_place) {
    if (options_.poison && !access->kept_on) {
      work_.fill(buffer, std::numeric_limits<float>::quiet_NaN(), held.buffer.floats());
    }
    work_.record(*access->done.front());
  }
  lock.lock();
  // With its job below: a fill that begins before that reads what is older, and is done again.
  const bool irregular =
      saves && (access == nullptr || held.planned->iteration < table.regular_from);
  if (irregular) ++table.changes;
  if (access != nullptr) access->held = false;
  if (!background) {
    access->done_recorded = work_.in_stream();
    return mover_.release(*held.planned);
  }
  Task task{.kind = updates ? Task::Kind::kUpdate
                    : saves ? Task::Kind::kSave
                            : Task::Kind::kFree,
            .table = held.table,
            .planned = held.planned,
            .outside = std::move(held.outside),
            .list = &list,
            .buffer = buffer,
            .after_fills = irregular,
            .clocks_before = table.clocks};
  if (work_.in_stream()) task.after.push_back(&computed);
  mover_.post(std::move(task));
}

void Cache::Impl::table_clock(uint32_t number, std::span<const FactorPairs> factors) {
  if (number >= mover_.tables.size()) {
    fail(ErrorCode::kInvalid, "TableClock of table {}: there are {}", number, mover_.tables.size());
  }
  const Table& table = mover_.tables[number];
  if (table.spec.local) {
    fail(ErrorCode::kInvalid, "TableClock of '{}', which holds local data", table.spec.name);
  }
  if (virtual_) return recorder_->table_clock(number);
  check_factors(device_, table, factors);
  Lock lock(waits_);
  mover_.failure.check();
  if (table.clocked_last) {
    fail(ErrorCode::kInvalid, "TableClock of '{}' twice, with no other call for it in between",
         table.spec.name);
  }
  check_may_clock(table);
  if (recorder_) recorder_->table_clock(number);
  ++mover_.stats.calls;
  std::vector<FactorPairs> in_host;
  if (!factors.empty()) {
    lock.unlock();
    in_host = copy_factors(work_, table, factors);
    lock.lock();
  }
  clock(number, std::move(in_host));
}

// REQUIRES: the lock is held.
void Cache::Impl::clock(uint32_t number, std::vector<FactorPairs> factors) {
  Table& table = mover_.tables[number];
  table.clocked_last = true;
  const bool updated = std::exchange(table.unclocked, false) || !factors.empty();
  Task task{.kind = Task::Kind::kClock,
            .table = number,
            .clocks_before = table.clocks,
            .factors = std::move(factors),
            .null = !updated};
  if (mover_.schedule) {
    for (const uint32_t entry : mover_.schedule->table_entries[number]) {
      if (std::exchange(mover_.schedule->entries[entry].log_used, false)) {
        task.used_logs.push_back(entry);
      }
    }
    mover_.follower.clock(number);
  }
  work_.record(*table.clocked);  // work after it does not read the rows of this clock
  if (work_.in_stream()) task.after.push_back(table.clocked.get());
  ++table.clocks;
  mover_.post(std::move(task));
}

}  // namespace phub::geeps

// The calls that acquire buffers.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_impl.h"

namespace phub::geeps {
namespace {

void check_table(const std::vector<Table>& tables, Call call, uint32_t table) {
  if (table >= tables.size()) {
    fail(ErrorCode::kInvalid, "{} of table {}: there are {}", name_of(call), table, tables.size());
  }
  const bool wants_local = call == Call::kLocalAccess;
  if (tables[table].spec.local != wants_local) {
    fail(ErrorCode::kInvalid, "{} of '{}', which holds {}", name_of(call), tables[table].spec.name,
         wants_local ? "parameters" : "local data");
  }
  if (call == Call::kPreUpdate && tables[table].spec.samples > 0) {
    fail(ErrorCode::kInvalid, "PreUpdate of '{}', whose factors are sent: TableClock takes them",
         tables[table].spec.name);
  }
}

// How many clocks older than the application's a read may be.
uint64_t clocks_back(const TableSpec& spec, const Exchange& exchange,
                     std::optional<uint32_t> staleness) {
  if (!staleness) return 0;
  const std::optional<uint32_t> slack = exchange.slack();
  if (!slack) {
    fail(ErrorCode::kInvalid,
         "a read of '{}' with staleness {}: the job is asynchronous and bounds none", spec.name,
         *staleness);
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

std::vector<uint32_t> rows_of(const Table& table, std::span<const uint64_t> keys) {
  std::vector<uint32_t> rows;
  std::unordered_set<uint64_t> seen;
  for (const uint64_t key : keys) {
    const std::optional<uint32_t> row = table.map.find(key);
    if (!row) fail(ErrorCode::kInvalid, "'{}' has no row {}", table.spec.name, key);
    if (!seen.insert(key).second) {
      fail(ErrorCode::kInvalid, "row {} of '{}' twice in one list", key, table.spec.name);
    }
    rows.push_back(*row);
  }
  return rows;
}

}  // namespace

std::optional<uint64_t> Cache::Impl::age_of(uint64_t version) const {
  const std::optional<uint32_t> slack = mover_.exchange.slack();
  if (!slack) return {};
  return version - std::min<uint64_t>(version, *slack);
}

Buffer Cache::Impl::acquire(Call call, uint32_t table, std::span<const uint64_t> keys, bool fetch,
                            std::optional<uint32_t> staleness) {
  check_table(mover_.tables, call, table);
  if (keys.empty()) {
    fail(ErrorCode::kInvalid, "{} of no rows of '{}'", name_of(call),
         mover_.tables[table].spec.name);
  }
  Held held{.call = call, .table = table};
  held.buffer = {.rows = keys.size(), .row_floats = mover_.tables[table].row_floats};
  const auto record = [&] {
    if (recorder_) held.recorded = recorder_->acquire(call, table, keys, fetch);
  };
  if (virtual_) {
    rows_of(mover_.tables[table], keys);
    if (call == Call::kLocalAccess) held_.check_not_held(table, keys);
    held.own_keys.assign(keys.begin(), keys.end());
    record();
    return hold(std::move(held));
  }
  const uint64_t back =
      call == Call::kRead ? clocks_back(mover_.tables[table].spec, mover_.exchange, staleness) : 0;
  Lock lock(waits_);
  mover_.failure.check();
  if (call == Call::kLocalAccess) held_.check_not_held(table, keys);
  ++mover_.stats.calls;
  if (call == Call::kPreUpdate) waits_.for_log(lock, table);
  held.planned = follow(call, table, keys);
  if (const auto step = mover_.follower.last()) {
    const Schedule& schedule = *mover_.schedule;
    const uint32_t access = schedule.access_of_step[*step % mover_.follower.length()];
    held.last_update = schedule.accesses[access].last_update;
  }
  if (held.planned) {
    held.keys = mover_.schedule->sequence.lists[access_of(*held.planned).list].keys;
    acquire_planned(lock, held, fetch, back);
  } else {
    held.own_keys.assign(keys.begin(), keys.end());
    acquire_outside(lock, held, fetch, back);
  }
  record();
  return hold(std::move(held));
}

Buffer Cache::Impl::hold(Held held) {
  if (mover_.trace && !virtual_) held.since_ns = trace_now_ns();
  if (!virtual_) table_of(held).clocked_last = false;
  return held_.add(std::move(held));
}

// Advances in the sequence. Nothing: the call is outside of it.
std::optional<Instance> Cache::Impl::follow(Call call, uint32_t table,
                                            std::span<const uint64_t> keys) {
  if (!mover_.schedule) return {};
  const Schedule& schedule = *mover_.schedule;
  const uint64_t before = mover_.follower.next();
  const std::optional<uint64_t> step = mover_.follower.follow(call, table, keys);
  if (!step) {
    if (options_.strict && !recorder_) {
      fail(ErrorCode::kInvalid, "outside of the sequence: {}",
           mover_.follower.deviation(call, table, keys));
    }
    return {};
  }
  const uint64_t steps = mover_.follower.length();
  const auto instance_of = [&](uint64_t at) {
    return Instance{schedule.access_of_step[at % steps], at / steps};
  };
  const Instance instance = instance_of(*step);
  mover_.open_until(instance.iteration * schedule.phases + access_of(instance).phase);
  std::optional<uint64_t> left_out;
  for (uint64_t skipped = before; skipped < *step; ++skipped) {
    if (!is_acquisition(schedule.sequence.operations[skipped % steps].call)) continue;
    mover_.leave_out(instance_of(skipped));
    if (!left_out) left_out = skipped % steps;
  }
  if (left_out && options_.strict && !recorder_) {
    mover_.leave_out(instance);
    fail(ErrorCode::kInvalid, "outside of the sequence: step {} was left out", *left_out);
  }
  if (blocked_by_held(instance)) {
    mover_.leave_out(instance);
    return {};
  }
  return instance;
}

// Whether the instance needs memory of a buffer that the application holds longer than recorded.
bool Cache::Impl::blocked_by_held(const Instance& instance) const {
  const std::vector<PlannedAccess>& accesses = mover_.schedule->accesses;
  return std::ranges::any_of(accesses[instance.access].waits_for, [&](const Dependency& d) {
    return accesses[d.access].held && instance.iteration >= d.behind &&
           accesses[d.access].released <= instance.iteration - d.behind;
  });
}

void Cache::Impl::acquire_planned(Lock& lock, Held& held, bool fetch, uint64_t back) {
  const Instance instance = *held.planned;
  PlannedAccess& access = access_of(instance);
  const ListPlan& list = list_of(held);
  const bool reads = access.call == Call::kRead;
  held.buffer.data = access.data;
  access.held = true;
  try {
    const bool local = access.call == Call::kLocalAccess;
    if (!list.host.empty() && (reads || (local && (fetch || access.fetch)))) {
      fetch_planned(lock, held, back);
    } else if (!access.in_place) {
      waits_.until(
          lock, held.table, [&] { return mover_.conditions.memory_is_free(instance); },
          [&] { return fmt::format("memory for '{}'", table_of(held).spec.name); });
      waits_.for_memory(lock, instance, held.table);
    }
    if (reads || (local && fetch && !access.in_place)) read_pinned(lock, held, list, back);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    access.held = false;
    mover_.leave_out(instance);
    throw;
  }
}

// Waits until the fetch lane has fetched the rows from host memory.
void Cache::Impl::fetch_planned(Lock& lock, Held& held, uint64_t back) {
  const Instance instance = *held.planned;
  PlannedAccess& access = access_of(instance);
  const Table& table = table_of(held);
  if (mover_.conditions.is_kept(instance, back)) {
    access.filled = instance.iteration + 1;
    access.version = access_of({*access.kept_from, instance.iteration}).version;
    held.buffer.age = age_of(access.version);
    ++mover_.stats.prefetched;
    return waits_.for_memory(lock, instance, held.table);
  }
  if (std::exchange(access.back, back) != back && access.filling) mover_.cancel_fill(instance);
  // Those that waited for a clock which the application has left out may begin.
  mover_.lanes.make_due(Lane::Kind::kFetch);
  const auto filled_or_asked = [&] {
    if (access.filled > instance.iteration) {
      const bool fresh = access.call == Call::kRead ? access.version + back >= table.clocks
                                                    : access.changes == table.changes;
      if (fresh) return true;
      access.filled = instance.iteration;  // filled with older rows: fetch again
    }
    if (!access.filling) mover_.add_waiting(instance);
    return false;
  };
  if (access.filled > instance.iteration) ++mover_.stats.prefetched;
  waits_.for_rows(lock, held.table, back, filled_or_asked);
  if (access.call == Call::kRead) held.buffer.age = age_of(access.version);
  lock.unlock();
  for (const auto& ready : access.ready) waits_.for_event(*ready, held.table);
  lock.lock();
}

void Cache::Impl::acquire_outside(Lock& lock, Held& held, bool fetch, uint64_t back) {
  Table& table = table_of(held);
  const bool reads = held.call == Call::kRead;
  held.outside = std::make_shared<Outside>(Outside{
      .list = plan_list(mover_.schedule ? &*mover_.schedule : nullptr, held.table, table.split,
                        rows_of(table, held.own_keys), held.call == Call::kPreUpdate),
      .computed = device_.make_event()});
  ++mover_.stats.outside_sequence;
  reserve(lock, held);
  if (!reads && (held.call == Call::kPreUpdate || !fetch)) return;
  try {
    const ListPlan& list = held.outside->list;
    if (!list.host.empty()) {
      waits_.for_rows(lock, held.table, back,
                      [&] { return mover_.conditions.rows_are_ready(table, back); });
      if (reads) held.buffer.age = age_of(table.version);
      Task task = mover_.fill_task(*held.outside, held.buffer.data);
      const Reading reading(mover_, lock, table);
      copies_.run(task);
    }
    read_pinned(lock, held, list, back);
  } catch (...) {
    copies_.await();  // copies into the buffer may be in progress
    give_back(lock, std::move(held), false);
    throw;
  }
}

// Allocates memory for a buffer outside the sequence.
void Cache::Impl::reserve(Lock& lock, Held& held) {
  const size_t bytes = held.buffer.floats() * sizeof(float);
  const std::string& name = table_of(held).spec.name;
  const std::optional<size_t> offset = mover_.reserved.arena().allocate(bytes);
  if (!offset) {
    fail(ErrorCode::kFull,
         "{} bytes for rows of '{}' outside of the sequence: of the {} bytes of reserved memory, "
         "{} are in use. Raise reserved_bytes, or record these calls",
         bytes, name, mover_.reserved.arena().size(), mover_.reserved.arena().used());
  }
  try {
    waits_.until(
        lock, held.table, [&] { return mover_.reserved.is_free(*offset, bytes); },
        [&] { return fmt::format("{} bytes of reserved memory for '{}'", bytes, name); });
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    mover_.reserved.arena().release(*offset);
    throw;
  }
  held.outside->offset = *offset;
  held.buffer.data = reinterpret_cast<float*>(static_cast<std::byte*>(memory_.data()) +
                                              reserved_offset_ + *offset);
}

// Copies the pinned rows, in the application's order.
void Cache::Impl::read_pinned(Lock& lock, Held& held, const ListPlan& list, uint64_t back) {
  if (list.pinned.empty()) return;
  Table& table = table_of(held);
  if (held.call == Call::kRead) {
    waits_.for_rows(lock, held.table, back,
                    [&] { return table.version + back >= table.clocks && !table.is_refreshing(); });
    // Fetched rows may be newer: each waited for its own piece.
    const std::optional<uint64_t> age = age_of(table.version);
    held.buffer.age = list.host.empty() ? age : std::min(held.buffer.age, age);
  }
  const std::optional<uint32_t> refreshed = std::exchange(table.refreshed_last, std::nullopt);
  const Reading reading(mover_, lock, table);
  if (refreshed) waits_.for_event(*table.pieces[*refreshed].refreshed, held.table);
  work_.read_pinned(list, mover_.schedule->entries, table.row_floats, table.spec.read_my_writes,
                    held.buffer.data);
  if (table.kept_twice) work_.record(*table.gathered);
}

}  // namespace phub::geeps

// The tasks of the lanes: when each may begin, its work, and its consequences.
#include "worker/geeps/mover.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

namespace phub::geeps {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// Splits the rows of no entry into those with updates of this clock, and those without.
struct ByUse {
  std::vector<Run> used, unused;
};
ByUse by_use(const Table& table, std::span<const Run> runs) {
  ByUse result;
  for (const Run& run : runs) {
    const auto used = [&](uint32_t i) { return table.loose_log[run.source + i] == HostLog::kUsed; };
    for (uint32_t i = 0; i < run.rows;) {
      const uint32_t begin = i;
      while (++i < run.rows && used(i) == used(begin)) {
      }
      (used(begin) ? result.used : result.unused)
          .push_back({run.first + begin, run.source + begin, i - begin});
    }
  }
  return result;
}

// Whether the task is to move these rows.
bool is_of(const Task& task, const HostPart& part) {
  return !task.partition || *task.partition == part.partition;
}

void clear(const Table& table, std::span<const Run> runs) {
  const size_t row_floats = table.row_floats;
  for (const Run& run : runs) {
    std::fill_n(table.log + run.source * row_floats, run.rows * row_floats, 0.0F);
  }
}

}  // namespace

Task Mover::fill_task(const Outside& outside, float* buffer) {
  const Table& table = tables[outside.list.table];
  Task task{.kind = Task::Kind::kFill,
            .table = outside.list.table,
            .clock = table.clocks,
            .list = &outside.list,
            .buffer = buffer};
  if (table.spec.local) {
    for (const Table::Part& part : table.parts) task.after.push_back(part.saved.get());
  }
  return task;
}

std::optional<Task> Mover::begin(Lane& lane) {
  std::optional<Task> task;
  if (failed()) return task;
  if (lane.kind == Lane::Kind::kFetch && lane.tasks.empty()) {
    const auto found = std::ranges::find_if(waiting, [&](const Instance& instance) {
      return has_rows(lane, instance) && can_fill(instance);
    });
    if (found != waiting.end()) {
      const Instance next = *found;
      waiting.erase(found);
      begin_fill(next);
    }
  }
  auto next = lane.tasks.begin();
  if (lane.kind == Lane::Kind::kPush) {  // one table does not wait for another's result
    next = std::ranges::find_if(lane.tasks, [this](const Task& each) { return can_begin(each); });
  }
  if (next == lane.tasks.end() || !can_begin(*next)) {
    lane.due = false;
    return task;
  }
  task = std::move(*next);
  lane.tasks.erase(next);
  task->clock = tables[task->table].clocks;
  return task;
}

bool Mover::has_rows(const Lane& lane, const Instance& instance) const {
  const ListPlan& list = schedule->lists[schedule->accesses[instance.access].list];
  return std::ranges::find(list.partitions, lane.partition) != list.partitions.end();
}

void Mover::begin_fill(Instance instance) {
  PlannedAccess& access = schedule->accesses[instance.access];
  const ListPlan& list = schedule->lists[access.list];
  Table& table = tables[list.table];
  access.filling = true;
  access.version = table.version;
  access.changes = table.changes;
  begin_reading(table);
  divide({.kind = Task::Kind::kFill,
          .table = list.table,
          .planned = instance,
          .list = &list,
          .buffer = access.data,
          .after = events_before(instance),
          .after_saves = table.spec.local && instance.iteration < table.regular_from},
         Lane::Kind::kFetch, list.partitions);
}

bool Mover::can_begin(const Task& task) const {
  const Table& table = tables[task.table];
  const bool result_is_here = table.version == table.handed_over;
  switch (task.kind) {
    case Task::Kind::kUpdate:
    case Task::Kind::kClock:
      // The log must not be written before the last clock's was pushed; if it is the exchange's
      // memory, not before that result is here.
      return table.handed_over == task.clocks_before && (table.kept_twice || result_is_here);
    case Task::Kind::kSave:
      return !task.after_fills || table.moving == 0;
    case Task::Kind::kPush:
      return result_is_here && table.moving == 0;
    case Task::Kind::kPull:
      return !table.kept_twice || table.moving == 0;
    default:
      return true;
  }
}

void Mover::run(Lane& lane, Task& task) {
  const uint64_t staged = lane.rows ? lane.rows->staged_bytes() : 0;
  switch (task.kind) {
    case Task::Kind::kFill:
      fill(lane, task);
      break;
    case Task::Kind::kPush:
      push(task);
      break;
    case Task::Kind::kPull:
      pull(lane, task);
      break;
    default:
      store(lane, task);
  }
  if (lane.rows) task.staged = lane.rows->staged_bytes() - staged;
}

bool Mover::finish(Task& task) {
  Table& table = tables[task.table];
  stats.bytes_staged += task.staged;
  switch (task.kind) {
    case Task::Kind::kPush:
      if (task.handed_over) return false;
      task.handed_over = true;
      task.clock = ++table.handed_over;
      ++stats.pushes;
      if (trace) table.pushed_ns = trace_now_ns();
      make_due(Lane::Kind::kStore);
      return true;
    case Task::Kind::kPull:
      stats.bytes_to_device += task.bytes;
      table.refreshing = false;
      table.refreshed_unseen = task.refreshed;
      ++table.version;
      ++stats.pulls;
      for (const auto kind : {Lane::Kind::kPush, Lane::Kind::kStore, Lane::Kind::kFetch}) {
        make_due(kind);
      }
      return false;
    default:
      break;
  }
  const bool fills = task.kind == Task::Kind::kFill;
  if (!task.poisons) {
    (fills ? stats.bytes_to_device : stats.bytes_to_host) += task.bytes;
    if (--task.parts->left > 0) return false;
    task.poisons = options.poison && !fills && task.kind != Task::Kind::kClock;
    if (task.poisons) return true;
  }
  finish_last(task);
  return false;
}

void Mover::finish_last(Task& task) {
  Table& table = tables[task.table];
  if (task.kind == Task::Kind::kFill) {
    end_reading(table);
    PlannedAccess& access = schedule->accesses[task.planned->access];
    access.filling = false;
    access.filled = task.planned->iteration + 1;
    if (std::exchange(access.left_out, false)) leave_out(*task.planned);
    return;
  }
  --table.jobs;
  make_due(Lane::Kind::kFetch);
  if (task.kind == Task::Kind::kClock) {
    Lane& push = push_lane(table);
    push.tasks.push_back({.kind = Task::Kind::kPush,
                          .table = task.table,
                          .factors = std::move(task.factors),
                          .null = task.null});
    push.due = true;
  } else if (task.planned) {
    schedule->accesses[task.planned->access].done_recorded = true;
    release(*task.planned);
  } else {
    releasing.erase(task.outside->offset);
  }
}

void Mover::fill(Lane& lane, Task& task) {
  Table& table = tables[task.table];
  const bool own = table.spec.read_my_writes;  // subtract the updates that are in the log
  for (const Event* event : task.after) lane.stream->wait(*event);
  if (task.after_saves) lane.stream->wait(*table.parts[lane.partition].saved);
  traced(*lane.stream, CacheTrack::kToDevice, "fetch", task, [&] {
    for (const HostPart& part : task.list->host) {
      if (!is_of(task, part)) continue;
      const Table::Part& events = table.parts[part.partition];
      if (own) events.logged->wait();
      // Staged rows are read here, by this thread; the others by the stream.
      if (table.spec.local && HostRows::staged(part.runs, table.row_floats)) events.saved->wait();
      const auto fetch = [&](std::span<const Run> runs, bool with_log) {
        if (runs.empty()) return;
        lane.rows->fetch(task.buffer, table.rows, with_log ? table.log : nullptr, runs,
                         table.row_floats);
      };
      if (own && part.entry == kNoEntry) {
        const ByUse loose = by_use(table, part.runs);
        fetch(loose.used, true);
        fetch(loose.unused, false);
      } else {
        fetch(part.runs, own && schedule->entries[part.entry].parts[part.partition].host_log ==
                                    HostLog::kUsed);
      }
      task.bytes += uint64_t{part.rows} * table.row_floats * sizeof(float);
    }
  });
  if (task.done == nullptr) return lane.stream->synchronize();
  lane.stream->record(*task.done);
  lane.stream->record(*table.parts[lane.partition].fetched);
}

void Mover::store(Lane& lane, Task& task) {
  Table& table = tables[task.table];
  Stream& stream = *lane.stream;
  if (task.poisons) return poison(stream, task);
  for (const Event* event : task.after) stream.wait(*event);
  if (task.after_fills) stream.wait(*table.parts[lane.partition].fetched);
  if (task.kind == Task::Kind::kClock) return store_clock(lane, task);
  if (task.kind != Task::Kind::kFree) {
    const bool updates = task.kind == Task::Kind::kUpdate;
    traced(stream, CacheTrack::kToHost, updates ? "update" : "save", task, [&] {
      for (const HostPart& part : task.list->host) {
        if (!is_of(task, part)) continue;
        task.bytes += uint64_t{part.rows} * table.row_floats * sizeof(float);
        const StoredBuffer buffer{task.buffer, part.stretch, task.parts->staged};
        if (updates) {
          log(*lane.rows, table, part, buffer);
        } else {
          table.keep_rows(part.runs);
          lane.rows->store(buffer, table.own_rows.floats().data(), part.runs, table.row_floats);
        }
      }
      const Table::Part& events = table.parts[lane.partition];
      stream.record(updates ? *events.logged : *events.saved);
    });
  }
  end_release(stream, task);
}

void Mover::end_release(Stream& stream, const Task& task) {
  if (task.done != nullptr) {
    stream.record(*task.done);
  } else {
    stream.synchronize();
  }
}

void Mover::store_clock(Lane& lane, Task& task) {
  Table& table = tables[task.table];
  Stream& stream = *lane.stream;
  if (table.spec.samples > 0) {
    // The vectors are one range in memory, of which each part has an equal share.
    uint64_t floats = 0;
    for (const FactorPairs& pairs : task.factors) {
      floats += pairs.pairs * (table.spec.keys.size() + table.row_floats);
    }
    const auto found = std::ranges::find(table.partitions, lane.partition);
    const auto part = static_cast<uint64_t>(found - table.partitions.begin());
    const uint64_t begin = floats * part / table.partitions.size();
    const uint64_t end = floats * (part + 1) / table.partitions.size();
    task.bytes = (end - begin) * sizeof(float);
    traced(stream, CacheTrack::kToHost, "factors", task, [&] {
      stream.copy_to_host(table.log + begin, table.factors.floats() + begin, task.bytes);
    });
  } else if (!task.null) {
    const uint64_t moved = lane.rows->moved_bytes();
    traced(stream, CacheTrack::kToHost, "log", task, [&] {
      complete_log(*lane.rows, task.table, lane.partition, task.used_logs, task.parts->staged);
    });
    task.bytes = lane.rows->moved_bytes() - moved;
  }
  stream.record(*table.parts[lane.partition].logged);
}

// A part may copy what lies between its rows, too: the buffer is poisoned behind all of them.
void Mover::poison(Stream& stream, const Task& task) {
  if (task.planned) {
    const PlannedAccess& access = schedule->accesses[task.planned->access];
    for (const uint32_t i : task.list->partitions) stream.wait(*access.done[i]);
  }
  stream.fill(task.buffer, kPoison, size_t{task.list->rows} * tables[task.table].row_floats);
  end_release(stream, task);
}

// The first update of a clock is copied, since 0 + -0 is not -0. If it has only some rows of an
// entry, the other rows become zero.
void Mover::log(HostRows& rows, Table& table, const HostPart& part, const StoredBuffer& buffer) {
  if (part.entry == kNoEntry) {
    const ByUse loose = by_use(table, part.runs);
    rows.store_add(buffer, table.log, loose.used, table.row_floats);
    rows.store(buffer, table.log, loose.unused, table.row_floats);
    for (const Run& run : loose.unused) {
      std::fill_n(table.loose_log.begin() + run.source, run.rows, HostLog::kUsed);
    }
    return;
  }
  EntryPart& entry = schedule->entries[part.entry].parts[part.partition];
  if (entry.host_log == HostLog::kUsed) {
    rows.store_add(buffer, table.log, part.runs, table.row_floats);
    return;
  }
  if (entry.host_log == HostLog::kOld && part.rows < entry.rows) clear(table, entry.runs);
  rows.store(buffer, table.log, part.runs, table.row_floats);
  entry.host_log = HostLog::kUsed;
}

// Used logs are complete; the others become zero.
void Mover::complete_log(HostRows& rows, uint32_t number, uint32_t partition,
                         const std::vector<uint32_t>& used_logs, StagedBuffers& staged) {
  Table& table = tables[number];
  const std::vector<uint32_t> none;
  const auto used = [](HostLog log) { return log == HostLog::kUsed; };
  for (const uint32_t i : schedule ? schedule->table_entries[number] : none) {
    EntryPart& part = schedule->entries[i].parts[partition];
    if (std::ranges::find(used_logs, i) != used_logs.end()) {
      rows.store({schedule->entries[i].log, part.stretch, staged}, table.log, part.runs,
                 table.row_floats);
      part.host_log = HostLog::kOld;
      continue;
    }
    if (part.host_log == HostLog::kOld) clear(table, part.runs);
    part.host_log = used(part.host_log) ? HostLog::kOld : HostLog::kZero;
  }
  if (!table.loose_rows) return;
  const auto [begin, end] = table.split.range_of(partition);
  for (uint32_t row = begin; row < end; ++row) {
    if (schedule && schedule->entry_of_row[number][row] != kNoEntry) continue;
    HostLog& log = table.loose_log[row];
    if (log == HostLog::kOld) clear(table, std::array{Run{0, row, 1}});
    log = used(log) ? HostLog::kOld : HostLog::kZero;
  }
}

void Mover::push(Task& task) {
  Table& table = tables[task.table];
  if (task.handed_over) {
    if (task.null) {
      exchange.push_null(table.key);
    } else if (!task.factors.empty()) {
      exchange.push_factors(table.key, task.factors, table.priority);
    } else {
      exchange.push(table.key, table.priority);
    }
    if (trace) trace->add(CacheTrack::kPush, "push", task.table, task.clock, table.pushed_ns);
    return;
  }
  for (const Table::Part& part : table.parts) {
    part.logged->wait();
    part.fetched->wait();
  }
  table.refreshed->wait();
  if (table.kept_twice) {
    std::memcpy(exchange.gradient(table.key).data(), table.log, table.floats() * sizeof(float));
  }
}

void Mover::pull(Lane& lane, Task& task) {
  Table& table = tables[task.table];
  if (trace) {
    trace->add(CacheTrack::kPull, "exchange", task.table, table.version + 1, table.pushed_ns);
  }
  if (table.kept_twice) {
    for (const Table::Part& part : table.parts) part.fetched->wait();
    table.refreshed->wait();
    std::memcpy(table.own_rows.data(), exchange.parameters(table.key).data(),
                table.floats() * sizeof(float));
    if (options.compute != nullptr) lane.stream->wait(*table.gathered);
  }
  if (!schedule) return;
  traced(*lane.stream, CacheTrack::kToDevice, "refresh", task, [&] {
    for (const uint32_t i : schedule->table_entries[task.table]) {
      const PlacedEntry& entry = schedule->entries[i];
      if (!entry.pinned) continue;
      task.refreshed = true;
      for (const EntryPart& part : entry.parts) {
        lane.rows->fetch(entry.rows, table.rows, nullptr, part.runs, table.row_floats);
      }
      task.bytes += uint64_t{entry.count} * table.row_floats * sizeof(float);
    }
  });
  lane.stream->record(*table.refreshed);
}

void Mover::traced(Stream& stream, CacheTrack track, const char* name, const Task& task,
                   const std::function<void()>& enqueue) {
  if (!trace) return enqueue();
  const auto begin = std::make_shared<uint64_t>(0);
  stream.call([begin] { *begin = trace_now_ns(); });
  enqueue();
  stream.call([trace = trace.get(), begin, track, name, table = task.table, clock = task.clock] {
    trace->add(track, name, table, clock, *begin);
  });
}

}  // namespace phub::geeps

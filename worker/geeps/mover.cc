// The tasks of the lanes: when each may begin, its work, and its consequences.
#include "worker/geeps/mover.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

namespace phub::geeps {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// Splits the rows of no entry into those with updates of this clock, and those without.
struct ByUse {
  std::vector<Run> used, unused;
};
ByUse by_use(const Piece& piece, std::span<const Run> runs) {
  ByUse result;
  for (const Run& run : runs) {
    const auto used = [&](uint32_t i) { return piece.loose_log[run.source + i] == HostLog::kUsed; };
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

void clear(float* log, std::span<const Run> runs, size_t row_floats) {
  for (const Run& run : runs) {
    std::fill_n(log + run.source * row_floats, run.rows * row_floats, 0.0F);
  }
}

bool events_are_done(const Task& task) {
  return std::ranges::all_of(task.after, [](const Event* event) { return event->done(); });
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
    for (const Piece& piece : table.pieces) task.after.push_back(piece.saved.get());
  }
  return task;
}

std::optional<Task> Mover::begin(Lane& lane) {
  std::optional<Task> task;
  if (failed()) return task;
  if (lane.kind == Lane::Kind::kFetch) begin_fills();
  const auto next = next_task(lane);
  if (next == lane.tasks.end()) {
    lane.due = false;
    return task;
  }
  task = std::move(*next);
  lane.tasks.erase(next);
  task->clock = tables[task->table].clocks;
  if (task->by_piece) {
    Piece& piece = tables[task->table].pieces[*task->piece];
    ++piece.moving;
    uint64_t& version = schedule->accesses[task->planned->access].version;
    version = std::min(version, piece.version);
  }
  return task;
}

// The task of the lane that begins now, if there is one.
Mover::Tasks::iterator Mover::next_task(Lane& lane) {
  if (lane.kind == Lane::Kind::kStore) return next_store(lane.tasks);
  return std::ranges::find_if(lane.tasks, [this](const Task& each) { return can_begin(each); });
}

// The tasks of a piece stay in order. Among updates that have been computed, those of the table that
// is read first go first, and of one table those that complete a piece. Local data is stored in the
// order of its release, as it makes room for what is read next.
Mover::Tasks::iterator Mover::next_store(Tasks& tasks) const {
  const auto is_update = [](const Task& task) {
    return task.kind == Task::Kind::kUpdate || task.kind == Task::Kind::kClock;
  };
  const auto is_more_urgent = [&](const Task& task, const Task& other) {
    const int32_t priority = tables[task.table].priority, of_other = tables[other.table].priority;
    if (priority != of_other) return priority > of_other;
    return task.kind == Task::Kind::kClock && other.kind == Task::Kind::kUpdate;
  };
  std::set<std::pair<uint32_t, uint32_t>> seen;  // pieces
  auto best = tasks.end();
  for (auto task = tasks.begin(); task != tasks.end(); ++task) {
    if (!seen.emplace(task->table, *task->piece).second || !can_begin(*task)) continue;
    if (best == tasks.end()) {
      best = task;
      if (!is_update(*task) || !events_are_done(*task)) break;
    } else if (is_update(*task) && is_more_urgent(*task, *best) && events_are_done(*task)) {
      best = task;
    }
  }
  return best;
}

void Mover::begin_fills() {
  for (auto next = waiting.begin(); next != waiting.end();) {
    const Instance instance = *next;
    if (!can_fill(instance)) {
      ++next;
      continue;
    }
    next = waiting.erase(next);
    begin_fill(instance);
  }
}

void Mover::begin_fill(Instance instance) {
  PlannedAccess& access = schedule->accesses[instance.access];
  const ListPlan& list = schedule->lists[access.list];
  Table& table = tables[list.table];
  const bool by_piece = fills_by_piece(instance);
  access.filling = true;
  access.version = by_piece ? ~uint64_t{0} : table.version;
  access.changes = table.changes;
  if (!by_piece) begin_reading(table);
  divide({.kind = Task::Kind::kFill,
          .table = list.table,
          .planned = instance,
          .list = &list,
          .buffer = access.data,
          .after = events_before(instance),
          .after_saves = table.spec.local && instance.iteration < table.regular_from,
          .by_piece = by_piece},
         Lane::Kind::kFetch, list.pieces);
}

bool Mover::can_begin(const Task& task) const {
  const Table& table = tables[task.table];
  const Piece& piece = table.pieces[task.piece.value_or(0)];
  const bool result_is_here = piece.version == piece.handed_over;
  const bool is_read = table.moving > 0 || piece.moving > 0;
  switch (task.kind) {
    case Task::Kind::kFill:
      return !task.by_piece ||
             (!piece.refreshing && piece.version >= table.clocks + clocks_ahead(*task.planned));
    case Task::Kind::kUpdate:
    case Task::Kind::kClock:
      // The log must not be written before the last clock's was pushed; if it is the exchange's
      // memory, not before that result is here.
      return piece.handed_over == task.clocks_before && (table.kept_twice || result_is_here);
    case Task::Kind::kSave:
      return !task.after_fills || table.moving == 0;
    case Task::Kind::kPush:
      return result_is_here && !is_read;
    case Task::Kind::kPull:
      return !table.kept_twice || !is_read;
    default:
      return true;
  }
}

void Mover::run(Lane& lane, Task& task) {
  const Event* const before = lane.enqueued[lane.next_enqueued].get();
  if (before != nullptr) before->wait();
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
  if (before == nullptr) return;
  lane.stream->record(*lane.enqueued[lane.next_enqueued]);
  lane.next_enqueued = (lane.next_enqueued + 1) % lane.enqueued.size();
}

bool Mover::finish(Task& task) {
  Table& table = tables[task.table];
  Piece& piece = table.pieces[task.piece.value_or(0)];
  const auto least = [&](uint64_t Piece::*clock) {
    return std::ranges::min_element(table.pieces, {}, clock);
  };
  stats.bytes_staged += task.staged;
  switch (task.kind) {
    case Task::Kind::kPush:
      if (task.handed_over) return false;
      task.handed_over = true;
      task.clock = ++piece.handed_over;
      table.handed_over = least(&Piece::handed_over)->handed_over;
      ++stats.pushes;
      if (trace) piece.pushed_ns = trace_now_ns();
      make_due(Lane::Kind::kStore);
      return true;
    case Task::Kind::kPull:
      stats.bytes_to_device += task.bytes;
      piece.refreshing = false;
      table.refreshed_unseen |= task.refreshed;
      ++piece.version;
      table.version = least(&Piece::version)->version;
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
    finish_part(task);
    if (--task.parts->left > 0) return false;
    task.poisons = options.poison && !fills && task.kind != Task::Kind::kClock;
    if (task.poisons) return true;
  }
  finish_last(task);
  return false;
}

void Mover::finish_part(Task& task) {
  Table& table = tables[task.table];
  if (task.by_piece) {
    --table.pieces[*task.piece].moving;
    pull_lane().due = true;
    lane(Lane::Kind::kPush, table, *task.piece).due = true;
  } else if (task.kind == Task::Kind::kClock) {
    Lane& push = lane(Lane::Kind::kPush, table, *task.piece);
    push.tasks.push_back({.kind = Task::Kind::kPush,
                          .table = task.table,
                          .piece = task.piece,
                          .factors = std::move(task.factors),
                          .null = task.null});
    push.due = true;
  }
}

void Mover::finish_last(Task& task) {
  Table& table = tables[task.table];
  if (task.kind == Task::Kind::kFill) {
    if (!task.by_piece) end_reading(table);
    return end_fill(*task.planned);
  }
  --table.jobs;
  make_due(Lane::Kind::kFetch);
  if (task.kind == Task::Kind::kClock) return;
  if (task.planned) {
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
  if (task.after_saves) lane.stream->wait(*table.pieces[*task.piece].saved);
  traced(*lane.stream, CacheTrack::kToDevice, "fetch", task, [&] {
    for (const HostPart& part : task.list->host_of(task.piece)) {
      const Piece& piece = table.pieces[part.piece];
      if (own) piece.logged->wait();
      // Staged rows are read here, by this thread; the others by the stream.
      if (table.spec.local && HostRows::staged(part.runs, table.row_floats)) piece.saved->wait();
      const auto fetch = [&](std::span<const Run> runs, bool with_log) {
        if (runs.empty()) return;
        lane.rows->fetch(task.buffer, piece.rows, with_log ? piece.log : nullptr, runs,
                         table.row_floats);
      };
      if (own && part.entry == kNoEntry) {
        const ByUse loose = by_use(piece, part.runs);
        fetch(loose.used, true);
        fetch(loose.unused, false);
      } else {
        fetch(part.runs,
              own && schedule->entries[part.entry].part_of(part.piece).host_log == HostLog::kUsed);
      }
      task.bytes += uint64_t{part.rows} * table.row_floats * sizeof(float);
    }
  });
  if (task.done == nullptr) return lane.stream->synchronize();
  lane.stream->record(*task.done);
  lane.stream->record(*table.pieces[*task.piece].fetched);
}

void Mover::store(Lane& lane, Task& task) {
  Table& table = tables[task.table];
  Stream& stream = *lane.stream;
  if (task.poisons) return poison(stream, task);
  for (const Event* event : task.after) stream.wait(*event);
  const Piece& piece = table.pieces[*task.piece];
  if (task.after_fills) stream.wait(*piece.fetched);
  if (task.kind == Task::Kind::kClock) return store_clock(lane, task);
  if (task.kind != Task::Kind::kFree) {
    const bool updates = task.kind == Task::Kind::kUpdate;
    traced(stream, CacheTrack::kToHost, updates ? "update" : "save", task, [&] {
      for (const HostPart& part : task.list->host_of(task.piece)) {
        task.bytes += uint64_t{part.rows} * table.row_floats * sizeof(float);
        const StoredBuffer buffer{task.buffer, part.stretch, task.parts->staged};
        if (updates) {
          log(*lane.rows, table, part, buffer);
        } else {
          table.keep_rows(piece, part.runs);
          lane.rows->store(buffer, table.own_rows_of(piece), part.runs, table.row_floats);
        }
      }
      stream.record(updates ? *piece.logged : *piece.saved);
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
  const Table& table = tables[task.table];
  const Piece& piece = table.pieces[*task.piece];
  Stream& stream = *lane.stream;
  if (table.spec.samples > 0) {
    uint64_t floats = 0;  // one range in memory
    for (const FactorPairs& pairs : task.factors) {
      floats += pairs.pairs * (table.spec.keys.size() + table.row_floats);
    }
    task.bytes = floats * sizeof(float);
    traced(stream, CacheTrack::kToHost, "factors", task,
           [&] { stream.copy_to_host(piece.log, table.factors.floats(), task.bytes); });
  } else if (!task.null) {
    const uint64_t moved = lane.rows->moved_bytes();
    traced(stream, CacheTrack::kToHost, "log", task, [&] {
      complete_log(*lane.rows, task.table, *task.piece, task.used_logs, task.parts->staged);
    });
    task.bytes = lane.rows->moved_bytes() - moved;
  }
  stream.record(*piece.logged);
}

// A part may copy what lies between its rows, too: the buffer is poisoned behind all of them.
void Mover::poison(Stream& stream, const Task& task) {
  if (task.planned) {
    const PlannedAccess& access = schedule->accesses[task.planned->access];
    for (const auto& done : access.done) stream.wait(*done);
  }
  stream.fill(task.buffer, kPoison, size_t{task.list->rows} * tables[task.table].row_floats);
  end_release(stream, task);
}

// The first update of a clock is copied, since 0 + -0 is not -0. If it has only some rows of an
// entry, the other rows become zero.
void Mover::log(HostRows& rows, Table& table, const HostPart& part, const StoredBuffer& buffer) {
  Piece& piece = table.pieces[part.piece];
  if (part.entry == kNoEntry) {
    const ByUse loose = by_use(piece, part.runs);
    rows.store_add(buffer, piece.log, loose.used, table.row_floats);
    rows.store(buffer, piece.log, loose.unused, table.row_floats);
    for (const Run& run : loose.unused) {
      std::fill_n(piece.loose_log.begin() + run.source, run.rows, HostLog::kUsed);
    }
    return;
  }
  EntryPart& entry = schedule->entries[part.entry].part_of(part.piece);
  if (entry.host_log == HostLog::kUsed) {
    rows.store_add(buffer, piece.log, part.runs, table.row_floats);
    return;
  }
  if (entry.host_log == HostLog::kOld && part.rows < entry.rows) {
    clear(piece.log, entry.runs, table.row_floats);
  }
  rows.store(buffer, piece.log, part.runs, table.row_floats);
  entry.host_log = HostLog::kUsed;
}

// Used logs are complete; the others become zero.
void Mover::complete_log(HostRows& rows, uint32_t number, uint32_t of_table,
                         const std::vector<uint32_t>& used_logs, StagedBuffers& staged) {
  Table& table = tables[number];
  Piece& piece = table.pieces[of_table];
  const size_t row_floats = table.row_floats;
  const std::vector<uint32_t> none;
  const auto used = [](HostLog log) { return log == HostLog::kUsed; };
  for (const uint32_t i : schedule ? schedule->piece_entries[number][of_table] : none) {
    EntryPart& part = schedule->entries[i].part_of(of_table);
    if (std::ranges::find(used_logs, i) != used_logs.end()) {
      rows.store({schedule->entries[i].log, part.stretch, staged}, piece.log, part.runs,
                 table.row_floats);
      part.host_log = HostLog::kOld;
      continue;
    }
    if (part.host_log == HostLog::kOld) clear(piece.log, part.runs, row_floats);
    part.host_log = used(part.host_log) ? HostLog::kOld : HostLog::kZero;
  }
  if (!table.loose_rows) return;
  for (uint32_t row = 0; row < piece.row_count; ++row) {
    if (schedule && schedule->entry_of_row[number][piece.first_row + row] != kNoEntry) continue;
    HostLog& log = piece.loose_log[row];
    if (log == HostLog::kOld) clear(piece.log, std::array{Run{0, row, 1}}, row_floats);
    log = used(log) ? HostLog::kOld : HostLog::kZero;
  }
}

void Mover::push(Task& task) {
  const Table& table = tables[task.table];
  const Piece& piece = table.pieces[*task.piece];
  if (task.handed_over) {
    if (task.null) {
      exchange.push_null(piece.key);
    } else if (!task.factors.empty()) {
      exchange.push_factors(piece.key, task.factors, table.priority);
    } else {
      exchange.push(piece.key, table.priority);
    }
    if (trace) trace->add(CacheTrack::kPush, "push", task.table, task.clock, piece.pushed_ns);
    return;
  }
  piece.logged->wait();
  piece.fetched->wait();
  piece.refreshed->wait();
  if (table.kept_twice) {
    const std::span<float> gradient = exchange.gradient(piece.key);
    std::memcpy(gradient.data(), piece.log, gradient.size_bytes());
  }
}

void Mover::pull(Lane& lane, Task& task) {
  const Table& table = tables[task.table];
  const Piece& piece = table.pieces[*task.piece];
  if (trace) {
    trace->add(CacheTrack::kPull, "exchange", task.table, piece.version + 1, piece.pushed_ns);
  }
  if (table.kept_twice) {
    piece.fetched->wait();
    piece.refreshed->wait();
    std::ranges::copy(exchange.parameters(piece.key), table.own_rows_of(piece));
    if (options.compute != nullptr) lane.stream->wait(*table.gathered);
  }
  if (!schedule) return;
  traced(*lane.stream, CacheTrack::kToDevice, "refresh", task, [&] {
    for (const uint32_t i : schedule->piece_entries[task.table][*task.piece]) {
      const PlacedEntry& entry = schedule->entries[i];
      if (!entry.pinned) continue;
      task.refreshed = true;
      const EntryPart& part = entry.part_of(*task.piece);
      lane.rows->fetch(entry.rows, piece.rows, nullptr, part.runs, table.row_floats);
      task.bytes += uint64_t{part.rows} * table.row_floats * sizeof(float);
    }
  });
  lane.stream->record(*piece.refreshed);
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

#include "worker/geeps/lane_work.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <span>

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

}  // namespace

void LaneWork::run(Lane& lane, Task& task) {
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

void LaneWork::fill(Lane& lane, Task& task) {
  Table& table = tables_[task.table];
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
              own && schedule_->entries[part.entry].part_of(part.piece).host_log == HostLog::kUsed);
      }
      task.bytes += uint64_t{part.rows} * table.row_floats * sizeof(float);
    }
  });
  if (task.done == nullptr) return lane.stream->synchronize();
  lane.stream->record(*task.done);
  lane.stream->record(*table.pieces[*task.piece].fetched);
}

void LaneWork::store(Lane& lane, Task& task) {
  Table& table = tables_[task.table];
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

void LaneWork::end_release(Stream& stream, const Task& task) {
  if (task.done != nullptr) {
    stream.record(*task.done);
  } else {
    stream.synchronize();
  }
}

void LaneWork::store_clock(Lane& lane, Task& task) {
  const Table& table = tables_[task.table];
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
void LaneWork::poison(Stream& stream, const Task& task) {
  if (task.planned) {
    const PlannedAccess& access = schedule_->accesses[task.planned->access];
    for (const auto& done : access.done) stream.wait(*done);
  }
  stream.fill(task.buffer, kPoison, size_t{task.list->rows} * tables_[task.table].row_floats);
  end_release(stream, task);
}

// The first update of a clock is copied, since 0 + -0 is not -0. If it has only some rows of an
// entry, the other rows become zero.
void LaneWork::log(HostRows& rows, Table& table, const HostPart& part, const StoredBuffer& buffer) {
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
  EntryPart& entry = schedule_->entries[part.entry].part_of(part.piece);
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
void LaneWork::complete_log(HostRows& rows, uint32_t number, uint32_t of_table,
                            const std::vector<uint32_t>& used_logs, StagedBuffers& staged) {
  Table& table = tables_[number];
  Piece& piece = table.pieces[of_table];
  const size_t row_floats = table.row_floats;
  const std::vector<uint32_t> none;
  const auto used = [](HostLog log) { return log == HostLog::kUsed; };
  for (const uint32_t i : schedule_ ? schedule_->piece_entries[number][of_table] : none) {
    EntryPart& part = schedule_->entries[i].part_of(of_table);
    if (std::ranges::find(used_logs, i) != used_logs.end()) {
      rows.store({schedule_->entries[i].log, part.stretch, staged}, piece.log, part.runs,
                 table.row_floats);
      part.host_log = HostLog::kOld;
      continue;
    }
    if (part.host_log == HostLog::kOld) clear(piece.log, part.runs, row_floats);
    part.host_log = used(part.host_log) ? HostLog::kOld : HostLog::kZero;
  }
  if (!table.loose_rows) return;
  for (uint32_t row = 0; row < piece.row_count; ++row) {
    if (schedule_ && schedule_->entry_of_row[number][piece.first_row + row] != kNoEntry) continue;
    HostLog& log = piece.loose_log[row];
    if (log == HostLog::kOld) clear(piece.log, std::array{Run{0, row, 1}}, row_floats);
    log = used(log) ? HostLog::kOld : HostLog::kZero;
  }
}

void LaneWork::push(Task& task) {
  const Table& table = tables_[task.table];
  const Piece& piece = table.pieces[*task.piece];
  if (task.handed_over) {
    if (task.null) {
      exchange_.push_null(piece.key);
    } else if (!task.factors.empty()) {
      exchange_.push_factors(piece.key, task.factors, table.priority);
    } else {
      exchange_.push(piece.key, table.priority);
    }
    if (trace_) trace_->add(CacheTrack::kPush, "push", task.table, task.clock, piece.pushed_ns);
    return;
  }
  piece.logged->wait();
  piece.fetched->wait();
  piece.refreshed->wait();
  if (table.kept_twice) {
    const std::span<float> gradient = exchange_.gradient(piece.key);
    std::memcpy(gradient.data(), piece.log, gradient.size_bytes());
  }
}

void LaneWork::pull(Lane& lane, Task& task) {
  const Table& table = tables_[task.table];
  const Piece& piece = table.pieces[*task.piece];
  if (trace_) {
    trace_->add(CacheTrack::kPull, "exchange", task.table, piece.version + 1, piece.pushed_ns);
  }
  if (table.kept_twice) {
    piece.fetched->wait();
    piece.refreshed->wait();
    std::ranges::copy(exchange_.parameters(piece.key), table.own_rows_of(piece));
    if (options_.compute != nullptr) lane.stream->wait(*table.gathered);
  }
  if (!schedule_) return;
  traced(*lane.stream, CacheTrack::kToDevice, "refresh", task, [&] {
    for (const uint32_t i : schedule_->piece_entries[task.table][*task.piece]) {
      const PlacedEntry& entry = schedule_->entries[i];
      if (!entry.pinned) continue;
      task.refreshed = true;
      const EntryPart& part = entry.part_of(*task.piece);
      lane.rows->fetch(entry.rows, piece.rows, nullptr, part.runs, table.row_floats);
      task.bytes += uint64_t{part.rows} * table.row_floats * sizeof(float);
    }
  });
  lane.stream->record(*piece.refreshed);
}

void LaneWork::traced(Stream& stream, CacheTrack track, const char* name, const Task& task,
                      const std::function<void()>& enqueue) {
  if (!trace_) return enqueue();
  const auto begin = std::make_shared<uint64_t>(0);
  stream.call([begin] { *begin = trace_now_ns(); });
  enqueue();
  stream.call([trace = trace_.get(), begin, track, name, table = task.table, clock = task.clock] {
    trace->add(track, name, table, clock, *begin);
  });
}

}  // namespace phub::geeps

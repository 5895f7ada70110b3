// Calls outside the sequence: their buffers come from the reserved memory, and are filled when they
// are asked for.
#include <algorithm>
#include <limits>
#include <set>
#include <unordered_set>

#include "transport/error.h"
#include "worker/geeps/cache_wait.h"

namespace phub::geeps {

Outside Cache::Impl::resolve(uint32_t number, std::span<const uint64_t> keys) const {
  const Table& table = tables_[number];
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
  return {.runs = runs_of(rows)};
}

void Cache::Impl::reserve(Lock& lock, uint32_t table, size_t bytes, Outside& outside) {
  std::optional<size_t> offset;
  const auto reserved = [&] {
    offset = reserved_->allocate(bytes);
    return offset.has_value() || outside_jobs_ == 0;
  };
  if (!reserved()) {
    wait_here(lock, table, reserved, [&] {
      return fmt::format("{} bytes of reserved memory for '{}'", bytes, tables_[table].spec.name);
    });
  }
  if (!offset) {
    fail(
        ErrorCode::kFull,
        "{} bytes for rows of '{}' outside of the sequence: of the {} bytes of reserved memory, {} "
        "are in use. Raise reserved_bytes, or record these calls",
        bytes, tables_[table].spec.name, reserved_->size(), reserved_->used());
  }
  outside.offset = *offset;
}

uint32_t Cache::Impl::entry_of(uint32_t table, uint32_t row) const {
  return schedule_ ? schedule_->entry_of_row[table][row] : Schedule::kNoEntry;
}

bool Cache::Impl::on_device(uint32_t entry, Part part) const {
  if (entry == Schedule::kNoEntry) return false;
  const EntryPlan& plan = schedule_->entries[entry];
  return plan.pinned && (part == Part::kRows || plan.log != nullptr);
}

// use(entry, first row in it, first row of the buffer, rows) for runs of rows in device memory.
template <class Use>
void Cache::Impl::for_pinned(uint32_t table, std::span<const Run> runs, Part part, Use use) {
  for (const Run& run : runs) {
    for (uint32_t i = 0; i < run.rows;) {
      const uint32_t entry = entry_of(table, run.source + i);
      if (!on_device(entry, part)) {
        ++i;
        continue;
      }
      const std::vector<uint32_t>& in_entry = schedule_->row_in_entry[table];
      const uint32_t begin = i;
      const uint32_t first = in_entry[run.source + i];
      while (++i < run.rows && entry_of(table, run.source + i) == entry &&
             in_entry[run.source + i] == first + (i - begin)) {
      }
      use(entry, first, run.first + begin, i - begin);
    }
  }
}

// use(entry or kNoEntry, run) for runs of rows in host memory.
template <class Use>
void Cache::Impl::for_host(uint32_t table, std::span<const Run> runs, Part part, Use use) {
  for (const Run& run : runs) {
    for (uint32_t i = 0; i < run.rows;) {
      const uint32_t entry = entry_of(table, run.source + i);
      const uint32_t begin = i;
      while (++i < run.rows && entry_of(table, run.source + i) == entry) {
      }
      if (on_device(entry, part)) continue;
      use(entry, Run{run.first + begin, run.source + begin, i - begin});
    }
  }
}

Held Cache::Impl::acquire_outside(Lock& lock, Held held, bool fetch, uint64_t back) {
  Table& table = tables_[held.table];
  held.outside = std::make_unique<Outside>(resolve(held.table, held.own_keys));
  ++stats_.outside_sequence;
  const size_t bytes = held.buffer.floats() * sizeof(float);
  reserve(lock, held.table, bytes, *held.outside);
  auto* buffer = reinterpret_cast<float*>(static_cast<std::byte*>(memory_.data()) +
                                          reserved_offset_ + held.outside->offset);
  held.buffer.data = buffer;
  const bool reads = held.call == Call::kRead;
  try {
    if (reads || (held.call == Call::kLocalAccess && fetch)) {
      wait_here(
          lock, held.table,
          [&] {
            if (!reads) return table.jobs == 0;
            return table.version + back >= table.clocks && !table.refreshing &&
                   (!table.spec.read_my_writes || table.jobs == 0);
          },
          [&] { return describe_read(table, back); });
      if (reads) held.buffer.age = age_of(table.version);
      const bool refreshed = reads && std::exchange(table.refreshed_unseen, false);
      const Reading reading(*this, lock, table);
      if (refreshed) wait_for(*table.refreshed, held.table);
      fill_outside(held.table, buffer, held.outside->runs);
      if (table.kept_twice) work_.record(*table.gathered);
    }
  } catch (...) {
    own_stream_->synchronize();  // copies into the buffer may be under way
    release_outside(std::move(held), false);
    throw;
  }
  return held;
}

void Cache::Impl::fill_outside(uint32_t number, float* buffer, std::span<const Run> runs) {
  const Table& table = tables_[number];
  const size_t row_floats = table.row_floats;
  if (table.spec.local) own_stream_->wait(*table.saved);
  if (table.spec.read_my_writes) table.logged->wait();
  for_pinned(number, runs, Part::kRows,
             [&](uint32_t entry, uint32_t row, uint32_t first, uint32_t rows) {
               const EntryPlan& plan = schedule_->entries[entry];
               float* to = buffer + first * row_floats;
               work_.copy(to, plan.rows + row * row_floats, rows * row_floats);
               if (table.spec.read_my_writes && entries_[entry].log_used) {
                 work_.add(to, plan.log + row * row_floats, rows * row_floats, -1);
               }
             });
  for_host(number, runs, Part::kRows, [&](uint32_t entry, const Run& run) {
    const bool own = table.spec.read_my_writes && entry != Schedule::kNoEntry &&
                     entries_[entry].host_log == HostLog::kUsed;
    if (!table.spec.read_my_writes || entry != Schedule::kNoEntry) {
      own_rows_->fetch(buffer, table.rows, own ? table.log : nullptr, {&run, 1}, table.row_floats);
      return;
    }
    for (uint32_t i = 0; i < run.rows; ++i) {
      const bool used = table.loose_log[run.source + i] == HostLog::kUsed;
      const Run row{run.first + i, run.source + i, 1};
      own_rows_->fetch(buffer, table.rows, used ? table.log : nullptr, {&row, 1}, table.row_floats);
    }
  });
  own_stream_->synchronize();
}

void Cache::Impl::release_outside(Held held, bool use) {
  Table& table = tables_[held.table];
  const bool saves = use && held.call == Call::kLocalAccess;
  const bool updates = use && held.call == Call::kPreUpdate;
  Outside& outside = *held.outside;
  float* buffer = held.buffer.data;
  if (updates) {
    update_outside(held.table, buffer, outside.runs);
  } else if (saves) {
    mark_irregular(table);
    ++table.changes;
    for_pinned(held.table, outside.runs, Part::kRows,
               [&](uint32_t entry, uint32_t row, uint32_t first, uint32_t rows) {
                 const size_t row_floats = table.row_floats;
                 entries_[entry].dirty = true;
                 work_.copy(schedule_->entries[entry].rows + row * row_floats,
                            buffer + first * row_floats, rows * row_floats);
               });
  } else if (options_.poison) {
    work_.fill(buffer, std::numeric_limits<float>::quiet_NaN(), held.buffer.floats());
  }
  outside.computed = device_.make_event();
  work_.record(*outside.computed);
  ++table.jobs;
  ++outside_jobs_;
  Partition& partition = partitions_[table.partition];
  partition.jobs.push_back({.kind = updates ? Job::Kind::kUpdate
                                    : saves ? Job::Kind::kSave
                                            : Job::Kind::kFree,
                            .table = held.table,
                            .buffer = buffer,
                            .outside = std::move(held.outside)});
  partition.reclaim.notify_one();
}

// The first update of an entry's rows in a clock is copied, here and in the log in host memory, as
// those in the sequence are: added to zeros, -0 would become +0.
void Cache::Impl::update_outside(uint32_t number, const float* buffer, std::span<const Run> runs) {
  const Table& table = tables_[number];
  const size_t row_floats = table.row_floats;
  std::set<uint32_t> begun;
  for_pinned(number, runs, Part::kLog,
             [&](uint32_t entry, uint32_t row, uint32_t first, uint32_t rows) {
               const EntryPlan& plan = schedule_->entries[entry];
               if (!std::exchange(entries_[entry].log_used, true)) {
                 work_.fill(plan.log, 0, plan.count * row_floats);
                 begun.insert(entry);
               }
               float* to = plan.log + row * row_floats;
               const float* from = buffer + first * row_floats;
               begun.contains(entry) ? work_.copy(to, from, rows * row_floats)
                                     : work_.add(to, from, rows * row_floats);
             });
}

// In the reclaimer.
void Cache::Impl::save_outside(HostRows& rows, uint32_t number, const float* buffer,
                               std::span<const Run> runs) {
  const Table& table = tables_[number];
  for_host(number, runs, Part::kRows, [&](uint32_t, const Run& run) {
    rows.store(buffer, table.own_rows.floats().data(), {&run, 1}, table.row_floats);
  });
}

// In the reclaimer.
void Cache::Impl::log_outside(HostRows& rows, uint32_t number, const float* buffer,
                              std::span<const Run> runs) {
  Table& table = tables_[number];
  const size_t row_floats = table.row_floats;
  std::set<uint32_t> begun;
  const auto log_run = [&](const Run& run, bool adds) {
    adds ? rows.store_add(buffer, table.log, {&run, 1}, table.row_floats)
         : rows.store(buffer, table.log, {&run, 1}, table.row_floats);
  };
  for_host(number, runs, Part::kLog, [&](uint32_t entry, const Run& run) {
    if (entry != Schedule::kNoEntry) {
      HostLog& log = entries_[entry].host_log;
      if (log == HostLog::kOld) {
        for (const Run& part : schedule_->entries[entry].runs) {
          std::fill_n(table.log + part.source * row_floats, part.rows * row_floats, 0.0F);
        }
      }
      if (std::exchange(log, HostLog::kUsed) != HostLog::kUsed) begun.insert(entry);
      return log_run(run, !begun.contains(entry));
    }
    for (uint32_t i = 0; i < run.rows;) {
      const uint32_t begin = i;
      const auto is_used = [&] { return table.loose_log[run.source + i] == HostLog::kUsed; };
      const bool adds = is_used();
      for (; i < run.rows && is_used() == adds; ++i) {
        table.loose_log[run.source + i] = HostLog::kUsed;
      }
      log_run({run.first + begin, run.source + begin, i - begin}, adds);
    }
  });
}

}  // namespace phub::geeps

// The threads of the cache: fetchers, reclaimers and pushers of each partition, and the puller.
#include <algorithm>
#include <cstring>
#include <limits>

#include "transport/error.h"
#include "worker/any_error.h"
#include "worker/geeps/cache_wait.h"

namespace phub::geeps {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

}  // namespace

template <class Loop>
std::jthread Cache::Impl::thread(const char* what, Loop loop) {
  return start_thread(what, [this, loop](const std::stop_token&) {
    try {
      loop();
    } catch (...) {
      fail_all(std::current_exception());
    }
  });
}

void Cache::Impl::start_threads() {
  for (Partition& partition : partitions_) {
    partition.fetcher = thread("geeps-fetch", [this, &partition] { fetch_loop(partition); });
    partition.reclaimer = thread("geeps-reclaim", [this, &partition] { reclaim_loop(partition); });
    partition.pusher = thread("geeps-push", [this, &partition] { push_loop(partition); });
  }
  puller_ = thread("geeps-pull", [this] { pull_loop(); });
}

void Cache::Impl::stop_threads() {
  {
    Lock lock(mutex_);
    changed_.wait(lock, [&] {  // what was released and clocked goes out
      return !failure_.empty() ||
             std::all_of(tables_.begin(), tables_.end(), [](const Table& table) {
               return table.jobs == 0 && table.handed_over == table.clocks;
             });
    });
    stopping_ = true;
    wake_all();
  }
  if (puller_.joinable()) exchange_.stop();
  for (Partition& partition : partitions_) {
    for (std::jthread* each : {&partition.fetcher, &partition.reclaimer, &partition.pusher}) {
      if (each->joinable()) each->join();
    }
  }
  if (!puller_.joinable()) return;  // it has not begun: nobody waits for it
  puller_.join();
  exchange_.leave();
}

void Cache::Impl::wake_all() {
  changed_.notify_all();
  pull_.notify_all();
  for (Partition& partition : partitions_) {
    partition.fetch.notify_all();
    partition.reclaim.notify_all();
    partition.push.notify_all();
  }
}

void Cache::Impl::fail_all(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    keep_failure(error);
    wake_all();
  }
  exchange_.abandon(Error(failure_code_, failure_));  // these stay from here on
}

void Cache::Impl::keep_failure(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    failure_code_ = e.code();
    failure_ = e.what();
  } catch (const std::exception& e) {
    failure_ = e.what();
  } catch (...) {  // "unknown"
  }
  if (failure_.empty()) failure_ = "unknown";
}

void Cache::Impl::throw_if_failed() const {
  if (!failure_.empty()) throw Error(failure_code_, failure_);
}

// Calls `enqueue`, which enqueues work on the stream. With a trace, the time that the work takes on
// the device goes there.
void Cache::Impl::traced(Stream& stream, CacheTrack track, const char* name, uint32_t table,
                         const std::function<void()>& enqueue) {
  if (!trace_) return enqueue();
  const auto begin = std::make_shared<uint64_t>(0);
  uint64_t clock = 0;
  {
    const Lock lock(mutex_);
    clock = tables_[table].clocks;
  }
  stream.call([begin] { *begin = trace_now_ns(); });
  enqueue();
  stream.call(
      [this, begin, track, name, table, clock] { trace_->add(track, name, table, clock, *begin); });
}

void Cache::Impl::fetch_loop(Partition& partition) {
  HostRows rows(device_, *partition.fetch_stream);
  Lock lock(mutex_);
  while (true) {
    std::optional<Instance> next;
    partition.fetch.wait(lock, [&] {
      if (stopping_ || !failure_.empty()) return true;
      const auto found = std::find_if(partition.waiting.begin(), partition.waiting.end(),
                                      [&](const Instance& i) { return can_fill(i); });
      if (found == partition.waiting.end()) return false;
      next = *found;
      partition.waiting.erase(found);
      return true;
    });
    if (!next) return;
    AccessState& state = accesses_[next->access];
    Table& table = tables_[schedule_->lists[schedule_->accesses[next->access].list].table];
    state.filling = true;
    state.version = table.version;
    state.changes = table.changes;
    std::vector<const Event*> events = events_before(*next);
    if (table.spec.local && next->iteration < table.regular_from)
      events.push_back(table.saved.get());
    const uint64_t staged = rows.staged_bytes();
    {
      const Reading reading(*this, lock, table);
      for (const Event* event : events) partition.fetch_stream->wait(*event);
      fill(partition, rows, *next);
    }
    stats_.bytes_staged += rows.staged_bytes() - staged;
    state.filling = false;
    state.filled = next->iteration + 1;
    if (std::exchange(state.left_out, false)) leave_out(*next);
    changed_.notify_all();
  }
}

void Cache::Impl::fill(Partition& partition, HostRows& rows, const Instance& instance) {
  const AccessPlan& access = schedule_->accesses[instance.access];
  const ListPlan& list = schedule_->lists[access.list];
  Table& table = tables_[list.table];
  Stream& stream = *partition.fetch_stream;
  uint64_t bytes = 0;
  if (table.spec.read_my_writes) table.logged->wait();
  traced(stream, CacheTrack::kToDevice, "fetch", list.table, [&] {
    for (const HostPart& part : list.host) {
      const bool staged = HostRows::staged(part.runs, table.row_floats);
      if (staged && table.spec.local) table.saved->wait();  // it is read here, not by the stream
      const bool with_log =
          table.spec.read_my_writes && entries_[part.entry].host_log == HostLog::kUsed;
      rows.fetch(access.data, table.rows, with_log ? table.log : nullptr, part.runs,
                 table.row_floats);
      bytes += uint64_t{schedule_->entries[part.entry].count} * table.row_floats * sizeof(float);
    }
  });
  stream.record(*accesses_[instance.access].ready);
  if (!table.spec.local) stream.record(*table.fetched);
  bytes_to_device_ += bytes;
}

void Cache::Impl::reclaim_loop(Partition& partition) {
  HostRows rows(device_, *partition.store_stream);
  Lock lock(mutex_);
  while (true) {
    partition.reclaim.wait(
        lock, [&] { return stopping_ || !failure_.empty() || !partition.jobs.empty(); });
    if (!failure_.empty() || partition.jobs.empty()) return;
    Job job = std::move(partition.jobs.front());
    partition.jobs.pop_front();
    const uint64_t staged = rows.staged_bytes();
    work_off(lock, partition, rows, job);
    stats_.bytes_staged += rows.staged_bytes() - staged;
    --tables_[job.table].jobs;
    changed_.notify_all();
    partition.fetch.notify_all();
  }
}

// The log must not be written before that of the clock before is handed over, nor the exchange's
// memory while it is under way.
void Cache::Impl::wait_for_log(Lock& lock, Partition& partition, const Table& table) {
  partition.reclaim.wait(lock, [&] {
    return !failure_.empty() || (table.handed_over == table.logged_clocks &&
                                 (table.kept_twice || table.version == table.handed_over));
  });
  throw_if_failed();
}

void Cache::Impl::work_off(Lock& lock, Partition& partition, HostRows& rows, Job& job) {
  Table& table = tables_[job.table];
  Stream& stream = *partition.store_stream;
  const bool logs = job.kind == Job::Kind::kUpdate || job.kind == Job::Kind::kClock;
  if (logs) wait_for_log(lock, partition, table);
  lock.unlock();

  if (job.kind == Job::Kind::kClock) {
    bool null = false;
    if (work_.in_stream()) stream.wait(*table.clocked);
    const uint64_t moved = rows.moved_bytes();
    traced(stream, CacheTrack::kToHost, "log", job.table,
           [&] { null = finish_log(rows, job.table, job.used_logs); });
    bytes_to_host_ += rows.moved_bytes() - moved;
    stream.record(*table.logged);
    lock.lock();
    ++table.logged_clocks;
    partition.pushes.push_back({job.table, null});
    partition.push.notify_all();
    return;
  }

  const uint64_t bytes = [&]() -> uint64_t {
    uint64_t count = 0;
    if (job.outside) {
      for (const Run& run : job.outside->runs) count += run.rows;
    } else {
      const ListPlan& list = schedule_->lists[schedule_->accesses[job.planned.access].list];
      for (const HostPart& part : list.host) count += schedule_->entries[part.entry].count;
    }
    return count * table.row_floats * sizeof(float);
  }();
  if (job.outside) {
    if (work_.in_stream()) stream.wait(*job.outside->computed);
    if (logs) log_outside(rows, job.table, job.buffer, job.outside->runs);
    if (job.kind == Job::Kind::kSave) {
      save_outside(rows, job.table, job.buffer, job.outside->runs);
      stream.record(*table.saved);
    }
    stream.synchronize();
    lock.lock();
    reserved_->release(job.outside->offset);
    --outside_jobs_;
    stats_.bytes_to_host += job.kind == Job::Kind::kFree ? 0 : bytes;
    return;
  }

  const AccessPlan& access = schedule_->accesses[job.planned.access];
  const ListPlan& list = schedule_->lists[access.list];
  AccessState& state = accesses_[job.planned.access];
  if (work_.in_stream()) stream.wait(*state.computed);
  traced(stream, CacheTrack::kToHost, logs ? "update" : "save", job.table, [&] {
    if (logs) {
      log_update(rows, table, list, job.buffer);
      stream.record(*table.logged);
    } else {
      for (const HostPart& part : list.host) {
        rows.store(job.buffer, table.own_rows.floats().data(), part.runs, table.row_floats);
      }
      stream.record(*table.saved);
    }
  });
  if (options_.poison) {
    stream.fill(access.data, kPoison, size_t{list.rows} * table.row_floats);
  }
  stream.record(*state.done);
  lock.lock();
  state.done_recorded = true;
  set_released(job.planned);
  stats_.bytes_to_host += bytes;
}

void Cache::Impl::log_update(HostRows& rows, const Table& table, const ListPlan& list,
                             const float* buffer) {
  for (const HostPart& part : list.host) {
    HostLog& log = entries_[part.entry].host_log;
    if (log == HostLog::kUsed) {
      rows.store_add(buffer, table.log, part.runs, table.row_floats);
    } else {  // not added to zeros: 0 + -0 is not -0
      rows.store(buffer, table.log, part.runs, table.row_floats);
    }
    log = HostLog::kUsed;
  }
}

// The log of the clock in the host's memory, complete. True if there were no updates.
bool Cache::Impl::finish_log(HostRows& rows, uint32_t number,
                             const std::vector<uint32_t>& used_logs) {
  Table& table = tables_[number];
  const size_t row_floats = table.row_floats;
  std::vector<uint32_t> no_entries;
  const std::vector<uint32_t>& entries = schedule_ ? schedule_->table_entries[number] : no_entries;
  const auto used = [](HostLog log) { return log == HostLog::kUsed; };
  if (used_logs.empty() && std::none_of(table.loose_log.begin(), table.loose_log.end(), used) &&
      std::none_of(entries.begin(), entries.end(),
                   [&](uint32_t entry) { return used(entries_[entry].host_log); })) {
    return true;
  }
  // Used logs are as they should be; what was not updated is zero.
  for (const uint32_t entry : entries) {
    HostLog& log = entries_[entry].host_log;
    const EntryPlan& plan = schedule_->entries[entry];
    if (std::find(used_logs.begin(), used_logs.end(), entry) != used_logs.end()) {
      rows.store(plan.log, table.log, plan.runs, table.row_floats);
      log = HostLog::kOld;
    } else if (used(log)) {
      log = HostLog::kOld;
    } else if (log == HostLog::kOld) {
      for (const Run& run : plan.runs) {
        std::fill_n(table.log + run.source * row_floats, run.rows * row_floats, 0.0F);
      }
      log = HostLog::kZero;
    }
  }
  if (!table.loose_rows) return false;
  for (uint32_t row = 0; row < table.loose_log.size(); ++row) {
    if (entry_of(number, row) != Schedule::kNoEntry) continue;
    HostLog& log = table.loose_log[row];
    if (log == HostLog::kOld) std::fill_n(table.log + row * row_floats, row_floats, 0.0F);
    log = used(log) ? HostLog::kOld : HostLog::kZero;
  }
  return false;
}

void Cache::Impl::push_loop(Partition& partition) {
  Lock lock(mutex_);
  while (true) {
    partition.push.wait(
        lock, [&] { return stopping_ || !failure_.empty() || !partition.pushes.empty(); });
    if (!failure_.empty() || partition.pushes.empty()) return;
    const Partition::Push push = partition.pushes.front();
    partition.pushes.pop_front();
    Table& table = tables_[push.table];
    // The result before is here, and nobody reads it any more.
    partition.push.wait(lock, [&] {
      return !failure_.empty() || (table.version == table.handed_over && table.moving == 0);
    });
    throw_if_failed();
    lock.unlock();
    table.logged->wait();
    table.fetched->wait();
    table.refreshed->wait();
    if (table.kept_twice) {
      std::memcpy(exchange_.gradient(table.key).data(), table.log, table.floats() * sizeof(float));
    }
    const uint64_t begin = trace_ ? trace_now_ns() : 0;
    lock.lock();
    table.pushed_ns = begin;
    const uint64_t clock = ++table.handed_over;
    ++stats_.pushes;
    lock.unlock();
    if (push.null) {
      exchange_.push_null(table.key);
    } else {
      exchange_.push(table.key, table.priority);
    }
    if (trace_) trace_->add(CacheTrack::kPush, "push", push.table, clock, begin);
    lock.lock();
    changed_.notify_all();
    partition.reclaim.notify_all();
  }
}

void Cache::Impl::pull_loop() {
  const auto stream = device_.make_stream("geeps pull");
  HostRows rows(device_, *stream);
  while (const std::optional<size_t> key = exchange_.next()) {
    const uint32_t number = table_of_key_.at(*key);
    Table& table = tables_[number];
    {
      Lock lock(mutex_);
      table.refreshing = true;
      pull_.wait(lock, [&] {
        return stopping_ || !failure_.empty() || !table.kept_twice || table.moving == 0;
      });
      if (stopping_ || !failure_.empty()) return;
      if (trace_) {
        trace_->add(CacheTrack::kPull, "exchange", number, table.version + 1, table.pushed_ns);
      }
    }
    if (table.kept_twice) {
      table.fetched->wait();
      table.refreshed->wait();
      std::memcpy(table.own_rows.data(), exchange_.parameters(table.key).data(),
                  table.floats() * sizeof(float));
      if (work_.in_stream()) stream->wait(*table.gathered);
    }
    bool pinned = false;
    if (schedule_) {
      traced(*stream, CacheTrack::kToDevice, "refresh", number, [&] {
        for (const uint32_t entry : schedule_->table_entries[number]) {
          const EntryPlan& plan = schedule_->entries[entry];
          if (!plan.pinned) continue;
          pinned = true;
          rows.fetch(plan.rows, table.rows, nullptr, plan.runs, table.row_floats);
          bytes_to_device_ += uint64_t{plan.count} * table.row_floats * sizeof(float);
        }
      });
      stream->record(*table.refreshed);
    }
    const Lock lock(mutex_);
    table.refreshing = false;
    table.refreshed_unseen = pinned;
    ++table.version;
    ++stats_.pulls;
    changed_.notify_all();
    Partition& partition = partitions_[table.partition];
    partition.push.notify_all();
    partition.reclaim.notify_all();
    partition.fetch.notify_all();
  }
}

}  // namespace phub::geeps

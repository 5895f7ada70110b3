// The calls that give buffers back.
#include <algorithm>
#include <limits>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_wait.h"

namespace phub::geeps {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

}  // namespace

void Cache::Impl::save_pinned(const ListPlan& list, const float* buffer) {
  const size_t row_floats = tables_[list.table].row_floats;
  for (const PinnedPart& part : list.pinned) {
    const EntryPlan& entry = schedule_->entries[part.entry];
    entries_[part.entry].dirty = true;
    if (part.index) {
      work_.gather({buffer, list.rows, row_floats}, *part.index, entry.rows);
    } else {
      work_.copy(entry.rows, buffer + part.first * row_floats, entry.count * row_floats);
    }
  }
}

void Cache::Impl::update_pinned(const ListPlan& list, const float* buffer) {
  const size_t row_floats = tables_[list.table].row_floats;
  for (const PinnedPart& part : list.pinned) {
    const EntryPlan& entry = schedule_->entries[part.entry];
    const bool add = std::exchange(entries_[part.entry].log_used, true);
    const float* from = buffer + part.first * row_floats;
    const size_t floats = entry.count * row_floats;
    if (part.index) {
      const ConstRows rows{buffer, list.rows, row_floats};
      add ? work_.gather_add(rows, *part.index, entry.log)
          : work_.gather(rows, *part.index, entry.log);
    } else {
      add ? work_.add(entry.log, from, floats) : work_.copy(entry.log, from, floats);
    }
  }
}

void Cache::Impl::release(Call call, uint64_t handle, bool use) {
  const auto found = std::find_if(held_.begin(), held_.end(),
                                  [&](const Held& held) { return held.handle == handle; });
  if (found == held_.end()) {
    if (handle > 0 && handle < next_handle_) {
      fail(ErrorCode::kInvalid, "{} of buffer {}, which was given back before", name_of(call),
           handle);
    }
    fail(ErrorCode::kInvalid, "{} of buffer {}: there never was one", name_of(call), handle);
  }
  const bool discards = !use && call == Call::kUpdate;  // any buffer
  if (!discards && release_of(found->call) != call) {
    fail(ErrorCode::kInvalid, "{} of a buffer of '{}' that {} gave: it takes {}", name_of(call),
         tables_[found->table].spec.name, name_of(found->call), name_of(release_of(found->call)));
  }
  if (use && found->call == Call::kPreUpdate && !virtual_) {
    // Into a log in device memory only that of the last clock may not be under way any more.
    const bool in_pinned_log =
        !found->planned ||
        !schedule_->lists[schedule_->accesses[found->planned->access].list].pinned.empty();
    Lock lock(mutex_);
    throw_if_failed();
    if (in_pinned_log && found->buffer.data != nullptr) {
      wait_for_log_handed_over(lock, found->table);
    }
  }
  if (recorder_ && found->recorded) {
    switch (found->call) {
      case Call::kRead:
        recorder_->post_read(*found->recorded);
        break;
      case Call::kPreUpdate:
        recorder_->update(*found->recorded);
        break;
      default:
        recorder_->post_local_access(*found->recorded, use);
    }
  }
  Held held = std::move(*found);
  held_.erase(found);
  if (!held.planned) held.keys = held.own_keys;
  --tables_[held.table].held;
  if (virtual_ || held.buffer.data == nullptr) return;
  if (trace_) {
    const uint64_t since = held.since_ns;
    const uint32_t table = held.table;
    const uint64_t clock = tables_[table].clocks;
    const auto add = [this, since, table, clock] {
      trace_->add(CacheTrack::kCompute, "in use", table, clock, since);
    };
    if (work_.in_stream()) {
      work_.stream()->call(add);
    } else {
      add();
    }
  }
  Lock lock(mutex_);
  throw_if_failed();
  ++stats_.calls;
  tables_[held.table].clocked_last = false;
  const uint32_t table = held.table;
  // What is recorded now may go on: finish_sequence() clocks it.
  const bool clocks = use && held.last_update && inferred_[table] && !recorder_;
  if (held.planned) {
    release_planned(lock, std::move(held), use);
  } else {
    release_outside(std::move(held), use);
  }
  lock.unlock();
  if (clocks) table_clock(table);
}

void Cache::Impl::release_planned(Lock& lock, Held held, bool use) {
  const Instance instance = *held.planned;
  const AccessPlan& access = schedule_->accesses[instance.access];
  AccessState& state = accesses_[instance.access];
  const ListPlan& list = schedule_->lists[access.list];
  Table& table = tables_[held.table];
  float* buffer = held.buffer.data;
  const bool saves = use && held.call == Call::kLocalAccess;
  const bool updates = use && held.call == Call::kPreUpdate;
  if (saves && !access.save) mark_irregular(table);
  if (saves && instance.iteration < table.regular_from) ++table.changes;
  if (saves && access.in_place) entries_[list.pinned.front().entry].dirty = true;
  lock.unlock();
  if (updates) update_pinned(list, buffer);
  if (saves && !access.in_place) save_pinned(list, buffer);
  const bool background = (updates || saves) && !list.host.empty();
  if (background) {
    work_.record(*state.computed);
  } else if (!access.in_place) {
    if (options_.poison && !access.kept_on) {
      work_.fill(buffer, kPoison, held.buffer.floats());
    }
    work_.record(*state.done);
  }
  lock.lock();
  state.held = false;
  Partition& partition = partitions_[table.partition];
  if (background) {
    ++table.jobs;
    partition.jobs.push_back({.kind = updates ? Job::Kind::kUpdate : Job::Kind::kSave,
                              .table = held.table,
                              .buffer = buffer,
                              .planned = instance});
    partition.reclaim.notify_one();
  } else {
    state.done_recorded = work_.in_stream();
    set_released(instance);
  }
}

}  // namespace phub::geeps

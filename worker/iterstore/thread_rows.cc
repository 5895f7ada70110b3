#include "worker/iterstore/thread_rows.h"

#include <algorithm>

namespace phub::iterstore {
namespace {

constexpr size_t kAlignment = 16;
// A row is cached if its share of the process's accesses, times its threads, is at least this.
constexpr double kCacheThreshold = 0.1;

constexpr size_t room(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

ThreadRows::ThreadRows(const Recording& recording, const SharedRows& shared,
                       std::span<const Table> tables, const PlaceSettings& settings) {
  const Use& use = shared.use();
  size_t bytes = 0;
  std::vector<bool> cached;
  for (const Step& step : recording) {
    if (step.access == Access::kClock) {
      clocks_.push_back(static_cast<uint32_t>(sequence_.size()));
      sequence_.push_back(kNoPlace);
      continue;
    }
    const uint64_t id = row_id(step.table, step.row);
    const auto known = index_.find(id);
    if (known != index_.end()) {
      sequence_.push_back(known->second);
      continue;
    }
    const double share = static_cast<double>(use.rows[step.table][step.row].accesses) /
                         static_cast<double>(use.accesses);
    const bool caches = share * settings.threads >= kCacheThreshold;
    if (!caches && !settings.every_row) {
      sequence_.push_back(kNoPlace);
      continue;
    }
    const auto place = static_cast<uint32_t>(places_.size());
    index_.emplace(id, place);
    places_.push_back({.table = step.table,
                       .row = step.row,
                       .at = shared.place(step.table, step.row),
                       .may_update = shared.allows(step.table, step.row, Access::kUpdate),
                       .step = static_cast<uint32_t>(sequence_.size())});
    cached.push_back(caches);
    cached_ += caches ? 1 : 0;
    bytes += room(tables[step.table].row_bytes()) * (caches ? 2 : 1);
    sequence_.push_back(place);
  }
  if (!settings.every_row) {  // the sequence of accesses is not used
    sequence_.clear();
    clocks_.clear();
  }
  if (settings.holds) plan_dues(shared.plan().keys().size());
  std::byte* free = nullptr;
  if (settings.os_node && bytes > 0) {
    on_node_ = numa::Memory(bytes, *settings.os_node);
    free = on_node_.bytes().data();
  } else {
    memory_.resize(bytes);
    free = memory_.data();
  }
  for (size_t p = 0; p < places_.size(); ++p) {
    const size_t of_row = room(tables[places_[p].table].row_bytes());
    places_[p].update = free;
    free += of_row;
    if (!cached[p]) continue;
    places_[p].copy = free;
    free += of_row;
  }
}

Place* ThreadRows::look_up(uint32_t table, uint64_t row) {
  const auto at = index_.find(row_id(table, row));
  if (at == index_.end()) return nullptr;
  ++by_index_;
  Place& place = places_[at->second];
  if (!sequence_.empty()) next_ = place.step + 1;
  due_step_ = kNever;
  return &place;
}

const Place* ThreadRows::peek(uint32_t table, uint64_t row) const {
  const auto at = index_.find(row_id(table, row));
  return at == index_.end() ? nullptr : &places_[at->second];
}

void ThreadRows::allow_updates(uint32_t table) {
  for (Place& place : places_) place.may_update |= place.table == table;
}

void ThreadRows::clock() {
  const auto next = std::ranges::lower_bound(clocks_, next_);
  next_ = next == clocks_.end() || *next + 1 == sequence_.size() ? 0 : *next + 1;
  hold();
}

void ThreadRows::plan_dues(size_t keys) {
  held_.resize(keys);
  std::vector<uint32_t> last(keys, kNoPlace);
  const auto end_clock = [&] {
    const auto first = static_cast<ptrdiff_t>(dues_.size());
    first_due_.push_back(static_cast<uint32_t>(first));
    for (uint32_t key = 0; key < keys; ++key) {
      if (last[key] != kNoPlace) dues_.push_back({.step = last[key], .key = key});
    }
    std::ranges::sort(dues_.begin() + first, dues_.end(), {}, &Due::step);
    last.assign(keys, kNoPlace);
  };
  auto clock = clocks_.begin();
  for (uint32_t step = 0; step < sequence_.size(); ++step) {
    if (clock != clocks_.end() && *clock == step) {
      end_clock();
      ++clock;
    } else {
      last[places_[sequence_[step]].at.key] = step;
    }
  }
  // Behind the last clock the sequence begins anew before the next one: all keys are held until
  // then.
  if (!clocks_.empty()) {
    for (const Place& place : places_) last[place.at.key] = kNoStep;
  }
  end_clock();
  first_due_.push_back(static_cast<uint32_t>(dues_.size()));
  hold();
}

void ThreadRows::hold() {
  if (held_.empty()) return;
  std::ranges::fill(held_, 0);
  const auto clock = std::ranges::lower_bound(clocks_, next_) - clocks_.begin();
  next_due_ = first_due_[static_cast<size_t>(clock)];
  end_due_ = first_due_[static_cast<size_t>(clock) + 1];
  for (size_t due = next_due_; due < end_due_; ++due) held_[dues_[due].key] = 1;
  due_step_ = next_due_ < end_due_ ? dues_[next_due_].step : kNever;
}

uint32_t ThreadRows::let_go() {
  const uint32_t key = dues_[next_due_++].key;
  held_[key] = 0;
  due_step_ = next_due_ < end_due_ ? dues_[next_due_].step : kNever;
  return key;
}

}  // namespace phub::iterstore

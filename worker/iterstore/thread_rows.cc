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
}

}  // namespace phub::iterstore

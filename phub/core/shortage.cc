#include "phub/core/shortage.h"

#include <algorithm>
#include <utility>

namespace phub {

bool Shortage::relieve(const ChunkTable& table, const Way& way, uint64_t arrivals) {
  if (!is_there()) return false;
  const uint64_t now = window_->now_ns();
  if (std::exchange(arrivals_, arrivals) != arrivals) since_ns_ = now;
  if (std::exchange(completed_, table.chunks_completed()) != table.chunks_completed()) times_ = 0;
  const Patience patience = patience_with(table, way, now - since_ns_);
  if (now - since_ns_ < patience.ns) return false;
  since_ns_ = now;
  if (!patience.late) return window_->grow(window_->places());
  times_ = std::min(times_ + 1, kMostTimes);
  return window_->grow(std::max(window_->places() / 8, times_));
}

Shortage::Patience Shortage::patience_with(const ChunkTable& table, const Way& way,
                                           uint64_t elapsed_ns) const {
  Patience patience;
  bool waits = false;
  for (uint32_t i = 0; i < table.size() && patience.ns <= elapsed_ns; ++i) {
    if (!way.anyone_waits(i)) continue;
    for (uint32_t w = 0; w < table.words(); ++w) {
      for_each_bit(way.lacking(i, w), w, [&](uint32_t rank) {
        waits = true;
        if (window_->is_short(rank)) return;
        const bool late = !window_->is_short_somewhere(rank);
        const uint64_t ns = !late                       ? moment_ns()
                            : table.rank(rank).attached ? late_now_ns()
                                                        : kNever;
        patience = {std::max(patience.ns, ns), patience.late || late};
      });
    }
  }
  return waits ? patience : Patience{moment_ns(), false};  // a boundary holds up the chunks
}

}  // namespace phub

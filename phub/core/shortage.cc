#include "phub/core/shortage.h"

#include <algorithm>
#include <utility>

namespace phub {

bool Shortage::relieve(const ChunkTable& table, const Way& way, uint64_t arrivals) {
  if (!is_there()) return false;
  const uint64_t now = window_->now_ns();
  if (std::exchange(arrivals_, arrivals) != arrivals) since_ns_ = now;
  if (now - since_ns_ < patience_ns(table, way)) return false;
  since_ns_ = now;
  window_->grow();
  return true;
}

uint64_t Shortage::patience_ns(const ChunkTable& table, const Way& way) const {
  uint64_t patience = 0;
  bool waits = false;
  for (uint32_t i = 0; i < table.size() && patience < kNever; ++i) {
    if (!way.anyone_waits(i)) continue;
    for (uint32_t w = 0; w < table.words(); ++w) {
      for_each_bit(way.lacking(i, w), w, [&](uint32_t rank) {
        waits = true;
        if (window_->is_short(rank)) return;
        const uint64_t late = table.rank(rank).attached ? late_ns_ : kNever;
        patience = std::max(patience, window_->is_short_somewhere(rank) ? moment_ns() : late);
      });
    }
  }
  return waits ? patience : moment_ns();  // a boundary holds up the chunks
}

}  // namespace phub

#include "phub/core/shortage.h"

#include <algorithm>
#include <utility>

#include "transport/error.h"

namespace phub {

bool Shortage::relieve(ChunkTable& table, const Way& way, Outbox& outbox, uint64_t arrivals,
                       uint64_t now_ns) {
  const SharedSlots* const shared = table.shared_slots();
  if (shared != nullptr) note_used_slots(*shared);
  if (!is_there()) return false;
  if (std::exchange(arrivals_, arrivals) != arrivals) since_ns_ = now_ns;
  if (std::exchange(completed_, table.chunks_completed()) != table.chunks_completed()) times_ = 0;
  is_due_ = now_ns >= look_at_ns_;
  if (!is_due_) return false;
  look_at_ns_ = now_ns + between_ns_;
  const Patience patience = patience_with(table, way);
  if (now_ns - since_ns_ < patience.ns) return false;
  since_ns_ = now_ns;
  const uint32_t places = shared != nullptr ? shared->slots() : window_->places();
  if (patience.late) times_ = std::min(times_ + 1, kMostTimes);
  const uint32_t more = patience.late ? std::max(places / 8, times_) : places;
  return shared != nullptr ? take_out(table, way, outbox, more) : window_->grow(more);
}

// A rank with gradients in slots may have more to send.
void Shortage::note_used_slots(const SharedSlots& shared) {
  for (uint32_t rank = 0; rank < shared.ranks(); ++rank) {
    window_->note_shortage(rank, shared.used(rank) > 0);
  }
}

// Of each rank so many gradients that are where another one is waited for. False: none.
bool Shortage::take_out(ChunkTable& table, const Way& way, Outbox& outbox, uint32_t gradients) {
  bool any = false;
  taken_out_.assign(table.max_ranks(), 0);
  for (uint32_t i = 0; i < table.size(); ++i) {
    if (!way.anyone_waits(i)) continue;
    for (uint32_t w = 0; w < table.words(); ++w) {
      for_each_bit(way.lacking(i, w), w, [&](uint32_t rank) {
        if (!table.is_slot_taken(rank, i) || taken_out_[rank] == gradients) return;
        const uint32_t there = table.shared_slots()->chunk_in_slot_of(rank, i);
        if (!table.move_out(rank, there)) return;
        ++taken_out_[rank];
        outbox.tell_taken(rank, there, way.taken(rank, there));
        any = true;
      });
    }
  }
  return any;
}

void Shortage::clear_slots(ChunkTable& table, uint32_t rank) {
  const SharedSlots* const shared = table.shared_slots();
  if (shared == nullptr || shared->used(rank) == 0) return;
  const bool was_open = window_->open(true);
  bool all = true;
  for (uint32_t i = 0; i < table.size() && all; ++i) {
    if (shared->has(rank, i)) all = table.move_out(rank, i);
  }
  window_->open(was_open);
  if (!all) fail(ErrorCode::kFull, "there is no memory for the gradients of rank {}", rank);
}

Shortage::Patience Shortage::patience_with(const ChunkTable& table, const Way& way) const {
  Patience patience;
  const bool shares = table.shared_slots() != nullptr;
  uint64_t lowest = kNever;
  for (uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].round > lowest || !way.anyone_waits(i)) continue;
    for (uint32_t w = 0; w < table.words(); ++w) {
      for_each_bit(way.lacking(i, w), w, [&](uint32_t rank) {
        if (std::exchange(lowest, table[i].round) > table[i].round) patience = {};
        if (shares ? table.is_slot_taken(rank, i) : window_->is_short(rank)) return;
        const bool late = shares || !window_->is_short_somewhere(rank);
        const uint64_t ns = !late                       ? moment_ns()
                            : table.rank(rank).attached ? late_now_ns()
                                                        : kNever;
        patience = {std::max(patience.ns, ns), patience.late || late};
      });
    }
  }
  const bool waits = lowest != kNever;
  return waits ? patience : Patience{moment_ns(), false};  // a boundary holds up the chunks
}

}  // namespace phub

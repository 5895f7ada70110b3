// Save points: a round's state is taken, and the next round begins.
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_impl.h"
#include "worker/geeps/saved_tables.h"

namespace phub::geeps {

// After a round that is to be saved nothing may be clocked before its state was taken, and with
// tables by branch after any round.
void Cache::Impl::check_may_clock(const Table& table) const {
  if (branches_.is_clocked(table)) {
    fail(ErrorCode::kInvalid,
         "TableClock of '{}', before save_point() after its clock {}: there are tables by branch, "
         "so "
         "clock every table once, then call save_point()",
         table.spec.name, table.clocks);
  }
  if (table.clocks < mover_.exchange.saved_after(table.pieces.front().key)) return;
  fail(ErrorCode::kInvalid,
       "TableClock of '{}', before the state after its clock {} was saved: clock every table once, "
       "then call save_point()",
       table.spec.name, table.clocks);
}

void Cache::Impl::check_at_save_point() {
  held_.check_only_read();
  for (const Table& table : mover_.tables) {
    if (!table.unclocked) continue;
    fail(ErrorCode::kInvalid, "save_point with updates of '{}' that were not clocked",
         table.spec.name);
  }
}

// The rank's own state after this round, with its local tables. Nothing: this round is not saved.
std::optional<RankState> Cache::Impl::state_at_save_point() {
  {
    const Lock lock(waits_);
    mover_.failure.check();
    check_at_save_point();
    if (virtual_ || !must_save(mover_)) return std::nullopt;
  }
  waits_.for_results();  // then local rows are not written by others than this thread
  RankState state = local_state(mover_, copies_);
  state.merge(branches_.saved());
  return state;
}

// Whether a round is over now, and all its results are here.
bool Cache::Impl::ends_round() {
  if (!branches_.any() || virtual_) return false;
  {
    const Lock lock(waits_);
    mover_.failure.check();
    check_at_save_point();
    if (!branches_.all_are_clocked()) return false;
  }
  waits_.for_results();
  return true;
}

}  // namespace phub::geeps

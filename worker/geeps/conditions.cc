#include "worker/geeps/conditions.h"

#include <algorithm>

namespace phub::geeps {

bool Conditions::can_begin(const Task& task) const {
  const Table& table = tables_[task.table];
  const Piece& piece = table.pieces[task.piece.value_or(0)];
  const bool result_is_here = piece.version == piece.handed_over;
  const bool is_read = table.moving > 0 || piece.moving > 0;
  switch (task.kind) {
    case Task::Kind::kFill:
      return !task.by_piece ||
             (!piece.refreshing && piece.version >= table.clocks + clocks_ahead(*task.planned));
    case Task::Kind::kUpdate:
    case Task::Kind::kClock:
      // The log must not be written before the last clock's was pushed; if it is the exchange's
      // memory, not before that result is here.
      return piece.handed_over == task.clocks_before && (table.kept_twice || result_is_here);
    case Task::Kind::kSave:
      return !task.after_fills || table.moving == 0;
    case Task::Kind::kPush:
      return result_is_here && !is_read;
    case Task::Kind::kPull:
      return !table.kept_twice || !is_read;
    default:
      return true;
  }
}

bool Conditions::memory_is_free(const Instance& instance) const {
  return std::ranges::all_of(
      schedule_->accesses[instance.access].waits_for, [&](const Dependency& d) {
        return instance.iteration < d.behind ||
               schedule_->accesses[d.access].released > instance.iteration - d.behind;
      });
}

bool Conditions::is_kept(const Instance& instance, uint64_t back) const {
  const PlannedAccess& access = schedule_->accesses[instance.access];
  if (!access.kept_from) return false;
  const PlannedAccess& before = schedule_->accesses[*access.kept_from];
  const Table& table = tables_[schedule_->lists[access.list].table];
  return before.filled == instance.iteration + 1 && before.version + back >= table.clocks;
}

bool Conditions::rows_are_ready(const Table& table, uint64_t back, uint64_t ahead) const {
  if (table.replacing || table.is_refreshing()) return false;
  if (table.spec.local) return table.jobs == 0;
  if (table.spec.read_my_writes && table.jobs > 0) return false;
  return table.version + back >= table.clocks + ahead;
}

bool Conditions::can_fill(const Instance& instance) const {
  const PlannedAccess& access = schedule_->accesses[instance.access];
  const uint32_t number = schedule_->lists[access.list].table;
  const Table& table = tables_[number];
  if (access.filling || access.filled > instance.iteration || !memory_is_free(instance)) {
    return false;
  }
  if (table.spec.local) {
    return instance.iteration < table.regular_from ? rows_are_ready(table, 0) : !table.replacing;
  }
  if (fills_by_piece(instance)) return true;
  return rows_are_ready(table, access.back, clocks_ahead(instance));
}

// Its rows are those of one version then, whenever each piece is fetched.
bool Conditions::fills_by_piece(const Instance& instance) const {
  const PlannedAccess& access = schedule_->accesses[instance.access];
  const TableSpec& spec = tables_[schedule_->lists[access.list].table].spec;
  return !spec.local && !spec.read_my_writes && access.back == 0;
}

// The number of the table's clocks between now and the access.
uint64_t Conditions::clocks_ahead(const Instance& instance) const {
  const PlannedAccess& access = schedule_->accesses[instance.access];
  const uint64_t step = instance.iteration * follower_.length() + access.step;
  return follower_.clocks_before(schedule_->lists[access.list].table, step);
}

}  // namespace phub::geeps

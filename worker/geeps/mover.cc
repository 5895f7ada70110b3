// The tasks of the lanes: the beginning of each, and its consequences.
#include "worker/geeps/mover.h"

#include <algorithm>
#include <utility>

#include "worker/geeps/next_task.h"

namespace phub::geeps {

Task Mover::fill_task(const Outside& outside, float* buffer) {
  const Table& table = tables[outside.list.table];
  Task task{.kind = Task::Kind::kFill,
            .table = outside.list.table,
            .clock = table.clocks,
            .list = &outside.list,
            .buffer = buffer};
  if (table.spec.local) {
    for (const uint32_t piece : outside.list.pieces) {
      task.after.push_back(table.pieces[piece].saved.get());
    }
  }
  return task;
}

std::optional<Task> Mover::begin(Lane& lane) {
  std::optional<Task> task;
  if (failure.happened()) return task;
  if (lane.kind == Lane::Kind::kFetch) begin_fills();
  const auto next = next_task(lane, conditions, tables);
  if (next == lane.tasks.end()) {
    lane.due = false;
    return task;
  }
  task = std::move(*next);
  lane.tasks.erase(next);
  task->clock = tables[task->table].clocks;
  if (task->by_piece) {
    Piece& piece = tables[task->table].pieces[*task->piece];
    ++piece.moving;
    uint64_t& version = schedule->accesses[task->planned->access].version;
    version = std::min(version, piece.version);
  }
  return task;
}

void Mover::begin_fills() {
  for (auto next = waiting.begin(); next != waiting.end();) {
    const Instance instance = *next;
    if (!conditions.can_fill(instance)) {
      ++next;
      continue;
    }
    next = waiting.erase(next);
    begin_fill(instance);
  }
}

void Mover::begin_fill(Instance instance) {
  PlannedAccess& access = schedule->accesses[instance.access];
  const ListPlan& list = schedule->lists[access.list];
  Table& table = tables[list.table];
  const bool by_piece = conditions.fills_by_piece(instance);
  access.filling = true;
  access.version = by_piece ? ~uint64_t{0} : table.version;
  access.changes = table.changes;
  if (!by_piece) table_use.begin_reading(table);
  divide({.kind = Task::Kind::kFill,
          .table = list.table,
          .planned = instance,
          .list = &list,
          .buffer = access.data,
          .after = events_before(instance),
          .after_saves = table.spec.local && instance.iteration < table.regular_from,
          .by_piece = by_piece},
         Lane::Kind::kFetch, list.pieces);
}

bool Mover::finish(Task& task) {
  Table& table = tables[task.table];
  Piece& piece = table.pieces[task.piece.value_or(0)];
  const auto least = [&](uint64_t Piece::*clock) {
    return std::ranges::min_element(table.pieces, {}, clock);
  };
  stats.bytes_staged += task.staged;
  switch (task.kind) {
    case Task::Kind::kPush:
      if (task.handed_over) return false;
      task.handed_over = true;
      task.clock = ++piece.handed_over;
      table.handed_over = least(&Piece::handed_over)->handed_over;
      ++stats.pushes;
      if (trace) piece.pushed_ns = trace_now_ns();
      lanes.make_due(Lane::Kind::kStore);
      return true;
    case Task::Kind::kPull:
      stats.bytes_to_device += task.bytes;
      piece.refreshing = false;
      if (task.refreshed) table.refreshed_last = task.piece;
      ++piece.version;
      table.version = least(&Piece::version)->version;
      ++stats.pulls;
      for (const auto kind : {Lane::Kind::kPush, Lane::Kind::kStore, Lane::Kind::kFetch}) {
        lanes.make_due(kind);
      }
      return false;
    default:
      break;
  }
  const bool fills = task.kind == Task::Kind::kFill;
  if (!task.poisons) {
    (fills ? stats.bytes_to_device : stats.bytes_to_host) += task.bytes;
    finish_part(task);
    if (--task.parts->left > 0) return false;
    task.poisons = options.poison && !fills && task.kind != Task::Kind::kClock;
    if (task.poisons) return true;
  }
  finish_last(task);
  return false;
}

void Mover::finish_part(Task& task) {
  Table& table = tables[task.table];
  if (task.by_piece) {
    --table.pieces[*task.piece].moving;
    lanes.pull().due = true;
    lanes.of(Lane::Kind::kPush, table, *task.piece).due = true;
  } else if (task.kind == Task::Kind::kClock) {
    Lane& push = lanes.of(Lane::Kind::kPush, table, *task.piece);
    push.tasks.push_back(task.push_of_clock());
    push.due = true;
  }
}

void Mover::finish_last(Task& task) {
  Table& table = tables[task.table];
  if (task.kind == Task::Kind::kFill) {
    if (!task.by_piece) table_use.end_reading(table);
    return end_fill(*task.planned);
  }
  --table.jobs;
  lanes.make_due(Lane::Kind::kFetch);
  if (task.kind == Task::Kind::kClock) return;
  if (task.planned) {
    schedule->accesses[task.planned->access].done_recorded = true;
    release(*task.planned);
  } else {
    reserved.end_release(task.outside->offset);
  }
}

}  // namespace phub::geeps

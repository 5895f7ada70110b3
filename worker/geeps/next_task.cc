#include "worker/geeps/next_task.h"

#include <algorithm>
#include <set>
#include <utility>

namespace phub::geeps {
namespace {

bool events_are_done(const Task& task) {
  return std::ranges::all_of(task.after, [](const Event* event) { return event->done(); });
}

// The tasks of a piece stay in order. Among updates that have been computed, those of the table
// that is read first go first, and of one table those that complete a piece. Local data is stored
// in the order of its release, as it makes room for what is read next.
std::deque<Task>::iterator next_store(std::deque<Task>& tasks, const Conditions& conditions,
                                      const std::vector<Table>& tables) {
  const auto is_update = [](const Task& task) {
    return task.kind == Task::Kind::kUpdate || task.kind == Task::Kind::kClock;
  };
  const auto is_more_urgent = [&](const Task& task, const Task& other) {
    const int32_t priority = tables[task.table].priority;
    const int32_t of_other = tables[other.table].priority;
    if (priority != of_other) return priority > of_other;
    return task.kind == Task::Kind::kClock && other.kind == Task::Kind::kUpdate;
  };
  std::set<std::pair<uint32_t, uint32_t>> seen;  // pieces
  auto best = tasks.end();
  for (auto task = tasks.begin(); task != tasks.end(); ++task) {
    if (!seen.emplace(task->table, *task->piece).second || !conditions.can_begin(*task)) continue;
    if (best == tasks.end()) {
      best = task;
      if (!is_update(*task) || !events_are_done(*task)) break;
    } else if (is_update(*task) && is_more_urgent(*task, *best) && events_are_done(*task)) {
      best = task;
    }
  }
  return best;
}

}  // namespace

std::deque<Task>::iterator next_task(Lane& lane, const Conditions& conditions,
                                     const std::vector<Table>& tables) {
  if (lane.kind == Lane::Kind::kStore) return next_store(lane.tasks, conditions, tables);
  return std::ranges::find_if(lane.tasks,
                              [&](const Task& each) { return conditions.can_begin(each); });
}

}  // namespace phub::geeps

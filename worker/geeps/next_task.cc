#include "worker/geeps/next_task.h"

#include <algorithm>
#include <utility>

namespace phub::geeps {
namespace {

// Whether the events that a task waits for are done. The parts of an access or a clock have the
// same ones, and a GPU's driver takes microseconds to say so: it is asked once.
class EventsOfTasks {
 public:
  bool are_done(const Task& task) {
    const Event* const last = task.after.empty() ? nullptr : task.after.back();
    if (last != asked_) {
      asked_ = last;
      done_ = std::ranges::all_of(task.after, [](const Event* event) { return event->done(); });
    }
    return last == nullptr || done_;
  }

 private:
  const Event* asked_ = nullptr;
  bool done_ = true;
};

// The tasks of a piece stay in order. Among updates that have been computed, those of the table
// that is read first go first, and of one table those that complete a piece. Local data is stored
// in the order of its release, as it makes room for what is read next.
std::deque<Task>::iterator next_store(Lane& lane, const Conditions& conditions,
                                      std::vector<Table>& tables) {
  std::deque<Task>& tasks = lane.tasks;
  const auto is_update = [](const Task& task) {
    return task.kind == Task::Kind::kUpdate || task.kind == Task::Kind::kClock;
  };
  const auto is_more_urgent = [&](const Task& task, const Task& other) {
    const int32_t priority = tables[task.table].priority;
    const int32_t of_other = tables[other.table].priority;
    if (priority != of_other) return priority > of_other;
    return task.kind == Task::Kind::kClock && other.kind == Task::Kind::kUpdate;
  };
  ++lane.choices;
  const auto is_first_of_its_piece = [&](const Task& task) {
    uint64_t& seen = tables[task.table].pieces[*task.piece].seen_in_choice;
    return std::exchange(seen, lane.choices) != lane.choices;
  };
  EventsOfTasks events;
  auto best = tasks.end();
  for (auto task = tasks.begin(); task != tasks.end(); ++task) {
    if (!is_first_of_its_piece(*task) || !conditions.can_begin(*task)) continue;
    if (best == tasks.end()) {
      best = task;
      if (!is_update(*task) || !events.are_done(*task)) break;
    } else if (is_update(*task) && is_more_urgent(*task, *best) && events.are_done(*task)) {
      best = task;
    }
  }
  return best;
}

}  // namespace

std::deque<Task>::iterator next_task(Lane& lane, const Conditions& conditions,
                                     std::vector<Table>& tables) {
  if (lane.kind == Lane::Kind::kStore) return next_store(lane, conditions, tables);
  return std::ranges::find_if(lane.tasks,
                              [&](const Task& each) { return conditions.can_begin(each); });
}

}  // namespace phub::geeps

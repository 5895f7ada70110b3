// The order of tasks: set-up, the accesses of the sequence that are open, and what they wait for.
#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "worker/geeps/make_tables.h"
#include "worker/geeps/mover.h"

namespace phub::geeps {

Mover::Mover(Device& of_device, Exchange& over_exchange, const CacheOptions& cache_options,
             const std::vector<TableSpec>& specs)
    : device(of_device),
      exchange(over_exchange),
      options(cache_options),
      staging(of_device),
      tables(make_tables(device, exchange, options.partitions, specs)) {
  for (uint32_t i = 0; i < tables.size(); ++i) {
    const Table& table = tables[i];
    if (table.kept_twice) stats.bytes_copied_by_caller += table.floats() * sizeof(float);
    if (table.spec.local) continue;
    for (uint32_t piece = 0; piece < table.pieces.size(); ++piece) {
      pieces_of_keys_.push_back({i, piece});
    }
  }
}

// Gives the part of each of these pieces to the piece's lane.
void Mover::divide(const Task& task, Lane::Kind kind, const std::vector<uint32_t>& pieces) {
  const auto parts = std::make_shared<TaskParts>(static_cast<uint32_t>(pieces.size()), staging);
  for (const uint32_t piece : pieces) {
    Lane& own = lanes.of(kind, tables[task.table], piece);
    Task part = task;
    part.piece = piece;
    part.parts = parts;
    if (task.planned) {
      PlannedAccess& access = schedule->accesses[task.planned->access];
      part.done = (kind == Lane::Kind::kFetch ? access.ready : access.done)[own.partition].get();
    }
    own.tasks.push_back(std::move(part));
    own.due = true;
  }
}

void Mover::add_waiting(Instance instance) {
  const PlannedAccess& access = schedule->accesses[instance.access];
  const ListPlan& list = schedule->lists[access.list];
  if (access.call == Call::kPreUpdate || list.host.empty()) return;
  if (std::ranges::find(waiting, instance) == waiting.end()) waiting.push_back(instance);
  lanes.make_due(Lane::Kind::kFetch);
}

void Mover::cancel_fill(Instance instance) {
  std::optional<Task> dropped;
  for (Lane& lane : lanes.all()) {
    if (lane.kind != Lane::Kind::kFetch) continue;
    std::erase_if(lane.tasks, [&](Task& task) {
      if (task.planned != instance) return false;
      --task.parts->left;
      dropped = std::move(task);
      return true;
    });
  }
  if (!dropped) return;
  schedule->accesses[instance.access].cancelled = true;
  if (dropped->parts->left == 0) finish_last(*dropped);
}

bool Mover::cancel_fills() {
  waiting.clear();
  if (!schedule) return true;
  std::set<std::pair<uint32_t, uint64_t>> begun;
  for (const Lane& lane : lanes.all()) {
    if (lane.kind != Lane::Kind::kFetch) continue;
    for (const Task& task : lane.tasks) {
      begun.emplace(task.planned->access, task.planned->iteration);
    }
  }
  for (const auto& [access, iteration] : begun) cancel_fill({access, iteration});
  return std::ranges::none_of(schedule->accesses, &PlannedAccess::filling);
}

void Mover::end_fill(Instance instance) {
  PlannedAccess& access = schedule->accesses[instance.access];
  const bool left_out = std::exchange(access.left_out, false);
  access.filling = false;
  if (std::exchange(access.cancelled, false)) {
    lanes.make_due(Lane::Kind::kFetch);
    if (left_out) release_unused(instance);
    return;
  }
  access.filled = instance.iteration + 1;
  if (left_out) leave_out(instance);
}

void Mover::post(Task task) {
  Table& table = tables[task.table];
  ++table.jobs;
  if (task.outside) reserved.begin_release(task.outside->offset);
  if (task.kind == Task::Kind::kClock) {
    std::vector<uint32_t> all(table.pieces.size());
    std::iota(all.begin(), all.end(), 0);
    divide(task, Lane::Kind::kStore, all);
  } else if (task.kind == Task::Kind::kFree || task.list->pieces.empty()) {
    divide(task, Lane::Kind::kStore, {0});  // no rows to move: a part that frees the buffer
  } else {
    divide(task, Lane::Kind::kStore, task.list->pieces);
  }
}

void Mover::arrived(size_t key) {
  const auto [table, piece] = pieces_of_keys_.at(key);
  tables[table].pieces[piece].refreshing = true;
  lanes.pull().tasks.push_back({.kind = Task::Kind::kPull, .table = table, .piece = piece});
  lanes.pull().due = true;
}

bool Mover::fail(const std::exception_ptr& error) {
  if (!failure.keep(error)) return false;
  lanes.make_all_due();
  return true;
}

void Mover::install(Schedule placed) {
  follower = Follower(placed.sequence);
  schedule = std::move(placed);
  for (PlannedAccess& access : schedule->accesses) {
    access.computed = device.make_event();
    for (uint32_t i = 0; i < options.partitions; ++i) {
      access.ready.push_back(device.make_event());
      access.done.push_back(device.make_event());
    }
  }
  for (uint32_t i = 0; i < tables.size(); ++i) {
    Table& table = tables[i];
    table.regular_from = 0;
    if (table.spec.local) continue;
    for (Piece& piece : table.pieces) piece.loose_log.assign(piece.row_count, HostLog::kOld);
    table.loose_rows =
        std::ranges::find(schedule->entry_of_row[i], kNoEntry) != schedule->entry_of_row[i].end();
    // Tables that are read first have the highest priority.
    const std::vector<Operation>& operations = schedule->sequence.operations;
    const auto read = std::ranges::find_if(
        operations, [&](const Operation& o) { return o.call == Call::kRead && o.table == i; });
    table.priority = -static_cast<int32_t>(read - operations.begin());
  }
}

void Mover::open_first() {
  opened_ = 0;
  opening_circle_ = 0;
  for (const Opening& opening : schedule->openings) {
    if (opening.next_iteration == 1) open({opening.access, 0});
  }
}

// The instance may be filled from now on. With updates that are not clocked yet, it is filled when
// it is requested.
void Mover::open(Instance instance) {
  const PlannedAccess& access = schedule->accesses[instance.access];
  const Table& table = tables[schedule->lists[access.list].table];
  if (!options.prefetch || !access.fetch || access.kept_from) return;
  if (!table.spec.read_my_writes) add_waiting(instance);
}

void Mover::open_until(uint64_t phase) {
  const std::vector<Opening>& openings = schedule->openings;
  while (opening_circle_ * schedule->phases + openings[opened_].phase <= phase) {
    const Opening& opening = openings[opened_];
    open({opening.access, opening_circle_ + opening.next_iteration});
    if (++opened_ == openings.size()) {
      opened_ = 0;
      ++opening_circle_;
    }
  }
}

void Mover::leave_out(Instance instance) {
  PlannedAccess& access = schedule->accesses[instance.access];
  Table& table = tables[schedule->lists[access.list].table];
  if (access.call == Call::kLocalAccess) mark_irregular(table);
  std::erase(waiting, instance);
  if (access.released < instance.iteration) {  // an earlier instance is still in use
    access.skipped_to = instance.iteration + 1;
    return;
  }
  if (access.filling) {
    access.left_out = true;
    return cancel_fill(instance);
  }
  access.filled > instance.iteration ? release_unused(instance) : release(instance);
}

// Whoever uses the memory next waits for the copies that have begun, and for its use before them,
// for which a lane has not waited that has begun none.
void Mover::release_unused(Instance instance) {
  PlannedAccess& access = schedule->accesses[instance.access];
  for (uint32_t i = 0; i < options.partitions; ++i) {
    Stream& stream = *lanes.of(Lane::Kind::kFetch, i).stream;
    stream.wait(*access.done[i]);
    stream.record(*access.done[i]);
  }
  access.done_recorded = true;
  release(instance);
}

// Who saves its rows last is not who did so in the sequence, in this iteration and to the next. A
// sequence without acquisitions plans no access that could wait for it.
void Mover::mark_irregular(Table& table) {
  if (follower.length() > 0) table.regular_from = follower.next() / follower.length() + 2;
}

void Mover::release(Instance instance) {
  PlannedAccess& access = schedule->accesses[instance.access];
  access.released = std::max(instance.iteration + 1, access.skipped_to);
  if (!waiting.empty()) lanes.make_due(Lane::Kind::kFetch);
}

std::vector<const Event*> Mover::events_before(const Instance& instance) {
  std::vector<const Event*> events;
  for (const Dependency& d : schedule->accesses[instance.access].waits_for) {
    if (instance.iteration < d.behind) continue;
    PlannedAccess& before = schedule->accesses[d.access];
    if (!before.done_recorded) continue;
    const size_t known = events.size();
    for (const auto& done : before.done) {
      if (!done->done()) events.push_back(done.get());
    }
    // Many may lie in one memory, and a GPU's driver takes microseconds to say that one is done.
    if (events.size() == known) before.done_recorded = false;
  }
  return events;
}

}  // namespace phub::geeps

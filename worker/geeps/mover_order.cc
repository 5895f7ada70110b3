// The order of tasks: set-up, the accesses of the sequence that are open, and what they wait for.
#include <algorithm>

#include "worker/geeps/mover.h"

namespace phub::geeps {

Mover::Mover(Device& of_device, Exchange& over_exchange, const CacheOptions& cache_options,
             const std::vector<TableSpec>& specs)
    : device(of_device), exchange(over_exchange), options(cache_options), staging(of_device) {
  for (const TableSpec& spec : specs) {
    Table& table = tables.emplace_back(spec);
    table.split = {.rows = static_cast<uint32_t>(spec.keys.size()),
                   .partitions = options.partitions,
                   .first = static_cast<uint32_t>(tables.size() - 1) % options.partitions};
    table.partitions = table.split.used();
    for (auto* event : {&table.refreshed, &table.gathered, &table.clocked}) {
      *event = device.make_event();
    }
    for (uint32_t i = 0; i < options.partitions; ++i) {
      table.parts.push_back({.fetched = device.make_event(),
                             .logged = device.make_event(),
                             .saved = device.make_event()});
    }
    const size_t bytes = table.floats() * sizeof(float);
    if (spec.local) {
      table.own_rows = HostMemory(device, bytes, spec.name);
      table.rows = table.own_rows.floats().data();
      if (spec.by_branch) {
        table.branches = std::make_unique<BranchRows>(table.own_rows.floats(), spec.row_floats);
      }
      continue;
    }
    table.key = table_of_key_.size();
    table_of_key_.push_back(static_cast<uint32_t>(tables.size() - 1));
    if (table.key >= exchange.keys() || exchange.elements(table.key) != table.floats()) {
      phub::fail(ErrorCode::kInvalid, "'{}' is not key {} of the exchange, with {} elements",
                 spec.name, table.key, table.floats());
    }
    if (spec.samples > exchange.samples(table.key) ||
        (spec.samples == 0) != (exchange.samples(table.key) == 0)) {
      phub::fail(ErrorCode::kInvalid,
                 "table '{}' has {} samples, and its key takes {} of this device: a job's keys are "
                 "those of keys_of() for the same tables and devices",
                 spec.name, spec.samples, exchange.samples(table.key));
    }
    table.factors = DeviceMemory(
        device, spec.samples * (spec.keys.size() + spec.row_floats) * sizeof(float), spec.name);
    table.loose_log.assign(spec.keys.size(), HostLog::kOld);
    table.kept_twice = spec.max_staleness > exchange.slack().value_or(spec.max_staleness);
    if (table.kept_twice) {
      table.own_rows = HostMemory(device, bytes, spec.name);
      table.own_log = HostMemory(device, bytes, spec.name);
      std::ranges::copy(exchange.parameters(table.key), table.own_rows.floats().begin());
      stats.bytes_copied_by_caller += bytes;
      table.rows = table.own_rows.floats().data();
      table.log = table.own_log.floats().data();
    } else {
      table.rows = exchange.parameters(table.key).data();
      table.log = exchange.gradient(table.key).data();
    }
  }
  if (table_of_key_.size() != exchange.keys()) {
    phub::fail(ErrorCode::kInvalid, "{} tables of parameters, but the exchange has {} keys",
               table_of_key_.size(), exchange.keys());
  }
  const auto add_lane = [&](Lane::Kind kind, uint32_t partition, const std::string& name) {
    Lane& lane =
        lanes_.emplace_back(Lane{.kind = kind, .stream = {}, .rows = {}, .partition = partition});
    if (name.empty()) return;
    lane.stream = device.make_stream(name);
    lane.rows = std::make_unique<HostRows>(device, *lane.stream);
  };
  for (uint32_t i = 0; i < options.partitions; ++i) {
    add_lane(Lane::Kind::kFetch, i, fmt::format("geeps fetch {}", i));
    add_lane(Lane::Kind::kStore, i, fmt::format("geeps store {}", i));
    add_lane(Lane::Kind::kPush, i, "");
  }
  add_lane(Lane::Kind::kPull, 0, "geeps pull");
}

void Mover::make_due(Lane::Kind kind) {
  for (Lane& lane : lanes_) lane.due |= lane.kind == kind;
}

// Gives a part to the lane of each partition.
void Mover::divide(const Task& task, Lane::Kind kind, const std::vector<uint32_t>& partitions) {
  const auto parts = std::make_shared<TaskParts>(static_cast<uint32_t>(partitions.size()), staging);
  for (const uint32_t partition : partitions) {
    Task part = task;
    part.partition = partition;
    part.parts = parts;
    if (task.planned) {
      PlannedAccess& access = schedule->accesses[task.planned->access];
      part.done = (kind == Lane::Kind::kFetch ? access.ready : access.done)[partition].get();
    }
    lane(kind, partition).tasks.push_back(std::move(part));
    lane(kind, partition).due = true;
  }
}

void Mover::add_waiting(Instance instance) {
  const PlannedAccess& access = schedule->accesses[instance.access];
  const ListPlan& list = schedule->lists[access.list];
  if (access.call == Call::kPreUpdate || list.host.empty()) return;
  if (std::ranges::find(waiting, instance) == waiting.end()) waiting.push_back(instance);
  for (const uint32_t i : list.partitions) lane(Lane::Kind::kFetch, i).due = true;
}

void Mover::post(Task task) {
  Table& table = tables[task.table];
  ++table.jobs;
  if (task.outside) {
    const size_t offset = task.outside->offset;
    releasing[offset] = reserved->release(offset).value();
  }
  if (task.kind == Task::Kind::kClock) {
    divide(task, Lane::Kind::kStore, table.partitions);
  } else if (task.kind == Task::Kind::kFree || task.list->partitions.empty()) {
    // No rows to move: one part, in a lane where the table's next clock is behind it.
    divide(task, Lane::Kind::kStore, {table.partitions.front()});
  } else {
    divide(task, Lane::Kind::kStore, task.list->partitions);
  }
}

void Mover::arrived(size_t key) {
  const uint32_t number = table_of_key_.at(key);
  tables[number].refreshing = true;
  pull_lane().tasks.push_back({.kind = Task::Kind::kPull, .table = number});
  pull_lane().due = true;
}

void Mover::end_reading(Table& table) {
  if (--table.moving > 0) return;
  if (table.spec.local) return make_due(Lane::Kind::kStore);
  pull_lane().due = true;
  push_lane(table).due = true;
}

void Mover::end_replacing(Table& table) {
  ++table.changes;
  table.refreshing = false;
  make_due(Lane::Kind::kFetch);
}

bool Mover::fills_replaced() const {
  return std::ranges::any_of(tables, [](const Table& table) {
    return table.spec.local && table.refreshing && table.moving > 0;
  });
}

bool Mover::fail(const std::exception_ptr& error) {
  if (failed()) return false;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    failure_code_ = e.code();
    failure_ = e.what();
  } catch (const std::exception& e) {
    failure_ = e.what();
  } catch (...) {  // "unknown"
  }
  if (failure_.empty()) failure_ = "unknown";
  for (Lane& lane : lanes_) lane.due = true;
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
    table.loose_log.assign(table.spec.keys.size(), HostLog::kOld);
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
    return;
  }
  if (access.filled > instance.iteration) {
    for (const uint32_t i : schedule->lists[access.list].partitions) {
      lane(Lane::Kind::kFetch, i).stream->record(*access.done[i]);
    }
    access.done_recorded = true;
  }
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
  if (!waiting.empty()) make_due(Lane::Kind::kFetch);
}

bool Mover::memory_is_free(const Instance& instance) const {
  return std::ranges::all_of(
      schedule->accesses[instance.access].waits_for, [&](const Dependency& d) {
        return instance.iteration < d.behind ||
               schedule->accesses[d.access].released > instance.iteration - d.behind;
      });
}

bool Mover::reserved_is_free(size_t offset, size_t bytes) const {
  return std::ranges::none_of(releasing, [&](const auto& each) {
    return each.first < offset + bytes && offset < each.first + each.second;
  });
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

bool Mover::is_kept(const Instance& instance, uint64_t back) const {
  const PlannedAccess& access = schedule->accesses[instance.access];
  if (!access.kept_from) return false;
  const PlannedAccess& before = schedule->accesses[*access.kept_from];
  const Table& table = tables[schedule->lists[access.list].table];
  return before.filled == instance.iteration + 1 && before.version + back >= table.clocks;
}

bool Mover::rows_are_ready(const Table& table, uint64_t back, uint64_t ahead) const {
  if (table.refreshing) return false;
  if (table.spec.local) return table.jobs == 0;
  if (table.spec.read_my_writes && table.jobs > 0) return false;
  return table.version + back >= table.clocks + ahead;
}

bool Mover::can_fill(const Instance& instance) const {
  const PlannedAccess& access = schedule->accesses[instance.access];
  const uint32_t number = schedule->lists[access.list].table;
  const Table& table = tables[number];
  if (access.filling || access.filled > instance.iteration || !memory_is_free(instance)) {
    return false;
  }
  if (table.spec.local) {
    return instance.iteration < table.regular_from ? rows_are_ready(table, 0) : !table.refreshing;
  }
  const uint64_t step = instance.iteration * follower.length() + access.step;
  return rows_are_ready(table, access.back, follower.clocks_before(number, step));
}

}  // namespace phub::geeps

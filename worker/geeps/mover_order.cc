// The order of tasks: set-up, the accesses of the sequence that are open, and what they wait for.
#include <algorithm>
#include <numeric>
#include <set>

#include "worker/geeps/mover.h"
#include "worker/geeps/tables.h"

namespace phub::geeps {

Mover::Mover(Device& of_device, Exchange& over_exchange, const CacheOptions& cache_options,
             const std::vector<TableSpec>& specs)
    : device(of_device), exchange(over_exchange), options(cache_options), staging(of_device) {
  for (const TableSpec& spec : specs) add_table(spec);
  if (pieces_of_keys_.size() != exchange.keys()) {
    phub::fail(ErrorCode::kInvalid,
               "tables of parameters with {} pieces in all, but the exchange has {} keys",
               pieces_of_keys_.size(), exchange.keys());
  }
  add_lanes();
}

void Mover::add_table(const TableSpec& spec) {
  Table& table = tables.emplace_back(spec);
  table.split = split_of(spec);
  table.first_partition = static_cast<uint32_t>(tables.size() - 1) % options.partitions;
  if (spec.local) {  // no key: there is something for each partition
    const uint32_t share = (table.split.rows + options.partitions - 1) / options.partitions;
    table.split.rows_per_piece = std::min(table.split.rows_per_piece, share);
  }
  for (auto* event : {&table.gathered, &table.clocked}) *event = device.make_event();
  for (uint32_t i = 0; i < table.split.pieces(); ++i) {
    const auto [begin, end] = table.split.range_of(i);
    Piece& piece = table.pieces.emplace_back();
    piece.first_row = begin;
    piece.row_count = end - begin;
    for (auto* event : {&piece.refreshed, &piece.fetched, &piece.logged, &piece.saved}) {
      *event = device.make_event();
    }
  }
  if (!spec.local) return connect(table);
  table.own_rows = HostMemory(device, table.floats() * sizeof(float), spec.name);
  for (Piece& piece : table.pieces) piece.rows = table.own_rows_of(piece);
  if (spec.by_branch) {
    table.branches = std::make_unique<BranchRows>(table.own_rows.floats(), spec.row_floats);
  }
}

// The pieces are the next keys of the exchange.
void Mover::connect(Table& table) {
  const TableSpec& spec = table.spec;
  for (uint32_t i = 0; i < table.pieces.size(); ++i) {
    Piece& piece = table.pieces[i];
    piece.key = pieces_of_keys_.size();
    piece.loose_log.assign(piece.row_count, HostLog::kOld);
    pieces_of_keys_.push_back({static_cast<uint32_t>(tables.size() - 1), i});
    const uint64_t elements = uint64_t{piece.row_count} * table.row_floats;
    if (piece.key < exchange.keys() && exchange.elements(piece.key) == elements) continue;
    phub::fail(ErrorCode::kInvalid,
               "rows {} to {} of '{}' are not key {} of the exchange, with {} elements",
               piece.first_row, piece.first_row + piece.row_count - 1, spec.name, piece.key,
               elements);
  }
  const uint32_t samples = exchange.samples(table.pieces.front().key);
  if (spec.samples > samples || (spec.samples == 0) != (samples == 0)) {
    phub::fail(ErrorCode::kInvalid,
               "table '{}' has {} samples, and its key takes {} of this device: a job's keys are "
               "those of keys_of() for the same tables and devices",
               spec.name, spec.samples, samples);
  }
  table.factors = DeviceMemory(
      device, spec.samples * (spec.keys.size() + spec.row_floats) * sizeof(float), spec.name);
  table.kept_twice = spec.max_staleness > exchange.slack().value_or(spec.max_staleness);
  if (table.kept_twice) {
    const size_t bytes = table.floats() * sizeof(float);
    table.own_rows = HostMemory(device, bytes, spec.name);
    table.own_log = HostMemory(device, bytes, spec.name);
    stats.bytes_copied_by_caller += bytes;
  }
  for (Piece& piece : table.pieces) {
    const std::span<const float> parameters = exchange.parameters(piece.key);
    piece.rows = table.kept_twice ? table.own_rows_of(piece) : parameters.data();
    if (table.kept_twice) std::ranges::copy(parameters, table.own_rows_of(piece));
    piece.log = table.kept_twice ? table.own_log.floats().data() + table.first_float_of(piece)
                                 : exchange.gradient(piece.key).data();
  }
}

void Mover::add_lanes() {
  const auto add_lane = [&](Lane::Kind kind, uint32_t partition, const std::string& name) {
    Lane& lane =
        lanes_.emplace_back(Lane{.kind = kind, .stream = {}, .rows = {}, .partition = partition});
    if (name.empty()) return;
    lane.stream = device.make_stream(name);
    lane.rows = std::make_unique<HostRows>(device, *lane.stream);
    if (kind == Lane::Kind::kPull) return;
    for (auto& event : lane.enqueued) event = device.make_event();
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

// Gives the part of each of these pieces to the piece's lane.
void Mover::divide(const Task& task, Lane::Kind kind, const std::vector<uint32_t>& pieces) {
  const auto parts = std::make_shared<TaskParts>(static_cast<uint32_t>(pieces.size()), staging);
  for (const uint32_t piece : pieces) {
    Lane& own = lane(kind, tables[task.table], piece);
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
  make_due(Lane::Kind::kFetch);
}

void Mover::cancel_fill(Instance instance) {
  std::optional<Task> dropped;
  for (Lane& lane : lanes_) {
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
  for (const Lane& lane : lanes_) {
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
    make_due(Lane::Kind::kFetch);
    if (left_out) release_unused(instance);
    return;
  }
  access.filled = instance.iteration + 1;
  if (left_out) leave_out(instance);
}

void Mover::post(Task task) {
  Table& table = tables[task.table];
  ++table.jobs;
  if (task.outside) {
    const size_t offset = task.outside->offset;
    releasing[offset] = reserved->release(offset).value();
  }
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
  pull_lane().tasks.push_back({.kind = Task::Kind::kPull, .table = table, .piece = piece});
  pull_lane().due = true;
}

void Mover::end_reading(Table& table) {
  if (--table.moving > 0) return;
  if (table.spec.local) return make_due(Lane::Kind::kStore);
  pull_lane().due = true;
  make_due(Lane::Kind::kPush);
}

void Mover::end_replacing(Table& table) {
  ++table.changes;
  table.replacing = false;
  make_due(Lane::Kind::kFetch);
}

bool Mover::fills_replaced() const {
  return std::ranges::any_of(
      tables, [](const Table& table) { return table.replacing && table.moving > 0; });
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

// Who uses the memory next waits for the copies that have begun.
void Mover::release_unused(Instance instance) {
  PlannedAccess& access = schedule->accesses[instance.access];
  for (uint32_t i = 0; i < options.partitions; ++i) {
    lane(Lane::Kind::kFetch, i).stream->record(*access.done[i]);
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
  if (table.replacing || table.is_refreshing()) return false;
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
    return instance.iteration < table.regular_from ? rows_are_ready(table, 0) : !table.replacing;
  }
  if (fills_by_piece(instance)) return true;
  return rows_are_ready(table, access.back, clocks_ahead(instance));
}

// Its rows are those of one version then, whenever each piece is fetched.
bool Mover::fills_by_piece(const Instance& instance) const {
  const PlannedAccess& access = schedule->accesses[instance.access];
  const TableSpec& spec = tables[schedule->lists[access.list].table].spec;
  return !spec.local && !spec.read_my_writes && access.back == 0;
}

// The number of the table's clocks between now and the access.
uint64_t Mover::clocks_ahead(const Instance& instance) const {
  const PlannedAccess& access = schedule->accesses[instance.access];
  const uint64_t step = instance.iteration * follower.length() + access.step;
  return follower.clocks_before(schedule->lists[access.list].table, step);
}

}  // namespace phub::geeps

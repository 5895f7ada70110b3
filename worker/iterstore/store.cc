#include "worker/iterstore/store.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "numa/memory.h"
#include "transport/error.h"
#include "worker/iterstore/cores.h"
#include "worker/iterstore/meeting.h"
#include "worker/iterstore/one_round.h"
#include "worker/iterstore/options.h"
#include "worker/iterstore/pattern_watch.h"
#include "worker/iterstore/row_names.h"
#include "worker/iterstore/shared_rows.h"
#include "worker/iterstore/thread_rows.h"

namespace phub::iterstore {
namespace {

constexpr size_t kMaxSteps = 0x7fffffff;

}  // namespace

struct Store::Impl {
  explicit Impl(StoreOptions store_options);

  std::string next_job(const char* what) {
    return fmt::format("{}.{}-{}", options.worker.spec.name, ++jobs, what);
  }
  // Before anything is known of the accesses.
  void open();
  // After an iteration that every thread has recorded; `again`: by itself.
  void place_anew(bool again);
  void clock();
  Tally said();                         // by this rank with this clock
  void change_rows(const Tally& with);  // what all ranks asked for
  States cleared_states();              // of now, and deleted rows are as new
  void clear_rows();
  void check_spare(uint64_t table, uint64_t row, uint64_t left) const;
  Tally accesses() const;  // since rows were placed
  // From now on threads use these.
  void use(std::unique_ptr<SharedRows> rows, std::span<const Recording> recorded);
  void check_clocked(const char* what) const;
  void check_table(uint32_t table) const {
    if (table < tables.size()) return;
    fail(ErrorCode::kInvalid, "there is no table {}, the store has {}", table, tables.size());
  }
  std::optional<uint32_t> os_node_of(uint32_t thread) const;
  class Unpinned;
  void pin(uint32_t thread) const;
  void unpin() const;

  const StoreOptions options;
  const std::vector<Table> tables;
  Meeting meeting;
  std::optional<numa::Topology> topology;  // where threads are pinned
  cpu_set_t cpus{};                        // that they had before
  uint64_t jobs = 0;
  uint64_t clocks = 0;
  uint64_t placed = 0;
  PatternWatch watch;
  Tally told;                                  // of accesses()
  std::vector<std::optional<RowNames>> names;  // of tables with spare rows
  std::vector<std::vector<RowChange>> asked;   // by thread, since the last clock
  std::vector<RowChange> announced;            // with the last clock
  std::vector<RowChange> deleted;              // `row`: the place, which is not cleared yet
  Tally carried;                               // of the last clock of a job that has ended
  std::vector<Recording> recordings;           // by thread
  std::unique_ptr<SharedRows> shared;
  std::atomic<SharedRows*> opened = nullptr;  // the same, for threads that have not met since
  std::vector<std::unique_ptr<ThreadRows>> threads;
};

struct StoreThread::Impl {
  // kAgain: a real one that the store records by itself.
  enum class Mode : uint8_t { kClosed, kReal, kAgain, kGathering, kVirtual };

  Impl(Store::Impl& of, uint32_t number) : store(of), thread(number) {}
  void check(uint32_t table, std::span<const uint64_t> rows, kernels::ValueType type,
             size_t bytes) const;
  // Records, and makes sure that there is a job. False: nothing else happens.
  bool prepare(Access access, uint32_t table, std::span<const uint64_t> rows);
  bool records() const { return mode > Mode::kReal; }
  void record(Step step);
  // Of rows, which a table that changes may have elsewhere. Valid until the next call.
  std::span<const uint64_t> places(uint32_t table, std::span<const uint64_t> of_rows);
  void change(RowChange change);
  void begin(Mode recorded);
  void meet(const char* what, const std::function<void()>& work);
  void use_rows();
  void read(uint32_t table, uint64_t row, std::byte* into);
  void update(uint32_t table, uint64_t row, const std::byte* by);

  Store::Impl& store;
  const uint32_t thread;
  Mode mode = Mode::kClosed;
  SharedRows* shared = nullptr;
  ThreadRows* rows = nullptr;
  uint64_t now = 0;
  std::vector<uint64_t> found;
};

Store::Impl::Impl(StoreOptions store_options)
    : options(std::move(store_options)),
      tables(checked_tables(options.tables)),
      meeting(options.threads),
      watch(options.gather_again, options.worker.spec.world_size),
      asked(options.threads),
      recordings(options.threads) {
  for (const Table& table : tables) {
    names.emplace_back();
    if (table.spare > 0) names.back().emplace(table.rows - table.spare, table.spare);
  }
  const WorkerOptions& worker = options.worker;
  const bool knows_neighbours = worker.local_world_size > 0 || worker.spec.world_size == 1;
  if (!options.numa || !knows_neighbours) return;
  if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) return;
  topology = numa::this_machine();
  if (topology->nodes.size() < 2) topology.reset();
}

std::optional<uint32_t> Store::Impl::os_node_of(uint32_t thread) const {
  if (!topology) return std::nullopt;
  const numa::Core& core =
      core_of(*topology, thread, options.threads, static_cast<uint32_t>(options.worker.rank),
              options.worker.local_world_size);
  return topology->nodes[core.node].os_node;
}

void Store::Impl::pin(uint32_t thread) const {
  if (!topology) return;
  numa::pin_thread(core_of(*topology, thread, options.threads,
                           static_cast<uint32_t>(options.worker.rank),
                           options.worker.local_world_size)
                       .os_cpu);
}

void Store::Impl::unpin() const {
  if (topology) sched_setaffinity(0, sizeof cpus, &cpus);
}

// A worker's own threads do not share the core of the thread that makes it.
class Store::Impl::Unpinned {
 public:
  explicit Unpinned(const Impl& store) {
    if (sched_getaffinity(0, sizeof own_, &own_) == 0) store.unpin();
  }
  ~Unpinned() { sched_setaffinity(0, sizeof own_, &own_); }
  Unpinned(const Unpinned&) = delete;
  Unpinned& operator=(const Unpinned&) = delete;

 private:
  cpu_set_t own_{};
};

void Store::Impl::open() {
  if (shared) return;
  const Unpinned for_the_worker(*this);
  use(std::make_unique<SharedRows>(options.worker, next_job("rows"), tables,
                                   RowPlan(tables, nullptr, {}), Use(), first_states(tables)),
      std::vector<Recording>(options.threads));
}

void Store::Impl::check_clocked(const char* what) const {
  if (!shared || shared->is_clocked()) return;
  fail(ErrorCode::kInvalid, "{}: there are updates that were not clocked: call clock() before",
       what);
}

void Store::Impl::place_anew(bool again) {
  check_clocked("finish()");
  const Unpinned for_the_workers(*this);
  States states = shared ? cleared_states() : first_states(tables);
  Use mine = use_of(recordings, tables);
  if (again) keep_promise(mine, shared->use(), tables);
  const AllRecorded all = use_of_all(options.worker, next_job("accesses"), tables, mine);
  const bool lock_step = options.worker.spec.consistency == "bsp";
  RowPlan plan(tables, &all.rows,
               {.placement = options.placement,
                .narrow = lock_step,
                .batches = options.prefetch ? options.batches : 1,
                .chunk_elements = options.worker.spec.chunk_elements});
  // The job before is left only when all ranks are in this one.
  use(std::make_unique<SharedRows>(options.worker, next_job("rows"), tables, std::move(plan),
                                   std::move(mine), std::move(states)),
      recordings);
  for (Recording& recording : recordings) recording = {};
  watch.placed(all.clocks);
  carried = {};
  ++placed;
}

Tally Store::Impl::accesses() const {
  Tally all;
  for (const auto& rows : threads) {
    const auto outside = static_cast<int64_t>(rows->by_index() + rows->dynamic);
    all.outside += outside;
    all.accesses += outside + static_cast<int64_t>(rows->in_sequence());
  }
  return all;
}

Tally Store::Impl::said() {
  const Tally all = accesses();
  Tally mine = all - std::exchange(told, all);
  mine.ranks = 1;
  for (const auto& changes : asked) mine.changes += static_cast<int64_t>(changes.size());
  return mine;
}

void Store::Impl::clock() {
  open();
  const Tally before = shared->clock(said(), !options.prefetch) + std::exchange(carried, {});
  for (const auto& rows : threads) rows->clock();
  ++clocks;
  change_rows(before);
  for (auto& changes : asked) {
    announced.insert(announced.end(), changes.begin(), changes.end());
    changes.clear();
  }
  if (!deleted.empty()) clear_rows();
  if (watch.after_clock(before)) place_anew(true);
}

// Ranks ascending, their threads, and calls; first what is deleted, so that its places are free.
void Store::Impl::change_rows(const Tally& with) {
  if (with.changes == 0) return;
  const auto each = static_cast<size_t>(with.changes);
  std::vector<RowChange> all(each * options.worker.spec.world_size);
  std::ranges::copy(announced, all.begin() + static_cast<ptrdiff_t>(options.worker.rank * each));
  announced.clear();
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(all));
  unite(options.worker, next_job("changes"), {&bytes, 1});
  for (const RowChange& change : all) {
    if (change.change != RowChange::kDelete) continue;
    RowNames& of = *names[change.table];
    if (!of.place(change.row)) continue;  // two ranks have asked for it
    deleted.push_back({RowChange::kDelete, change.table, of.remove(change.row)});
  }
  for (const RowChange& change : all) {
    if (change.change != RowChange::kAdd) continue;
    RowNames& of = *names[change.table];
    if (of.place(change.row)) continue;
    check_spare(change.table, change.row, of.free_places());
    of.add(change.row);
  }
}

void Store::Impl::check_spare(uint64_t table, uint64_t row, uint64_t left) const {
  if (left > 0) return;
  fail(ErrorCode::kInvalid,
       "table '{}' has no spare row left for row {}: plan more (spare is {}), or delete others",
       tables[table].name, row, tables[table].spare);
}

States Store::Impl::cleared_states() {
  States states = shared->states(next_job("state"));
  carried = carried + shared->told();
  change_rows(carried);  // that clock is the last of its job
  carried.changes = 0;
  for (const RowChange& change : std::exchange(deleted, {})) {
    const Table& table = tables[change.table];
    const std::span<std::byte> rows(states[change.table]);
    begin_rows(table, rows.subspan(change.row * table.row_bytes(), table.row_bytes()));
  }
  return states;
}

// The same rows in a job of their own; threads keep their places.
void Store::Impl::clear_rows() {
  const Unpinned for_the_worker(*this);
  States states = cleared_states();
  auto rows = std::make_unique<SharedRows>(options.worker, next_job("rows"), tables, shared->plan(),
                                           shared->use(), std::move(states), shared->now());
  std::vector<const ThreadRows*> all;
  for (const auto& thread : threads) all.push_back(thread.get());
  rows->set_threads(std::move(all));
  shared = std::move(rows);
  opened.store(shared.get(), std::memory_order_release);
}

// One thread makes what all have of them, on each thread's node.
void Store::Impl::use(std::unique_ptr<SharedRows> rows, std::span<const Recording> recorded) {
  std::vector<std::unique_ptr<ThreadRows>> made;
  std::vector<const ThreadRows*> all;
  for (uint32_t t = 0; t < options.threads; ++t) {
    made.push_back(
        std::make_unique<ThreadRows>(recorded[t], *rows, tables,
                                     PlaceSettings{.every_row = options.static_index,
                                                   .caches = options.thread_caches,
                                                   .cache_threshold = options.cache_threshold,
                                                   .threads = options.threads,
                                                   .os_node = os_node_of(t)}));
    all.push_back(made.back().get());
  }
  rows->set_threads(std::move(all));
  threads = std::move(made);
  told = {};
  shared = std::move(rows);
  opened.store(shared.get(), std::memory_order_release);
}

Store::Store(StoreOptions options) {
  check_options(options);
  impl_ = std::make_unique<Impl>(std::move(options));
}

Store::~Store() {
  if (impl_) PHUB_CHECK(impl_->meeting.is_empty());
}

std::vector<std::byte> Store::table(uint32_t table) {
  Impl& i = *impl_;
  i.check_table(table);
  std::vector<std::byte> rows;
  i.check_clocked("table()");
  i.meeting.alone([&] {
    i.open();
    rows = std::move(i.shared->states(i.next_job("state"))[table]);
  });
  return rows;
}

std::vector<uint64_t> Store::rows(uint32_t table) const {
  const Impl& i = *impl_;
  i.check_table(table);
  if (i.names[table]) return i.names[table]->row_at();
  std::vector<uint64_t> rows(i.tables[table].rows);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

StoreStats Store::stats() const {
  StoreStats stats;
  stats.clocks = impl_->clocks;
  stats.placed = impl_->placed;
  for (uint32_t t = 0; t < impl_->options.threads; ++t) {
    if (t >= impl_->threads.size()) continue;
    const ThreadRows& rows = *impl_->threads[t];
    stats.in_sequence += rows.in_sequence();
    stats.by_index += rows.by_index();
    stats.dynamic += rows.dynamic;
    stats.places += rows.places().size();
    stats.cached += rows.cached();
  }
  if (impl_->shared) stats.worker = impl_->shared->stats();
  return stats;
}

StoreThread::StoreThread(Store& store, uint32_t thread) {
  store.impl_->meeting.enter(thread);
  impl_ = std::make_unique<Impl>(*store.impl_, thread);
  store.impl_->pin(thread);
  if (store.impl_->opened.load(std::memory_order_acquire) != nullptr) impl_->use_rows();
}

StoreThread::~StoreThread() {
  impl_->store.unpin();
  impl_->store.meeting.leave(impl_->thread);
}

void StoreThread::Impl::use_rows() {
  shared = store.opened.load(std::memory_order_acquire);
  rows = store.threads[thread].get();
  now = shared->now();
  if (mode != Mode::kGathering) mode = store.watch.is_recording() ? Mode::kAgain : Mode::kReal;
}

void StoreThread::Impl::check(uint32_t table, std::span<const uint64_t> rows,
                              kernels::ValueType type, size_t bytes) const {
  store.check_table(table);
  const Table& of = store.tables[table];
  if (type != of.fold.type) {
    fail(ErrorCode::kInvalid, "table '{}' has values of type {}, and was accessed with others",
         of.name, store.options.tables[table].type);
  }
  if (bytes != rows.size() * of.row_bytes()) {
    fail(ErrorCode::kInvalid,
         "{} rows of table '{}', which have {} values each, were accessed with {} bytes",
         rows.size(), of.name, of.columns, bytes);
  }
}

std::span<const uint64_t> StoreThread::Impl::places(uint32_t table,
                                                    std::span<const uint64_t> of_rows) {
  const Table& of = store.tables[table];
  const std::optional<RowNames>& names = store.names[table];
  for (const uint64_t row : of_rows) {
    if (names ? names->place(row).has_value() : row < of.rows) continue;
    if (!names) {
      fail(ErrorCode::kInvalid, "table '{}' has no row {}, it has {}", of.name, row, of.rows);
    }
    fail(ErrorCode::kInvalid,
         "table '{}' has no row {}: it was deleted, or not added before the clock before", of.name,
         row);
  }
  if (!names) return of_rows;
  found.clear();
  for (const uint64_t row : of_rows) found.push_back(*names->place(row));
  return found;
}

void StoreThread::Impl::change(RowChange change) {
  const auto table = static_cast<uint32_t>(change.table);
  store.check_table(table);
  const Table& of = store.tables[table];
  if (of.spare == 0 || change.row == kNoRow) {
    fail(ErrorCode::kInvalid,
         "row {} of table '{}' is added or deleted: tables that change have spare rows, and their "
         "rows other numbers than kNoRow",
         change.row, of.name);
  }
  const bool adds = change.change == RowChange::kAdd;
  const RowNames& names = *store.names[table];
  std::vector<RowChange>& asked = store.asked[thread];
  if (names.place(change.row).has_value() == adds) {
    fail(ErrorCode::kInvalid, "table '{}' has {} row {}", of.name, adds ? "already" : "no",
         change.row);
  }
  uint64_t left = names.free_places();
  for (const RowChange& before : asked) {
    if (before.table != change.table) continue;
    if (before.row == change.row) {
      fail(ErrorCode::kInvalid, "row {} of table '{}' is {} twice in a clock", change.row, of.name,
           adds ? "added" : "deleted");
    }
    left = before.change == RowChange::kDelete ? left + 1 : left - std::min<uint64_t>(left, 1);
  }
  if (adds) store.check_spare(table, change.row, left);
  if (mode == Mode::kVirtual) return;
  asked.push_back(change);
}

void StoreThread::Impl::record(Step step) {
  Recording& recording = store.recordings[thread];
  if (recording.size() == kMaxSteps) {
    if (mode == Mode::kAgain) return;
    fail(ErrorCode::kInvalid, "more than {} calls were recorded: an iteration must be shorter",
         kMaxSteps);
  }
  recording.push_back(step);
}

bool StoreThread::Impl::prepare(Access access, uint32_t table, std::span<const uint64_t> of) {
  if (records()) {
    if (mode != Mode::kVirtual && shared != nullptr) shared->check_promise(table, of, access);
    for (const uint64_t row : of) record({.access = access, .table = table, .row = row});
    if (mode == Mode::kVirtual) return false;
  }
  if (shared != nullptr) return true;
  store.meeting.alone([this] { store.open(); });
  use_rows();
  return true;
}

void StoreThread::Impl::read(uint32_t table, uint64_t row, std::byte* into) {
  Place* const place = rows->find(table, row);
  if (place == nullptr) {
    ++rows->dynamic;
    return shared->read(thread, table, row, into);
  }
  const Table& of = store.tables[table];
  const uint64_t bytes = of.row_bytes();
  if (place->copy == nullptr) {
    std::memcpy(into, shared->state(place->at), bytes);
  } else {
    if (place->copied_at != now) {
      std::memcpy(place->copy, shared->state(place->at), bytes);
      place->copied_at = now;
    }
    std::memcpy(into, place->copy, bytes);
  }
  if (place->updated_at == now) kernels::fold(of.fold, place->update, into, of.row_words());
}

void StoreThread::Impl::update(uint32_t table, uint64_t row, const std::byte* by) {
  Place* const place = rows->find(table, row);
  if (place == nullptr) {
    ++rows->dynamic;
    return shared->update(thread, table, row, by);
  }
  if (!place->may_update) shared->check_promise(table, {&row, 1}, Access::kUpdate);  // throws
  const Table& of = store.tables[table];
  if (place->updated_at == now) {
    kernels::fold(of.fold, by, place->update, of.row_words());
  } else {
    std::memcpy(place->update, by, of.row_bytes());
    place->updated_at = now;
  }
}

void StoreThread::read_bytes(uint32_t table, std::span<const uint64_t> rows,
                             kernels::ValueType type, std::span<std::byte> into) {
  Impl& i = *impl_;
  i.check(table, rows, type, into.size());
  rows = i.places(table, rows);
  if (i.mode != Impl::Mode::kReal && !i.prepare(Access::kRead, table, rows)) return;
  if (rows.size() > 1) i.shared->check_promise(table, rows, Access::kRead);
  const uint64_t bytes = i.store.tables[table].row_bytes();
  for (size_t r = 0; r < rows.size(); ++r) i.read(table, rows[r], into.data() + r * bytes);
}

void StoreThread::update_bytes(uint32_t table, std::span<const uint64_t> rows,
                               kernels::ValueType type, std::span<const std::byte> by) {
  Impl& i = *impl_;
  i.check(table, rows, type, by.size());
  rows = i.places(table, rows);
  if (i.mode != Impl::Mode::kReal && !i.prepare(Access::kUpdate, table, rows)) return;
  if (rows.size() > 1) i.shared->check_promise(table, rows, Access::kUpdate);
  const uint64_t bytes = i.store.tables[table].row_bytes();
  for (size_t r = 0; r < rows.size(); ++r) i.update(table, rows[r], by.data() + r * bytes);
}

// After an error every call comes here again, or to prepare(), and is told the same.
void StoreThread::Impl::meet(const char* what, const std::function<void()>& work) {
  try {
    store.meeting.meet(what, work);
  } catch (...) {
    mode = Mode::kClosed;
    shared = nullptr;
    throw;
  }
}

void StoreThread::clock() {
  Impl& i = *impl_;
  if (i.records()) i.record({});
  if (i.mode == Impl::Mode::kVirtual) return;
  i.meet("clock", [&store = i.store] { store.clock(); });
  i.use_rows();
}

void StoreThread::Impl::begin(Mode recorded) {
  if (mode == Mode::kGathering || mode == Mode::kVirtual) {
    fail(ErrorCode::kInvalid, "an iteration is being recorded already: finish() ends that");
  }
  store.meeting.alone([this] { store.watch.stop(); });  // throws, if the store has ended
  store.recordings[thread].clear();
  mode = recorded;
}

void StoreThread::begin_virtual() { impl_->begin(Impl::Mode::kVirtual); }
void StoreThread::begin_gathering() { impl_->begin(Impl::Mode::kGathering); }

void StoreThread::add_row(uint32_t table, uint64_t row) {
  impl_->change({RowChange::kAdd, table, row});
}

void StoreThread::delete_row(uint32_t table, uint64_t row) {
  impl_->change({RowChange::kDelete, table, row});
}

bool StoreThread::has_row(uint32_t table, uint64_t row) const {
  const Store::Impl& store = impl_->store;
  store.check_table(table);
  const std::optional<RowNames>& names = store.names[table];
  return names ? names->place(row).has_value() : row < store.tables[table].rows;
}

bool StoreThread::is_virtual() const { return impl_->mode == Impl::Mode::kVirtual; }

void StoreThread::finish() {
  Impl& i = *impl_;
  if (i.mode != Impl::Mode::kGathering && i.mode != Impl::Mode::kVirtual) {
    fail(ErrorCode::kInvalid, "finish(): no iteration is being recorded");
  }
  i.meet("finish", [&store = i.store] { store.place_anew(false); });
  i.mode = Impl::Mode::kReal;
  i.use_rows();
}

}  // namespace phub::iterstore

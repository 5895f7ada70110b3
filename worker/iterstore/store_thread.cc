// A thread's calls.
#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "transport/error.h"
#include "worker/iterstore/store_impl.h"

namespace phub::iterstore {
namespace {

constexpr size_t kMaxSteps = 0x7fffffff;

}  // namespace

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
  // All threads of the process; again, if a thread of some rank came to it because it strays.
  void meet(const char* what, const std::function<void()>& work);
  // The table is narrow, and the row may not be accessed: afterwards all may.
  void stray(uint32_t table);
  // The row's key was pushed already: afterwards it was not.
  void come_late();
  bool is_unheld(uint32_t key) const { return early && !rows->holds(key); }
  void copy_state(const RowPlace& at, std::byte* into, uint64_t bytes);
  void let_go();  // of what the calls so far have done with
  void use_rows();
  void read(uint32_t table, uint64_t row, std::byte* into);
  void update(uint32_t table, uint64_t row, const std::byte* by);

  Store::Impl& store;
  const uint32_t thread;
  const std::thread::id runs_on = std::this_thread::get_id();
  Mode mode = Mode::kClosed;
  SharedRows* shared = nullptr;
  ThreadRows* rows = nullptr;
  uint64_t now = 0;
  bool early = false;  // keys are pushed when nobody holds them
  std::vector<uint64_t> found;
};

StoreThread::StoreThread(Store& store, uint32_t thread) {
  store.impl_->meeting.enter(thread);
  impl_ = std::make_unique<Impl>(*store.impl_, thread);
  store.impl_->pin(thread);
  store.impl_->members[thread] = impl_.get();
  if (store.impl_->opened.load(std::memory_order_acquire) != nullptr) impl_->use_rows();
}

StoreThread::~StoreThread() {
  if (std::this_thread::get_id() == impl_->runs_on) impl_->store.unpin();
  impl_->store.members[impl_->thread] = nullptr;
  impl_->store.meeting.leave(impl_->thread);
}

void StoreThread::Impl::use_rows() {
  shared = store.opened.load(std::memory_order_acquire);
  rows = store.threads[thread].get();
  now = shared->now();
  early = shared->pushes_early();
  if (mode == Mode::kGathering || mode == Mode::kVirtual) return;
  const Mode next = store.watch.is_recording() ? Mode::kAgain : Mode::kReal;
  if (next == Mode::kAgain && mode != next) store.recordings[thread].clear();
  mode = next;
}

void Store::Impl::tell_threads() {
  for (StoreThread::Impl* const member : members) {
    if (member != nullptr && member->shared != nullptr) member->use_rows();
  }
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
  if (!names) {
    for (const uint64_t row : of_rows) {
      if (row < of.rows) continue;
      fail(ErrorCode::kInvalid, "table '{}' has no row {}, it has {}", of.name, row, of.rows);
    }
    return of_rows;
  }
  found.clear();
  for (const uint64_t row : of_rows) {
    const std::optional<uint64_t> place = names->place(row);
    if (!place) {
      fail(ErrorCode::kInvalid,
           "table '{}' has no row {}: it was deleted, or not added before the clock before",
           of.name, row);
    }
    found.push_back(*place);
  }
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
  AskedChanges& asked = store.asked[thread];
  store.meeting.alone([] {});  // throws, if the store has ended
  if (names.place(change.row).has_value() == adds) {
    fail(ErrorCode::kInvalid, "table '{}' has {} row {}", of.name, adds ? "already" : "no",
         change.row);
  }
  if (asked.rows.contains({change.table, change.row})) {
    fail(ErrorCode::kInvalid, "row {} of table '{}' is {} twice in a clock", change.row, of.name,
         adds ? "added" : "deleted");
  }
  int64_t& more = asked.more_places[change.table];
  if (adds) store.check_spare(table, change.row, names.free_places() + static_cast<uint64_t>(more));
  if (mode == Mode::kVirtual) return;
  more += adds ? -1 : 1;
  asked.rows.emplace(change.table, change.row);
  asked.changes.push_back(change);
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
    for (const uint64_t row : of) record({.access = access, .table = table, .row = row});
    if (mode == Mode::kVirtual) return false;
  }
  if (shared != nullptr) return true;
  store.meeting.alone([this] { store.open(); });
  use_rows();
  return true;
}

void StoreThread::Impl::copy_state(const RowPlace& at, std::byte* into, uint64_t bytes) {
  const auto guard = is_unheld(at.key) ? shared->lock(at.key) : std::unique_lock<std::mutex>();
  std::memcpy(into, shared->state(at), bytes);
}

void StoreThread::Impl::let_go() {
  while (early && rows->is_done_with_one()) shared->let_go(rows->let_go());
}

void StoreThread::Impl::read(uint32_t table, uint64_t row, std::byte* into) {
  Place* const place = rows->find(table, row);
  if (place == nullptr) {
    ++rows->dynamic;
    if (!shared->allows(table, row, Access::kRead)) stray(table);
    return shared->read(thread, table, row, into);
  }
  const Table& of = store.tables[table];
  const uint64_t bytes = of.row_bytes();
  if (place->copy == nullptr) {
    copy_state(place->at, into, bytes);
  } else {
    if (place->copied_at != now) {
      copy_state(place->at, place->copy, bytes);
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
    if (!shared->allows(table, row, Access::kUpdate)) stray(table);
    if (shared->update(thread, table, row, by)) return;
    come_late();
    PHUB_CHECK(shared->update(thread, table, row, by));
    return;
  }
  if (!place->may_update) stray(table);
  auto guard =
      is_unheld(place->at.key) ? shared->lock(place->at.key) : std::unique_lock<std::mutex>();
  if (guard.owns_lock() && shared->is_pushed(place->at.key)) {
    guard = {};
    come_late();
  }
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
  const uint64_t bytes = i.store.tables[table].row_bytes();
  for (size_t r = 0; r < rows.size(); ++r) i.read(table, rows[r], into.data() + r * bytes);
  i.let_go();
}

void StoreThread::update_bytes(uint32_t table, std::span<const uint64_t> rows,
                               kernels::ValueType type, std::span<const std::byte> by) {
  Impl& i = *impl_;
  i.check(table, rows, type, by.size());
  rows = i.places(table, rows);
  if (i.mode != Impl::Mode::kReal && !i.prepare(Access::kUpdate, table, rows)) return;
  const uint64_t bytes = i.store.tables[table].row_bytes();
  for (size_t r = 0; r < rows.size(); ++r) i.update(table, rows[r], by.data() + r * bytes);
  i.let_go();
}

// After an error every call comes here again, or to prepare(), and is told the same.
void StoreThread::Impl::meet(const char* what, const std::function<void()>& work) {
  try {
    for (;;) {
      const uint64_t before = store.moves;
      store.meeting.meet(what, [&] {
        if (!store.widen()) work();
      });
      if (store.moves == before) return;
      use_rows();
      if (what == nullptr) return;
    }
  } catch (...) {
    mode = Mode::kClosed;
    shared = nullptr;
    throw;
  }
}

void StoreThread::Impl::stray(uint32_t table) {
  store.meeting.alone([&] { store.strays.insert(table); });
  meet(nullptr, [] {});
}

void StoreThread::Impl::come_late() {
  store.meeting.alone([&] { store.late = true; });
  meet(nullptr, [] {});
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
  store.saving.check_may_record(store.placed);
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

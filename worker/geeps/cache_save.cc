// The local tables in the rank's own state. A table's entry has its rows, f32 in the order of their
// keys, and then the table's digest.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_impl.h"
#include "worker/geeps/tables.h"

namespace phub::geeps {
namespace {

bool is_saved(const TableSpec& spec) { return spec.local && !spec.scratch; }
std::string entry_of(const TableSpec& spec) { return "geeps/" + spec.name; }
size_t row_bytes(const Table& table) { return table.floats() * sizeof(float); }

}  // namespace

void Cache::Impl::check_saved_size() const {
  const std::vector<Table>& tables = mover_.tables;
  const bool saves = std::ranges::any_of(tables, [&](const Table& table) {
    return !table.spec.local && mover_.exchange.saved_after(table.key) != Exchange::kNever;
  });
  if (!saves) return;
  uint64_t bytes = 0;
  for (const Table& table : tables) {
    if (is_saved(table.spec)) bytes += row_bytes(table);
  }
  if (bytes <= kMaxStateBytes) return;
  fail(
      ErrorCode::kInvalid,
      "the local tables have {} bytes, and what a rank saves has at most {}: mark those as scratch "
      "that no iteration needs from the one before, or join without a saver",
      bytes, kMaxStateBytes);
}

void Cache::Impl::restore_local() {
  for (Table& table : mover_.tables) {
    if (!is_saved(table.spec)) continue;
    const auto saved = mover_.exchange.restored(entry_of(table.spec));
    if (!saved) continue;  // the job begins, or the rank is new
    const uint64_t digest = digest_of(table.spec);
    const size_t bytes = row_bytes(table);
    if (saved->size() != bytes + sizeof digest ||
        std::memcmp(saved->data() + bytes, &digest, sizeof digest) != 0) {
      fail(ErrorCode::kMismatch,
           "local table '{}' was saved with other rows, in {} bytes, than the {} rows of {} floats "
           "that it has here",
           table.spec.name, saved->size(), table.spec.keys.size(), table.row_floats);
    }
    std::memcpy(table.own_rows.floats().data(), saved->data(), bytes);
  }
}

// After a round that is to be saved nothing may be clocked before its state was taken, and with
// tables by branch after any round.
void Cache::Impl::check_may_clock(const Table& table) const {
  if (has_branches_ && table.clocks > rounds_) {
    fail(ErrorCode::kInvalid,
         "TableClock of '{}', before save_point() after its clock {}: there are tables by branch, "
         "so "
         "clock every table once, then call save_point()",
         table.spec.name, table.clocks);
  }
  if (table.clocks < mover_.exchange.saved_after(table.key)) return;
  fail(ErrorCode::kInvalid,
       "TableClock of '{}', before the state after its clock {} was saved: clock every table once, "
       "then call save_point()",
       table.spec.name, table.clocks);
}

bool Cache::Impl::must_save() const {
  return std::ranges::all_of(mover_.tables, [&](const Table& table) {
    return table.spec.local || table.clocks >= mover_.exchange.saved_after(table.key);
  });
}

void Cache::Impl::check_at_save_point() {
  for (const Held& held : held_) {
    if (held.call == Call::kRead) continue;
    fail(ErrorCode::kInvalid, "save_point with a buffer of '{}' in use", table_of(held).spec.name);
  }
  for (const Table& table : mover_.tables) {
    if (!table.unclocked) continue;
    fail(ErrorCode::kInvalid, "save_point with updates of '{}' that were not clocked",
         table.spec.name);
  }
}

std::optional<RankState> Cache::Impl::local_state() {
  {
    const Lock lock(*this);
    mover_.throw_if_failed();
    check_at_save_point();
    if (virtual_ || !must_save()) return std::nullopt;
  }
  wait_all();  // then local rows are not written by others than this thread
  if (work_.in_stream()) work_.stream()->synchronize();
  store_dirty([](const Table& table) { return is_saved(table.spec); });
  RankState state;
  for (Table& table : mover_.tables) {
    if (!is_saved(table.spec)) continue;
    for (const Table::Part& part : table.parts) part.saved->wait();
    const auto rows = std::as_bytes(table.own_rows.floats());
    const uint64_t digest = digest_of(table.spec);
    std::vector<std::byte>& entry = state[entry_of(table.spec)];
    entry.reserve(rows.size() + sizeof digest);
    entry.assign(rows.begin(), rows.end());
    const auto end = std::as_bytes(std::span(&digest, 1));
    entry.insert(entry.end(), end.begin(), end.end());
  }
  save_branches(state);
  return state;
}

}  // namespace phub::geeps

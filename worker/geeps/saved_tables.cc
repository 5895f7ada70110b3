#include "worker/geeps/saved_tables.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "transport/error.h"
#include "worker/geeps/tables.h"

namespace phub::geeps {
namespace {

bool is_saved(const TableSpec& spec) { return spec.local && !spec.scratch; }
std::string entry_of(const TableSpec& spec) { return "geeps/" + spec.name; }
size_t row_bytes(const Table& table) { return table.floats() * sizeof(float); }

}  // namespace

void check_saved_size(const Mover& mover) {
  const std::vector<Table>& tables = mover.tables;
  const bool saves = std::ranges::any_of(tables, [&](const Table& table) {
    return !table.spec.local &&
           mover.exchange.saved_after(table.pieces.front().key) != Exchange::kNever;
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

void restore_local(Mover& mover) {
  for (Table& table : mover.tables) {
    if (!is_saved(table.spec)) continue;
    const auto saved = mover.exchange.restored(entry_of(table.spec));
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

bool must_save(const Mover& mover) {
  return std::ranges::all_of(mover.tables, [&](const Table& table) {
    return table.spec.local || table.clocks >= mover.exchange.saved_after(table.pieces.front().key);
  });
}

RankState local_state(const Mover& mover, OwnCopies& copies) {
  copies.settle([](const Table& table) { return is_saved(table.spec); });
  RankState state;
  for (const Table& table : mover.tables) {
    if (!is_saved(table.spec)) continue;
    const auto rows = std::as_bytes(table.own_rows.floats());
    const uint64_t digest = digest_of(table.spec);
    std::vector<std::byte>& entry = state[entry_of(table.spec)];
    entry.reserve(rows.size() + sizeof digest);
    entry.assign(rows.begin(), rows.end());
    const auto end = std::as_bytes(std::span(&digest, 1));
    entry.insert(entry.end(), end.begin(), end.end());
  }
  return state;
}

}  // namespace phub::geeps

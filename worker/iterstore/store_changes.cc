// Rows that are added and deleted, and accesses that stray from what was recorded.
#include <algorithm>
#include <utility>

#include "transport/error.h"
#include "worker/iterstore/one_round.h"
#include "worker/iterstore/store_impl.h"

namespace phub::iterstore {
namespace {

// What a rank says before: how many changes, of which tables.
struct ChangeHead {
  uint64_t changes = 0;
  uint64_t spare = 0;  // the places of all tables; the same on all ranks
};

}  // namespace

std::vector<RowChange> Store::Impl::changes_of_all() {
  const Unpinned for_the_workers(*this);
  const auto rank = static_cast<size_t>(options.worker.rank);
  std::vector<ChangeHead> heads(options.worker.spec.world_size);
  heads[rank].changes = announced.size();
  for (const Table& table : tables) heads[rank].spare = heads[rank].spare * 1'000'003 + table.spare;
  std::span<std::byte> bytes = std::as_writable_bytes(std::span(heads));
  unite(options.worker, next_job("changes"), {&bytes, 1});
  uint64_t number = 0, at = 0;
  for (size_t r = 0; r < heads.size(); ++r) {
    if (heads[r].spare != heads[rank].spare) {
      fail(ErrorCode::kInvalid, "rank {} has other spare rows in its tables than rank {}", r, rank);
    }
    if (r == rank) at = number;
    number += heads[r].changes;
  }
  std::vector<RowChange> all(number);
  std::ranges::copy(announced, all.begin() + static_cast<ptrdiff_t>(at));
  announced.clear();
  bytes = std::as_writable_bytes(std::span(all));
  unite(options.worker, next_job("changes"), {&bytes, 1});
  return all;
}

// Ranks ascending, their threads, and calls; first what is deleted, so that its places are free.
void Store::Impl::change_rows(const Tally& with) {
  if (with.changes == 0) return;
  const std::vector<RowChange> all = changes_of_all();
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
  carried = carried + shared->tally_of_all();
  change_rows(carried);  // that clock is the last of its job
  carried.changes = 0;
  for (const RowChange& change : std::exchange(deleted, {})) {
    const Table& table = tables[change.table];
    const std::span<std::byte> rows(states[change.table]);
    begin_rows(table, rows.subspan(change.row * table.row_bytes(), table.row_bytes()));
  }
  return states;
}

void Store::Impl::clear_rows() {
  const Unpinned for_the_worker(*this);
  States states = cleared_states();
  move_rows(shared->plan(), std::move(states), shared->pushes_early());
}

// ---- Accesses to rows of fixed tables that were not recorded.

// All of its ranks are between the same clocks, and what they have pushed since the first of these
// is taken back: so the state is that of the middle of this iteration, for those who stray, too.
bool Store::Impl::widen() {
  if (!shared || !shared->anyone_strays(late || !strays.empty())) return false;
  const Unpinned for_the_workers(*this);
  std::vector<int32_t> wide(tables.size());
  for (const uint32_t table : strays) wide[table] = 1;
  const std::span<std::byte> of_all = std::as_writable_bytes(std::span(wide));
  unite(options.worker, next_job("strays"), {&of_all, 1});
  shared->retract();
  States states = shared->states(next_job("state"));
  carried = carried + shared->tally_of_all();
  RowPlan plan = shared->plan();
  for (uint32_t table = 0; table < tables.size(); ++table) {
    if (wide[table] == 0) continue;
    plan.widen(table);
    for (const auto& thread : threads) thread->allow_updates(table);
    ++widened;
  }
  move_rows(std::move(plan), std::move(states), false);
  strays.clear();
  late = false;
  ++moves;
  return true;
}

}  // namespace phub::iterstore

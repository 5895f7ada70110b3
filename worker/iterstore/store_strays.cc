// Accesses to rows of fixed tables that were not recorded.
#include <utility>

#include "worker/iterstore/one_round.h"
#include "worker/iterstore/store_impl.h"

namespace phub::iterstore {

// All of its ranks are between the same clocks, and have pushed nothing since the first of these:
// so the state is that of the middle of this iteration, for those who stray, too.
bool Store::Impl::widen() {
  if (!shared || !shared->anyone_strays(!strays.empty())) return false;
  const Unpinned for_the_workers(*this);
  std::vector<int32_t> wide(tables.size());
  for (const uint32_t table : strays) wide[table] = 1;
  const std::span<std::byte> of_all = std::as_writable_bytes(std::span(wide));
  unite(options.worker, next_job("strays"), {&of_all, 1});
  States states = shared->states(next_job("state"));
  carried = carried + shared->told();
  RowPlan plan = shared->plan();
  for (uint32_t table = 0; table < tables.size(); ++table) {
    if (wide[table] == 0) continue;
    plan.widen(table);
    for (const auto& thread : threads) thread->allow_updates(table);
    ++widened;
  }
  move_rows(std::move(plan), std::move(states));
  strays.clear();
  return true;
}

}  // namespace phub::iterstore

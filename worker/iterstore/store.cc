#include "worker/iterstore/store.h"

#include <fmt/format.h>

#include <cstdio>
#include <numeric>
#include <utility>

#include "numa/host.h"
#include "numa/memory.h"
#include "transport/error.h"
#include "worker/iterstore/cores.h"
#include "worker/iterstore/one_round.h"
#include "worker/iterstore/row_plan.h"
#include "worker/iterstore/store_impl.h"

namespace phub::iterstore {

Store::Impl::Impl(StoreOptions store_options)
    : options(std::move(store_options)),
      tables(checked_tables(options.tables)),
      meeting(options.threads),
      saving(options.worker),
      watch(options.gather_again, options.worker.spec.world_size),
      asked(options.threads),
      members(options.threads),
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

void Store::Impl::open() {
  check_not_abandoned();
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
  check_not_abandoned();
  check_clocked("finish()");
  const Unpinned for_the_workers(*this);
  States states = shared ? cleared_states() : first_states(tables);
  Use mine = use_of(recordings, tables);
  if (again) keep_promise(mine, shared->use(), tables);
  const AllRecorded all = use_of_all(options.worker, next_job("accesses"), tables, mine,
                                     options.host == 0 ? numa::this_host() : options.host);
  const bool lock_step = options.worker.spec.consistency == "bsp";
  RowPlan plan(tables, &all.use,
               {.placement = options.placement,
                .narrow = lock_step,
                .batches = options.batches,
                .sparse_ranks = lock_step ? 0 : options.worker.spec.world_size,
                .chunk_elements = options.worker.spec.chunk_elements,
                .rank_hosts = all.hosts});
  // The job before is left only when all ranks are in this one.
  use(std::make_unique<SharedRows>(options.worker, name_of_rows(), tables, std::move(plan),
                                   std::move(mine), std::move(states), 1, options.push_early,
                                   saving.is_on() ? &saving : nullptr),
      recordings);
  if (saving.is_on()) {
    clocks = shared->goes_on_after().value_or(clocks);
    saved = shared.get();
  }
  for (Recording& recording : recordings) recording = {};
  watch.placed(all.clocks);
  carried = {};
  ++placed;
}

// Whoever goes on finds the job by its name, whatever came before it in that run.
std::string Store::Impl::name_of_rows() {
  return saving.is_on() ? options.worker.spec.name + ".rows" : next_job("rows");
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

Tally Store::Impl::own_tally() {
  const Tally all = accesses();
  Tally mine = all - std::exchange(counted, all);
  mine.ranks = 1;
  for (const AskedChanges& of : asked) mine.changes += static_cast<int64_t>(of.changes.size());
  return mine;
}

void Store::Impl::clock() {
  open();
  const Tally before = shared->clock(own_tally(), meeting) + std::exchange(carried, {});
  for (const auto& rows : threads) rows->clock();
  shared->hold();
  ++clocks;
  change_rows(before);
  for (AskedChanges& of : asked) {
    announced.insert(announced.end(), of.changes.begin(), of.changes.end());
    of = {};
  }
  shared->save_if_due(clocks);
  if (!deleted.empty()) clear_rows();
  if (watch.after_clock(before)) place_anew(true);
}

// One thread makes what all have of them, on each thread's node.
void Store::Impl::use(std::unique_ptr<SharedRows> rows, std::span<const Recording> recorded) {
  std::vector<std::unique_ptr<ThreadRows>> made;
  std::vector<const ThreadRows*> all;
  for (uint32_t t = 0; t < options.threads; ++t) {
    made.push_back(std::make_unique<ThreadRows>(recorded[t], *rows, tables,
                                                PlaceSettings{.every_row = options.static_index,
                                                              .holds = options.push_early,
                                                              .threads = options.threads,
                                                              .os_node = os_node_of(t)}));
    all.push_back(made.back().get());
  }
  rows->set_threads(std::move(all));
  const std::unique_ptr<SharedRows> before = replace(std::move(rows));
  threads = std::move(made);
  counted = {};
}

std::unique_ptr<SharedRows> Store::Impl::replace(std::unique_ptr<SharedRows> rows) {
  const std::lock_guard lock(replacing);
  check_not_abandoned();
  std::swap(shared, rows);
  opened.store(shared.get(), std::memory_order_release);
  return rows;
}

void Store::Impl::check_not_abandoned() const {
  if (!abandoned) return;
  fail(ErrorCode::kFenced, "store '{}' was abandoned", options.worker.spec.name);
}

// `saved` is one that was replaced, or is `shared`; it lives as long as the store.
void Store::Impl::abandon() noexcept {
  const std::lock_guard lock(replacing);
  abandoned = true;
  SharedRows* const first = saved;
  if (first != nullptr) first->abandon();
  if (shared && shared.get() != first) shared->abandon();
}

void Store::Impl::move_rows(RowPlan plan, States states, bool early) {
  auto rows =
      std::make_unique<SharedRows>(options.worker, next_job("rows"), tables, std::move(plan),
                                   shared->use(), std::move(states), shared->now(), early);
  std::vector<const ThreadRows*> all;
  for (const auto& thread : threads) all.push_back(thread.get());
  rows->set_threads(std::move(all));
  rows->take_updates(*shared);
  std::unique_ptr<SharedRows> before = replace(std::move(rows));
  if (before->saves()) {
    fmt::print(stderr,
               "phub: store '{}' is not saved after clock {}: an access strayed from what was "
               "recorded\n",
               options.worker.spec.name, clocks.load());
    kept = std::move(before);
  }
}

Store::Store(StoreOptions options) {
  check_options(options);
  impl_ = std::make_unique<Impl>(std::move(options));
}

Store::~Store() {
  if (!impl_) return;
  PHUB_CHECK(impl_->meeting.is_empty());
  SharedRows* const saved = impl_->saved;
  if (saved != nullptr && impl_->meeting.has_failed()) saved->abandon();
}

std::vector<std::byte> Store::table(uint32_t table) {
  Impl& i = *impl_;
  i.check_table(table);
  std::vector<std::byte> rows;
  i.check_clocked("table()");
  i.meeting.alone([&] {
    i.open();
    while (i.widen()) i.tell_threads();
    rows = std::move(i.shared->states(i.next_job("state"))[table]);
    i.shared->end_question();
    i.shared->save_if_due(i.clocks);
  });
  return rows;
}

void Store::abandon() noexcept { impl_->abandon(); }

uint64_t Store::clocks() const { return impl_->clocks; }

std::optional<std::span<const std::byte>> Store::restored(std::string_view name) const {
  const SharedRows* const rows = impl_->saved;
  return rows == nullptr ? std::nullopt : rows->restored(name);
}

uint64_t Store::table_bytes(uint32_t table) const {
  impl_->check_table(table);
  return impl_->tables[table].bytes();
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
  stats.widened = impl_->widened;
  for (uint32_t t = 0; t < impl_->options.threads; ++t) {
    if (t >= impl_->threads.size()) continue;
    const ThreadRows& rows = *impl_->threads[t];
    stats.in_sequence += rows.in_sequence();
    stats.by_index += rows.by_index();
    stats.dynamic += rows.dynamic;
    stats.places += rows.places().size();
    stats.cached += rows.cached();
  }
  if (!impl_->shared) return stats;
  stats.pushed_early = impl_->shared->pushed_early();
  stats.worker = impl_->shared->stats();
  return stats;
}

}  // namespace phub::iterstore

#include "worker/geeps/cache_waits.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

namespace phub::geeps {

void CacheWaits::stop() {
  {
    Lock lock(*this);
    lock.wait(
        [&] {  // for released buffers and clocked updates
          return mover_.failure.happened() ||
                 std::ranges::all_of(mover_.tables, [](const Table& table) {
                   return table.jobs == 0 && table.handed_over == table.clocks;
                 });
        },
        {});
  }
  driver_->stop();
}

void CacheWaits::for_event(const Event& event, uint32_t table) {
  if (event.done()) return;
  if (!work_.in_stream()) {
    const uint64_t begin = trace_now_ns();
    event.wait();
    lost_ns_ += trace_now_ns() - begin;
    if (mover_.trace)
      mover_.trace->add(CacheTrack::kWait, "wait", table, mover_.tables[table].clocks, begin);
    return;
  }
  if (!options_.measure_stalls && !mover_.trace) return work_.wait(event);
  const auto begin = std::make_shared<uint64_t>(0);
  const uint64_t clock = mover_.tables[table].clocks;
  work_.stream()->call([begin] { *begin = trace_now_ns(); });
  work_.wait(event);
  work_.stream()->call([this, begin, table, clock] {
    lost_ns_ += trace_now_ns() - *begin;
    if (mover_.trace) mover_.trace->add(CacheTrack::kWait, "wait", table, clock, *begin);
  });
}

void CacheWaits::for_memory(Lock& lock, Instance instance, uint32_t table) {
  const std::vector<const Event*> events = mover_.events_before(instance);
  if (events.empty()) return;
  lock.unlock();
  for (const Event* event : events) for_event(*event, table);
  lock.lock();
}

void CacheWaits::for_log(Lock& lock, uint32_t number) {
  const Table& table = mover_.tables[number];
  until(
      lock, number, [&] { return table.handed_over == table.clocks; },
      [&] { return fmt::format("the push of '{}'", table.spec.name); });
}

void CacheWaits::for_results() {
  Lock lock(*this);
  until(
      lock, 0,
      [&] {
        return std::ranges::all_of(mover_.tables, [](const Table& table) {
          return table.jobs == 0 && table.handed_over == table.clocks &&
                 table.version == table.handed_over;
        });
      },
      [] { return "what was clocked"; });
}

std::string CacheWaits::describe_rows(const Table& table, uint64_t back) {
  if (table.spec.local) return fmt::format("rows of '{}'", table.spec.name);
  const uint64_t wanted = table.clocks - std::min(table.clocks, back);
  std::string missing;
  try {
    missing = fmt::format("{}", fmt::join(mover_.exchange.missing_ranks(), ", "));
  } catch (const Error& e) {
    missing = e.what();
  }
  return fmt::format("'{}' as of clock {}: that of clock {} is here. Missing ranks, of {}: {}",
                     table.spec.name, wanted, table.version, mover_.exchange.world_size(),
                     missing.empty() ? "none that is known" : missing);
}

}  // namespace phub::geeps

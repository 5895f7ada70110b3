#include "worker/geeps/cache.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_wait.h"
#include "worker/geeps/tables.h"

namespace phub::geeps {
namespace {

constexpr uint32_t kMostPartitions = 256;  // three threads each

struct Pages {
  uintptr_t begin, end;
  HostUse use;
};

Pages pages(std::span<const float> memory, HostUse use) {
  const uintptr_t page = host_page_bytes();
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t end = begin + memory.size_bytes();
  return {begin / page * page, (end + page - 1) / page * page, use};
}

// What shares pages is one range, and written if a part of it is. What only touches is not: it may
// be mapped otherwise, and a driver takes memory of one kind at a time.
std::vector<Pages> merged(std::vector<Pages> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Pages& a, const Pages& b) { return a.begin < b.begin; });
  std::vector<Pages> merged;
  for (const Pages& range : ranges) {
    if (merged.empty() || range.begin >= merged.back().end) {
      merged.push_back(range);
      continue;
    }
    merged.back().end = std::max(merged.back().end, range.end);
    if (range.use == HostUse::kReadWrite) merged.back().use = range.use;
  }
  return merged;
}

std::vector<RowMap> maps_of(const std::vector<TableSpec>& tables) {
  std::vector<RowMap> maps;
  for (const TableSpec& table : tables) maps.emplace_back(table.keys);
  return maps;
}

}  // namespace

Cache::Impl::Impl(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
                  const CacheOptions& options)
    : device_(device),
      exchange_(exchange),
      options_(options),
      specs_(std::move(tables)),
      maps_(maps_of(specs_)),
      work_(device, options.compute) {
  if (options_.partitions == 0 || options_.partitions > kMostPartitions) {
    fail(ErrorCode::kInvalid, "a cache of {} partitions: there are 1 to {}", options_.partitions,
         kMostPartitions);
  }
  check(specs_);
  const DeviceStats use = device_.stats();
  budget_ = options_.budget_bytes > 0 ? options_.budget_bytes : use.budget_bytes - use.used_bytes;
  budget_ = budget_ / Arena::kAlignment * Arena::kAlignment;
  if (budget_ == 0) fail(ErrorCode::kFull, "{}: no memory is left for the cache", device_.name());
  memory_ = DeviceMemory(device_, budget_, "cache");
  reserved_ = std::make_unique<Arena>(budget_);
  own_stream_ = device_.make_stream("geeps");
  own_rows_ = std::make_unique<HostRows>(device_, *own_stream_);

  std::vector<Pages> exchanged;
  for (const TableSpec& spec : specs_) {
    Table& table = tables_.emplace_back(spec);
    table.partition = static_cast<uint32_t>(tables_.size() - 1) % options_.partitions;
    for (auto* event : {&table.fetched, &table.refreshed, &table.gathered, &table.clocked,
                        &table.logged, &table.saved}) {
      *event = device_.make_event();
    }
    const size_t bytes = table.floats() * sizeof(float);
    if (spec.local) {
      table.own_rows = HostMemory(device_, bytes, spec.name);
      table.rows = table.own_rows.floats().data();
      continue;
    }
    table.key = table_of_key_.size();
    table_of_key_.push_back(static_cast<uint32_t>(tables_.size() - 1));
    if (table.key >= exchange_.keys() || exchange_.elements(table.key) != table.floats()) {
      fail(ErrorCode::kInvalid, "'{}' is not key {} of the exchange, with {} elements", spec.name,
           table.key, table.floats());
    }
    table.loose_log.assign(spec.keys.size(), HostLog::kOld);
    table.kept_twice = spec.max_staleness > exchange_.slack().value_or(spec.max_staleness);
    if (table.kept_twice) {
      table.own_rows = HostMemory(device_, bytes, spec.name);
      table.own_log = HostMemory(device_, bytes, spec.name);
      std::ranges::copy(exchange_.parameters(table.key), table.own_rows.floats().begin());
      copied_at_start_ += bytes;
      table.rows = table.own_rows.floats().data();
      table.log = table.own_log.floats().data();
    } else {
      table.rows = exchange_.parameters(table.key).data();
      table.log = exchange_.gradient(table.key).data();
    }
    // Those of tables that are kept twice, too: other caches of the process may copy them, and
    // neighbours that share a page are pinned together.
    exchanged.push_back(pages(exchange_.parameters(table.key), HostUse::kRead));
    exchanged.push_back(pages(exchange_.gradient(table.key), HostUse::kReadWrite));
  }
  if (table_of_key_.size() != exchange_.keys()) {
    fail(ErrorCode::kInvalid, "{} tables of parameters, but the exchange has {} keys",
         table_of_key_.size(), exchange_.keys());
  }
  if (!options_.trace.empty()) {
    std::vector<std::string> names;
    for (const TableSpec& spec : specs_) names.push_back(spec.name);
    trace_ = std::make_unique<CacheTrace>(options_.trace, exchange_.rank(), std::move(names));
  }
  for (uint32_t i = 0; i < options_.partitions; ++i) {
    Partition& partition = partitions_.emplace_back();
    partition.fetch_stream = device_.make_stream(fmt::format("geeps fetch {}", i));
    partition.store_stream = device_.make_stream(fmt::format("geeps store {}", i));
  }
  for (const Pages& range : merged(std::move(exchanged))) {
    pinned_.emplace_back(device_, reinterpret_cast<const void*>(range.begin),
                         range.end - range.begin, range.use, "memory of the exchange");
  }
  try {
    start_threads();
  } catch (...) {  // there are no more: those that are there end
    stop_threads();
    throw;
  }
}

Cache::Impl::~Impl() {
  stop_threads();
  try {
    if (work_.in_stream()) work_.stream()->synchronize();
    for (Partition& partition : partitions_) {
      partition.fetch_stream->synchronize();
      partition.store_stream->synchronize();
    }
  } catch (...) {  // the device failed: the calls said so
  }
}

// Only one clock's updates are kept in the log.
void Cache::Impl::wait_for_log_handed_over(Lock& lock, uint32_t number) {
  const Table& table = tables_[number];
  if (table.handed_over == table.clocks) return;
  wait_here(
      lock, number, [&] { return table.handed_over == table.clocks; },
      [&] { return fmt::format("the push of '{}'", table.spec.name); });
}

std::string Cache::Impl::describe_read(const Table& table, uint64_t back) {
  if (table.spec.local) return fmt::format("rows of '{}'", table.spec.name);
  const uint64_t wanted = table.clocks - std::min(table.clocks, back);
  std::string missing;
  try {
    missing = fmt::format("{}", fmt::join(exchange_.missing_ranks(), ", "));
  } catch (const Error& e) {
    missing = e.what();
  }
  return fmt::format("'{}' as of clock {}: that of clock {} is here. Missing ranks, of {}: {}",
                     table.spec.name, wanted, table.version, exchange_.world_size(),
                     missing.empty() ? "none that is known" : missing);
}

// The application's work, or its thread, waits.
void Cache::Impl::wait_for(const Event& event, uint32_t table) {
  if (event.done()) return;
  if (!work_.in_stream()) {
    const uint64_t begin = trace_now_ns();
    event.wait();
    stalled_ns_ += trace_now_ns() - begin;
    if (trace_) trace_->add(CacheTrack::kWait, "wait", table, tables_[table].clocks, begin);
    return;
  }
  if (!options_.measure_stalls && !trace_) return work_.wait(event);
  const auto begin = std::make_shared<uint64_t>(0);
  const uint64_t clock = tables_[table].clocks;
  work_.stream()->call([begin] { *begin = trace_now_ns(); });
  work_.wait(event);
  work_.stream()->call([this, begin, table, clock] {
    stalled_ns_ += trace_now_ns() - *begin;
    if (trace_) trace_->add(CacheTrack::kWait, "wait", table, clock, *begin);
  });
}

void Cache::Impl::wait_all() {
  Lock lock(mutex_);
  wait_here(
      lock, 0,
      [&] {
        return std::all_of(tables_.begin(), tables_.end(), [](const Table& table) {
          return table.jobs == 0 && table.handed_over == table.clocks &&
                 table.version == table.handed_over;
        });
      },
      [] { return "what was clocked"; });
}

CacheStats Cache::Impl::stats() {
  const Lock lock(mutex_);
  CacheStats stats = stats_;
  stats.stalled = std::chrono::nanoseconds(stalled_ns_);
  stats.bytes_to_device = bytes_to_device_;
  stats.bytes_to_host += bytes_to_host_;
  stats.bytes_copied_by_caller = copied_at_start_ + own_rows_->moved_bytes() + work_.caller_bytes();
  return stats;
}

// What is wrong with a call is this call's; everything else has come to stay.
template <class Run>
auto Cache::Impl::guarded(Run run) {
  try {
    return run();
  } catch (const Error& e) {
    const ErrorCode code = e.code();
    if (code != ErrorCode::kInvalid && code != ErrorCode::kFull && code != ErrorCode::kTimeout) {
      fail_all(std::current_exception());
    }
    throw;
  } catch (...) {
    fail_all(std::current_exception());
    throw;
  }
}

Cache::Cache(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
             CacheOptions options)
    : impl_(std::make_unique<Impl>(device, exchange, std::move(tables), options)) {}
Cache::~Cache() = default;

void Cache::begin_virtual() { impl_->begin(true); }
void Cache::begin_gathering() { impl_->begin(false); }
void Cache::finish_sequence() {
  impl_->guarded([&] { impl_->finish_sequence(); });
}

Buffer Cache::read(uint32_t table, std::span<const uint64_t> keys,
                   std::optional<uint32_t> staleness) {
  return impl_->guarded([&] { return impl_->acquire(Call::kRead, table, keys, true, staleness); });
}
void Cache::post_read(uint64_t handle) {
  impl_->guarded([&] { impl_->release(Call::kPostRead, handle, true); });
}
Buffer Cache::pre_update(uint32_t table, std::span<const uint64_t> keys) {
  return impl_->guarded([&] { return impl_->acquire(Call::kPreUpdate, table, keys, true, {}); });
}
void Cache::update(uint64_t handle) {
  impl_->guarded([&] { impl_->release(Call::kUpdate, handle, true); });
}
Buffer Cache::local_access(uint32_t table, std::span<const uint64_t> keys, Fetch fetch) {
  return impl_->guarded(
      [&] { return impl_->acquire(Call::kLocalAccess, table, keys, fetch == Fetch::kYes, {}); });
}
void Cache::post_local_access(uint64_t handle, Save save) {
  impl_->guarded([&] { impl_->release(Call::kPostLocalAccess, handle, save == Save::kYes); });
}
void Cache::table_clock(uint32_t table) {
  impl_->guarded([&] { impl_->table_clock(table); });
}
void Cache::discard(uint64_t handle) {
  impl_->guarded([&] { impl_->release(Call::kUpdate, handle, false); });
}
void Cache::wait_all() { impl_->wait_all(); }
std::span<const TableSpec> Cache::tables() const { return impl_->specs_; }
const Placement& Cache::placement() const {
  if (!impl_->schedule_) {
    fail(ErrorCode::kInvalid, "there is no placement before finish_sequence()");
  }
  return impl_->schedule_->placement;
}
CacheStats Cache::stats() const { return impl_->stats(); }

}  // namespace phub::geeps

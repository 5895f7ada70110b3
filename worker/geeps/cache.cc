#include "worker/geeps/cache.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_impl.h"
#include "worker/geeps/tables.h"

namespace phub::geeps {
namespace {

constexpr uint32_t kMostPartitions = 256;  // three threads each

CacheOptions checked(const CacheOptions& options) {
  if (options.partitions == 0 || options.partitions > kMostPartitions) {
    fail(ErrorCode::kInvalid, "a cache of {} partitions: there are 1 to {}", options.partitions,
         kMostPartitions);
  }
  return options;
}

std::vector<TableSpec> checked(std::vector<TableSpec> tables) {
  check(tables);
  return tables;
}

}  // namespace

Cache::Impl::Impl(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
                  const CacheOptions& options, const MakeDriver& make_driver)
    : device_(device),
      options_(checked(options)),
      specs_(checked(std::move(tables))),
      mover_(device, exchange, options_, specs_),
      work_(device, options.compute),
      own_lane_{.kind = Lane::Kind::kFetch, .stream = device.make_stream("geeps"), .rows = {}} {
  check_saved_size();
  restore_local();
  begin_branches();
  const DeviceStats use = device_.stats();
  budget_ = options_.budget_bytes > 0 ? options_.budget_bytes : use.budget_bytes - use.used_bytes;
  budget_ = budget_ / Arena::kAlignment * Arena::kAlignment;
  if (budget_ == 0) fail(ErrorCode::kFull, "{}: no memory is left for the cache", device_.name());
  memory_ = DeviceMemory(device_, budget_, "cache");
  mover_.reserved = std::make_unique<Arena>(budget_);
  own_lane_.rows = std::make_unique<HostRows>(device_, *own_lane_.stream);
  // Tables that are kept twice are included: other caches of the process may copy them, and
  // neighbours that share a page are pinned together.
  std::vector<PageRange> exchanged;
  for (size_t key = 0; key < exchange.keys(); ++key) {
    exchanged.push_back(pages_of(std::as_bytes(exchange.parameters(key)), HostUse::kRead));
    exchanged.push_back(pages_of(std::as_bytes(exchange.gradient(key)), HostUse::kReadWrite));
  }
  for (const PageRange& range : merged(std::move(exchanged))) {
    pinned_.emplace_back(device_, reinterpret_cast<const void*>(range.begin),
                         range.end - range.begin, range.use, "memory of the exchange");
  }
  if (!options_.trace.empty()) {
    std::vector<std::string> names;
    for (const TableSpec& spec : specs_) names.push_back(spec.name);
    mover_.trace = std::make_unique<CacheTrace>(options_.trace, exchange.rank(), std::move(names));
  }
  driver_ = make_driver(mover_, mutex_);
}

Cache::Impl::~Impl() {
  {
    Lock lock(*this);
    lock.wait(
        [&] {  // wait for released buffers and clocked updates
          return mover_.failed() || std::ranges::all_of(mover_.tables, [](const Table& table) {
                   return table.jobs == 0 && table.handed_over == table.clocks;
                 });
        },
        {});
  }
  driver_->stop();
  mover_.exchange.leave();
  try {
    if (work_.in_stream()) work_.stream()->synchronize();
    for (const Lane& lane : mover_.lanes()) {
      if (lane.stream) lane.stream->synchronize();
    }
  } catch (...) {  // the device failed, which the calls have reported
  }
}

bool Cache::Impl::Lock::wait(const std::function<bool()>& over, std::chrono::milliseconds limit) {
  return cache_.driver_->wait(lock_, over, limit);
}

// The log has room for the updates of one clock.
void Cache::Impl::wait_for_log(Lock& lock, uint32_t number) {
  const Table& table = mover_.tables[number];
  wait_until(
      lock, number, [&] { return table.handed_over == table.clocks; },
      [&] { return fmt::format("the push of '{}'", table.spec.name); });
}

// Waits for the work that uses the memory of the instance's buffer.
void Cache::Impl::wait_for_memory(Lock& lock, Instance instance, uint32_t table) {
  const std::vector<const Event*> events = mover_.events_before(instance);
  if (events.empty()) return;
  lock.unlock();
  for (const Event* event : events) wait_for(*event, table);
  lock.lock();
}

std::string Cache::Impl::describe_read(const Table& table, uint64_t back) {
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

// Makes the application's stream, or its thread, wait.
void Cache::Impl::wait_for(const Event& event, uint32_t table) {
  if (event.done()) return;
  if (!work_.in_stream()) {
    const uint64_t begin = trace_now_ns();
    event.wait();
    stalled_ns_ += trace_now_ns() - begin;
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
    stalled_ns_ += trace_now_ns() - *begin;
    if (mover_.trace) mover_.trace->add(CacheTrack::kWait, "wait", table, clock, *begin);
  });
}

void Cache::Impl::wait_all() {
  Lock lock(*this);
  wait_until(
      lock, 0,
      [&] {
        return std::ranges::all_of(mover_.tables, [](const Table& table) {
          return table.jobs == 0 && table.handed_over == table.clocks &&
                 table.version == table.handed_over;
        });
      },
      [] { return "what was clocked"; });
}

CacheStats Cache::Impl::stats() {
  const Lock lock(*this);
  CacheStats stats = mover_.stats;
  stats.stalled = std::chrono::nanoseconds(stalled_ns_);
  for (const Table& table : mover_.tables) {
    if (table.branches) stats.branch_bytes += table.branches->bytes();
  }
  stats.bytes_copied_by_caller += own_lane_.rows->moved_bytes() + work_.caller_bytes();
  return stats;
}

// kInvalid has no effect on the cache; every other error ends its work.
template <class Run>
auto Cache::Impl::guarded(Run run) {
  try {
    return run();
  } catch (const Error& e) {
    const ErrorCode code = e.code();
    if (code != ErrorCode::kInvalid && code != ErrorCode::kFull && code != ErrorCode::kTimeout) {
      driver_->fail(std::current_exception());
    }
    throw;
  } catch (...) {
    driver_->fail(std::current_exception());
    throw;
  }
}

Cache::Cache(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
             CacheOptions options)
    : Cache(device, exchange, std::move(tables), std::move(options), make_threads) {}
Cache::Cache(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
             CacheOptions options, const MakeDriver& make_driver)
    : impl_(std::make_unique<Impl>(device, exchange, std::move(tables), options, make_driver)) {}
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
  impl_->guarded([&] { impl_->table_clock(table, {}); });
}
void Cache::table_clock(uint32_t table, std::span<const FactorPairs> factors) {
  impl_->guarded([&] { impl_->table_clock(table, factors); });
}
void Cache::discard(uint64_t handle) {
  impl_->guarded([&] { impl_->release(Call::kUpdate, handle, false); });
}
void Cache::wait_all() { impl_->wait_all(); }
void Cache::save_point() {
  std::optional<RankState> tables = impl_->guarded([&] { return impl_->local_state(); });
  const auto end_round = [this] {
    if (!impl_->guarded([&] { return impl_->ends_round(); })) return;
    // Not guarded: who gets no answer asks again.
    const std::optional<Exchange::Branches> next =
        impl_->mover_.exchange.branches(impl_->rounds_ + 1);
    impl_->guarded([&] { impl_->begin_next_round(next.value()); });
  };
  try {
    if (tables) impl_->mover_.exchange.save(std::move(*tables));
  } catch (...) {  // there is no checkpoint of this round, which is over all the same
    end_round();
    throw;
  }
  end_round();
}
std::span<const TableSpec> Cache::tables() const { return impl_->specs_; }
const Placement& Cache::placement() const {
  if (!impl_->mover_.schedule) {
    fail(ErrorCode::kInvalid, "there is no placement before finish_sequence()");
  }
  return impl_->mover_.schedule->placement;
}
CacheStats Cache::stats() const { return impl_->stats(); }

// The scopes of buffers. An error at the end of a scope is not lost: after a failure of the device
// or of the exchange every call throws it.
namespace {

template <class GiveBack>
void at_end_of_scope(GiveBack give_back) {
  try {
    give_back();
  } catch (...) {  // the next call throws it again
  }
}

}  // namespace

ReadBuffer::~ReadBuffer() {
  at_end_of_scope([&] { cache_.post_read(buffer_.handle); });
}

void UpdateBuffer::update() {
  cache_.update(buffer_.handle);
  given_back_ = true;
}

UpdateBuffer::~UpdateBuffer() {
  if (given_back_) return;
  at_end_of_scope([&] { cache_.discard(buffer_.handle); });
}

LocalBuffer::LocalBuffer(Cache& cache, uint32_t table, std::span<const uint64_t> keys, Fetch fetch,
                         Save save)
    : cache_(cache),
      buffer_(cache.local_access(table, keys, fetch)),
      save_(save),
      exceptions_(std::uncaught_exceptions()) {}

LocalBuffer::~LocalBuffer() {
  const bool saves = save_ == Save::kYes && std::uncaught_exceptions() == exceptions_;
  at_end_of_scope(
      [&] { cache_.post_local_access(buffer_.handle, saves ? Save::kYes : Save::kNo); });
}

}  // namespace phub::geeps

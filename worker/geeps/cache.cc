#include "worker/geeps/cache.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache_impl.h"
#include "worker/geeps/saved_tables.h"
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
      copies_(device, mover_, work_),
      held_(mover_.tables),
      waits_(mover_, work_, options_),
      branches_(mover_, waits_, copies_) {
  check_saved_size(mover_);
  restore_local(mover_);
  branches_.begin();
  const DeviceStats use = device_.stats();
  budget_ = options_.budget_bytes > 0 ? options_.budget_bytes : use.budget_bytes - use.used_bytes;
  budget_ = budget_ / Arena::kAlignment * Arena::kAlignment;
  if (budget_ == 0) fail(ErrorCode::kFull, "{}: no memory is left for the cache", device_.name());
  memory_ = DeviceMemory(device_, budget_, "cache");
  mover_.reserved.begin(budget_);
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
  waits_.start(make_driver);
}

Cache::Impl::~Impl() {
  waits_.stop();
  mover_.exchange.leave();
  try {
    if (work_.in_stream()) work_.stream()->synchronize();
    for (const Lane& lane : mover_.lanes.all()) {
      if (lane.stream) lane.stream->synchronize();
    }
  } catch (...) {  // the device failed, which the calls have reported
  }
}

CacheStats Cache::Impl::stats() {
  const Lock lock(waits_);
  CacheStats stats = mover_.stats;
  stats.stalled = waits_.lost();
  for (const Table& table : mover_.tables) {
    if (table.branches) stats.branch_bytes += table.branches->bytes();
  }
  stats.bytes_copied_by_caller += copies_.moved_bytes() + work_.caller_bytes();
  return stats;
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
  impl_->waits_.guarded([&] { impl_->finish_sequence(); });
}

Buffer Cache::read(uint32_t table, std::span<const uint64_t> keys,
                   std::optional<uint32_t> staleness) {
  return impl_->waits_.guarded(
      [&] { return impl_->acquire(Call::kRead, table, keys, true, staleness); });
}
void Cache::post_read(uint64_t handle) {
  impl_->waits_.guarded([&] { impl_->release(Call::kPostRead, handle, true); });
}
Buffer Cache::pre_update(uint32_t table, std::span<const uint64_t> keys) {
  return impl_->waits_.guarded(
      [&] { return impl_->acquire(Call::kPreUpdate, table, keys, true, {}); });
}
void Cache::update(uint64_t handle) {
  impl_->waits_.guarded([&] { impl_->release(Call::kUpdate, handle, true); });
}
Buffer Cache::local_access(uint32_t table, std::span<const uint64_t> keys, Fetch fetch) {
  return impl_->waits_.guarded(
      [&] { return impl_->acquire(Call::kLocalAccess, table, keys, fetch == Fetch::kYes, {}); });
}
void Cache::post_local_access(uint64_t handle, Save save) {
  impl_->waits_.guarded(
      [&] { impl_->release(Call::kPostLocalAccess, handle, save == Save::kYes); });
}
void Cache::table_clock(uint32_t table) {
  impl_->waits_.guarded([&] { impl_->table_clock(table, {}); });
}
void Cache::table_clock(uint32_t table, std::span<const FactorPairs> factors) {
  impl_->waits_.guarded([&] { impl_->table_clock(table, factors); });
}
void Cache::discard(uint64_t handle) {
  impl_->waits_.guarded([&] { impl_->release(Call::kUpdate, handle, false); });
}
void Cache::wait_all() { impl_->waits_.for_results(); }
void Cache::save_point() {
  std::optional<RankState> tables =
      impl_->waits_.guarded([&] { return impl_->state_at_save_point(); });
  const auto end_round = [this] {
    if (!impl_->waits_.guarded([&] { return impl_->ends_round(); })) return;
    // Not guarded: who gets no answer asks again.
    const std::optional<Exchange::Branches> next =
        impl_->mover_.exchange.branches(impl_->branches_.next_round());
    impl_->waits_.guarded([&] { impl_->branches_.begin_next_round(next.value()); });
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

// The calls of the caches of phub.h, over worker/geeps.
#include "worker/c_abi/geeps.h"

#include <fmt/format.h>

#include <limits>
#include <optional>
#include <span>

#include "worker/c_abi/call.h"

namespace phub::c_abi {

namespace {

using geeps::Buffer;
using geeps::Cache;
using geeps::Fetch;
using geeps::Save;

std::unique_lock<std::mutex> only_thread_in(GeepsObject& object) {
  std::unique_lock lock(object.call, std::try_to_lock);
  if (!lock.owns_lock()) {
    throw Refusal(PHUB_WRONG_THREAD, "another thread is in a call for this phub_geeps");
  }
  return lock;
}

// Every call of the cache may wait.
template <typename Body>
phub_code with(const char* function, const phub_geeps* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<GeepsObject>(handle);
    check_may_wait();
    const auto lock = only_thread_in(*object);
    body(*object->cache, *object);
  });
}

std::span<const uint64_t> rows_of(const Cache& cache, uint32_t table, const uint64_t* keys,
                                  size_t count) {
  if (keys == nullptr && count > 0) throw Refusal(PHUB_INVALID, "keys is null");
  if (table >= cache.tables().size()) {
    throw Refusal(PHUB_INVALID, fmt::format("table {} is out of range: there are {}", table,
                                            cache.tables().size()));
  }
  if (keys == nullptr) return cache.tables()[table].keys;
  return {keys, count};
}

std::optional<uint32_t> staleness_of(int64_t staleness) {
  if (staleness == PHUB_STALENESS_OF_JOB) return std::nullopt;
  if (staleness < 0 || staleness > std::numeric_limits<uint32_t>::max()) {
    throw Refusal(PHUB_INVALID, fmt::format("a staleness of {} clocks", staleness));
  }
  return static_cast<uint32_t>(staleness);
}

// `ask(cache, rows)` returns a buffer for rows of a table.
template <typename Ask>
phub_code acquire(const char* function, const phub_geeps* handle, uint32_t table,
                  const uint64_t* keys, size_t count, phub_buffer* out, Ask ask) {
  return with(function, handle, [&](Cache& cache, GeepsObject& object) {
    need_struct(out, "buffer");
    const Buffer buffer = ask(cache, rows_of(cache, table, keys, count));
    if (object.awaited != nullptr) object.awaited->synchronize();
    copy_struct(out, {.size = 0,
                      .data = buffer.data,
                      .rows = buffer.rows,
                      .handle = buffer.handle,
                      .age = buffer.age ? static_cast<int64_t>(*buffer.age) : -1,
                      .row_floats = buffer.row_floats,
                      .reserved = 0});
  });
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_geeps_destroy(phub_geeps* geeps) {
  return call(__func__, [&] {
    check_may_wait();
    const auto object = object_of<GeepsObject>(geeps);
    const auto lock = only_thread_in(*object);
    Handles::instance().remove(geeps, Type::kGeeps);
  });
}

phub_code phub_geeps_begin_virtual(phub_geeps* geeps) {
  return with(__func__, geeps, [](Cache& cache, auto&) { cache.begin_virtual(); });
}

phub_code phub_geeps_begin_gathering(phub_geeps* geeps) {
  return with(__func__, geeps, [](Cache& cache, auto&) { cache.begin_gathering(); });
}

phub_code phub_geeps_finish(phub_geeps* geeps) {
  return with(__func__, geeps, [](Cache& cache, GeepsObject& object) {
    cache.finish_sequence();
    object.placed = true;
  });
}

phub_code phub_geeps_read(phub_geeps* geeps, uint32_t table, const uint64_t* keys, size_t count,
                          int64_t staleness, phub_buffer* buffer) {
  return acquire(__func__, geeps, table, keys, count, buffer, [&](Cache& cache, auto rows) {
    return cache.read(table, rows, staleness_of(staleness));
  });
}

phub_code phub_geeps_pre_update(phub_geeps* geeps, uint32_t table, const uint64_t* keys,
                                size_t count, phub_buffer* buffer) {
  return acquire(__func__, geeps, table, keys, count, buffer,
                 [&](Cache& cache, auto rows) { return cache.pre_update(table, rows); });
}

phub_code phub_geeps_local_access(phub_geeps* geeps, uint32_t table, const uint64_t* keys,
                                  size_t count, int fetch, phub_buffer* buffer) {
  return acquire(__func__, geeps, table, keys, count, buffer, [&](Cache& cache, auto rows) {
    return cache.local_access(table, rows, fetch != 0 ? Fetch::kYes : Fetch::kNo);
  });
}

phub_code phub_geeps_post_read(phub_geeps* geeps, uint64_t handle) {
  return with(__func__, geeps, [&](Cache& cache, auto&) { cache.post_read(handle); });
}

phub_code phub_geeps_update(phub_geeps* geeps, uint64_t handle) {
  return with(__func__, geeps, [&](Cache& cache, auto&) { cache.update(handle); });
}

phub_code phub_geeps_post_local_access(phub_geeps* geeps, uint64_t handle, int save) {
  return with(__func__, geeps, [&](Cache& cache, auto&) {
    cache.post_local_access(handle, save != 0 ? Save::kYes : Save::kNo);
  });
}

phub_code phub_geeps_discard(phub_geeps* geeps, uint64_t handle) {
  return with(__func__, geeps, [&](Cache& cache, auto&) { cache.discard(handle); });
}

phub_code phub_geeps_table_clock(phub_geeps* geeps, uint32_t table) {
  return with(__func__, geeps, [&](Cache& cache, auto&) { cache.table_clock(table); });
}

phub_code phub_geeps_clock_factors(phub_geeps* geeps, uint32_t table, const float* left,
                                   const float* right, uint32_t pairs) {
  return with(__func__, geeps, [&](Cache& cache, auto&) {
    const FactorPairs factors{left, right, pairs};
    cache.table_clock(table, {&factors, 1});
  });
}

phub_code phub_geeps_wait_all(phub_geeps* geeps) {
  return with(__func__, geeps, [](Cache& cache, auto&) { cache.wait_all(); });
}

phub_code phub_geeps_save_point(phub_geeps* geeps) {
  return with(__func__, geeps, [](Cache& cache, auto&) { cache.save_point(); });
}

phub_code phub_geeps_stats(phub_geeps* geeps, phub_geeps_counters* counters) {
  return with(__func__, geeps, [&](Cache& cache, auto&) {
    need_struct(counters, "counters");
    const geeps::CacheStats all = cache.stats();
    copy_struct(counters, {.size = 0,
                           .calls = all.calls,
                           .outside_sequence = all.outside_sequence,
                           .prefetched = all.prefetched,
                           .stalled_ns = static_cast<uint64_t>(all.stalled.count()),
                           .bytes_to_device = all.bytes_to_device,
                           .bytes_to_host = all.bytes_to_host,
                           .bytes_staged = all.bytes_staged,
                           .bytes_copied_by_caller = all.bytes_copied_by_caller,
                           .pushes = all.pushes,
                           .pulls = all.pulls,
                           .branch_bytes = all.branch_bytes});
  });
}

phub_code phub_geeps_placement(phub_geeps* geeps, phub_placement* placement) {
  return with(__func__, geeps, [&](Cache& cache, GeepsObject& object) {
    need_struct(placement, "placement");
    if (!object.placed) {
      throw Refusal(PHUB_INVALID, "nothing was placed yet: phub_geeps_finish comes first");
    }
    const geeps::Placement& all = cache.placement();
    copy_struct(placement, {.size = 0,
                            .pinned_bytes = all.pinned_bytes,
                            .index_bytes = all.index_bytes,
                            .pool_bytes = all.pool_bytes,
                            .reserved_bytes = all.reserved_bytes,
                            .total_bytes = all.total_bytes(),
                            .moved_bytes = all.moved_bytes,
                            .double_buffered = all.buffering == geeps::Buffering::kDouble ? 1u : 0u,
                            .reserved = 0});
  });
}

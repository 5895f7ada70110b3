// The stores of phub.h, over worker/iterstore.
#include "worker/c_abi/iterstore.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/text.h"
#include "worker/c_abi/call.h"
#include "worker/c_abi/options.h"
#include "worker/c_abi/worker.h"

namespace phub::c_abi {

uint64_t number_of_this_thread() {
  static std::atomic<uint64_t> last = 0;
  thread_local const uint64_t number = ++last;
  return number;
}

namespace {

using iterstore::Store;
using iterstore::StoreThread;

constexpr size_t kAlignment = 4;  // of values: they are words of 4 bytes

// Calls `body(store)`, of which no thread may be in a call meanwhile.
template <typename Body>
phub_code alone(const char* function, const phub_store* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<StoreObject>(handle);
    check_may_wait();
    const std::unique_lock lock(object->calls, std::try_to_lock);
    if (!lock.owns_lock()) {
      throw Refusal(PHUB_WRONG_THREAD, "another thread is in a call for this phub_store");
    }
    body(object->store);
  });
}

// Calls `body(thread)` on the thread that made it. If its handle is destroyed meanwhile it is gone
// afterwards; its store outlives the lock.
template <typename Body>
phub_code with(const char* function, const phub_store_thread* handle, Body body) {
  return call(function, [&] {
    auto object = object_of<StoreThreadObject>(handle);
    if (object->runs_on != number_of_this_thread()) {
      throw Refusal(PHUB_WRONG_THREAD,
                    "this phub_store_thread is another thread's: each makes its own");
    }
    check_may_wait();
    const auto store = object->store;
    const std::shared_lock lock(store->calls);
    const std::shared_ptr<StoreThreadObject> used = std::move(object);
    body(used->mine);
  });
}

std::span<const uint64_t> rows_of(const uint64_t* rows, size_t count, size_t bytes) {
  if (count == 0) return {};
  need(rows, "rows");
  if (count > bytes / kAlignment) {
    throw Refusal(PHUB_INVALID, fmt::format("{} rows do not fit in {} bytes", count, bytes));
  }
  return {rows, count};
}

// Calls `body(values)` with the memory as a span of values.
template <typename T, typename Memory, typename Body>
void as_values(Memory* memory, size_t bytes, Body body) {
  if (bytes > 0) need(memory, "the values' memory");
  if (bytes % sizeof(T) != 0 || reinterpret_cast<uintptr_t>(memory) % kAlignment != 0) {
    throw Refusal(PHUB_INVALID,
                  fmt::format("{} bytes at {} are no values of {} bytes each, aligned to {}", bytes,
                              fmt::ptr(memory), sizeof(T), kAlignment));
  }
  using Value = std::conditional_t<std::is_const_v<Memory>, const T, T>;
  body(std::span<Value>(static_cast<Value*>(memory), bytes / sizeof(T)));
}

template <typename Memory, typename Body>
void as_values_of(const char* type, Memory* memory, size_t bytes, Body body) {
  need(type, "type");
  const std::string_view name = type;
  if (name == "f32") return as_values<float>(memory, bytes, body);
  if (name == "f64") return as_values<double>(memory, bytes, body);
  if (name == "i32") return as_values<int32_t>(memory, bytes, body);
  if (name == "i64") return as_values<int64_t>(memory, bytes, body);
  throw Refusal(PHUB_INVALID, fmt::format("there is no type '{}'; types are f32, f64, i32 and i64",
                                          printable(name)));
}

phub_store_counters counters_of(const iterstore::StoreStats& stats) {
  return {.size = 0,
          .in_sequence = stats.in_sequence,
          .by_index = stats.by_index,
          .dynamic = stats.dynamic,
          .places = stats.places,
          .cached = stats.cached,
          .clocks = stats.clocks,
          .placed = stats.placed,
          .widened = stats.widened,
          .pushes = stats.worker.pushes,
          .chunks_pushed = stats.worker.chunks_pushed,
          .chunks_received = stats.worker.chunks_received,
          .bytes_copied = stats.worker.bytes_copied,
          .sleeps = stats.worker.sleeps,
          .reconnections = stats.worker.reconnections,
          .pushed_early = stats.pushed_early};
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_store_create(const phub_options* worker, const phub_store_options* options,
                            phub_store** store) {
  return call(__func__, [&] {
    const auto of_worker = object_of<OptionsObject>(worker);
    const auto of_store = object_of<StoreOptionsObject>(options);
    need(store, "store");
    iterstore::StoreOptions all;
    {
      const std::scoped_lock lock(of_worker->mutex, of_store->mutex);
      all = of_store->options;
      all.worker = of_worker->options;
    }
    *store = handle_of<phub_store>(std::make_shared<StoreObject>(all), Type::kStore);
  });
}

phub_code phub_store_destroy(phub_store* store) {
  return call(__func__, [&] {
    check_may_wait();
    Handles::instance().remove(store, Type::kStore);
  });
}

phub_code phub_store_abandon(phub_store* store) {
  return call(__func__, [&] {
    const auto object = object_of<StoreObject>(store);
    check_may_wait();
    object->store.abandon();
  });
}

phub_code phub_store_rank(const phub_store* store, uint32_t* rank, uint32_t* world_size) {
  return call(__func__, [&] {
    const auto object = object_of<StoreObject>(store);
    if (rank != nullptr) *rank = object->rank;
    if (world_size != nullptr) *world_size = object->world_size;
  });
}

phub_code phub_store_table(phub_store* store, uint32_t table, void* into, size_t bytes) {
  return alone(__func__, store, [&](Store& of) {
    need(into, "into");
    if (const uint64_t needed = of.table_bytes(table); bytes != needed) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("table {} has {} bytes, not {}", table, needed, bytes));
    }
    std::memcpy(into, of.table(table).data(), bytes);
  });
}

phub_code phub_store_rows(const phub_store* store, uint32_t table, uint64_t* rows, size_t count) {
  return alone(__func__, store, [&](const Store& of) {
    need(rows, "rows");
    const std::vector<uint64_t> all = of.rows(table);
    if (count != all.size()) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("table {} has {} places, not {}", table, all.size(), count));
    }
    std::ranges::copy(all, rows);
  });
}

phub_code phub_store_clocks(const phub_store* store, uint64_t* clocks) {
  return call(__func__, [&] {
    const auto object = object_of<StoreObject>(store);
    need(clocks, "clocks");
    *clocks = object->store.clocks();
  });
}

phub_code phub_store_restored(const phub_store* store, const char* name, const void** bytes,
                              size_t* size) {
  return call(__func__, [&] {
    const auto object = object_of<StoreObject>(store);
    need(name, "name");
    need(bytes, "bytes");
    need(size, "size");
    const auto found = object->store.restored(name);
    if (!found) {
      throw Refusal(PHUB_NOT_FOUND, fmt::format("nothing was restored as '{}'", printable(name)));
    }
    *bytes = found->data();
    *size = found->size();
  });
}

phub_code phub_store_stats(const phub_store* store, phub_store_counters* counters) {
  return alone(__func__, store, [&](const Store& of) {
    need_struct(counters, "counters");
    copy_struct(counters, counters_of(of.stats()));
  });
}

phub_code phub_store_thread_create(phub_store* store, uint32_t number, phub_store_thread** thread) {
  return call(__func__, [&] {
    const auto object = object_of<StoreObject>(store);
    need(thread, "thread");
    const std::shared_lock lock(object->calls);
    *thread = handle_of<phub_store_thread>(std::make_shared<StoreThreadObject>(object, number),
                                           Type::kStoreThread);
  });
}

phub_code phub_store_thread_destroy(phub_store_thread* thread) {
  return call(__func__, [&] {
    check_may_wait();
    const auto store = object_of<StoreThreadObject>(thread)->store;
    const std::shared_lock lock(store->calls);
    Handles::instance().remove(thread, Type::kStoreThread);
  });
}

phub_code phub_store_begin_virtual(phub_store_thread* thread) {
  return with(__func__, thread, [](StoreThread& mine) { mine.begin_virtual(); });
}

phub_code phub_store_begin_gathering(phub_store_thread* thread) {
  return with(__func__, thread, [](StoreThread& mine) { mine.begin_gathering(); });
}

phub_code phub_store_finish(phub_store_thread* thread) {
  return with(__func__, thread, [](StoreThread& mine) { mine.finish(); });
}

phub_code phub_store_is_virtual(const phub_store_thread* thread, int* is_virtual) {
  return with(__func__, thread, [&](const StoreThread& mine) {
    need(is_virtual, "is_virtual");
    *is_virtual = mine.is_virtual() ? 1 : 0;
  });
}

phub_code phub_store_read(phub_store_thread* thread, uint32_t table, const uint64_t* rows,
                          size_t count, const char* type, void* into, size_t bytes) {
  return with(__func__, thread, [&](StoreThread& mine) {
    const auto all = rows_of(rows, count, bytes);
    as_values_of(type, into, bytes, [&](auto values) { mine.read_batch(table, all, values); });
  });
}

phub_code phub_store_update(phub_store_thread* thread, uint32_t table, const uint64_t* rows,
                            size_t count, const char* type, const void* by, size_t bytes) {
  return with(__func__, thread, [&](StoreThread& mine) {
    const auto all = rows_of(rows, count, bytes);
    as_values_of(type, by, bytes, [&](auto values) { mine.update_batch(table, all, values); });
  });
}

phub_code phub_store_clock(phub_store_thread* thread) {
  return with(__func__, thread, [](StoreThread& mine) { mine.clock(); });
}

phub_code phub_store_add_row(phub_store_thread* thread, uint32_t table, uint64_t row) {
  return with(__func__, thread, [&](StoreThread& mine) { mine.add_row(table, row); });
}

phub_code phub_store_delete_row(phub_store_thread* thread, uint32_t table, uint64_t row) {
  return with(__func__, thread, [&](StoreThread& mine) { mine.delete_row(table, row); });
}

phub_code phub_store_has_row(const phub_store_thread* thread, uint32_t table, uint64_t row,
                             int* has_row) {
  return with(__func__, thread, [&](const StoreThread& mine) {
    need(has_row, "has_row");
    *has_row = mine.has_row(table, row) ? 1 : 0;
  });
}

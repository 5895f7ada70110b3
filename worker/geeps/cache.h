// GeePS: a cache of the parameters in device memory, and this worker's own (local) data beside it.
// The application computes in buffers that the cache owns; what does not fit in device memory is
// in host memory, and is moved ahead of time by threads of the cache. From GeePS (000), sections 3
// and 4: the calls are its Table 1.
//
//   auto device = phub::make_host_device({.budget_bytes = 64 << 20});
//   std::vector<TableSpec> tables = {{"layer1", 128, dense(785)}, {"hidden", 128, dense(64),
//   true}}; options.spec.keys = keys_of(tables);                  // the tables of parameters
//   phub::Worker worker(options);
//   worker.broadcast(initial);
//   WorkerExchange exchange(worker, tables);
//   Cache cache(*device, exchange, tables);
//   cache.begin_virtual();  iteration(cache);  cache.finish_sequence();
//   for (;;) iteration(cache);
//
//   void iteration(Cache& cache) {
//     ReadBuffer weights(cache, 0, all_rows);             // PostRead at the end of the scope
//     LocalBuffer hidden(cache, 1, all_rows, Fetch::kNo);
//     ... compute with weights.data(), hidden.data(): device memory, rows as listed ...
//     UpdateBuffer update(cache, 0, all_rows);
//     ... compute the gradient into update.data() ...
//     update.update();
//     cache.table_clock(0);
//   }
//
// read, pre_update and local_access block until the buffer can be used; the others return at once.
// With a compute stream (CacheOptions::compute) "can be used" is meant for work that is enqueued
// there after the call, and a release for the work that was enqueued before: the caller does not
// wait for the device. Without one, the caller computes in its own thread.
//
// The recorded sequence of an iteration is a hint: buffers are placed and filled by it. A call
// outside of it is slower (served from the reserved memory), never wrong.
//
// The calls are for one thread. Errors are phub::Error: kInvalid, a wrong call, which changes
// nothing; kFull, device memory; kTimeout, a read that was not fresh enough in time; what a device
// or the exchange threw, which every later call throws again.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/messages.h"
#include "worker/device/device.h"
#include "worker/geeps/exchange.h"
#include "worker/geeps/placement.h"

namespace phub::geeps {

// Rows of so many floats, by key. The rows are fixed; the same keys, in the same order, on every
// worker.
struct TableSpec {
  std::string name;
  uint32_t row_floats = 0;
  std::vector<uint64_t> keys;  // any numbers, each once; in this order in memory
  bool local = false;          // this worker's own data, zero at first; otherwise parameters
  // For jobs of plain SGD with a rate of 1 (parameters -= updates): reads contain this worker's
  // updates that were not clocked yet.
  bool read_my_writes = false;
  // The most that a read of this table may ask for as its staleness, in clocks. Above the job's
  // slack the table is kept twice.
  uint32_t max_staleness = 0;
};

std::vector<uint64_t> dense(uint64_t rows);  // keys 0 … rows − 1
// The keys of a job for the tables of parameters, in their order.
std::vector<KeySpec> keys_of(std::span<const TableSpec> tables);

struct CacheOptions {
  uint64_t budget_bytes = 0;    // of device memory; 0: what the device has left
  uint64_t reserved_bytes = 0;  // of these, for calls outside the sequence; 0: one largest buffer,
                                // if that fits
  uint32_t max_lead = 4;        // phases by which buffers are filled ahead, at most
  bool prefetch = true;         // false: buffers are filled when they are asked for
  bool strict = false;          // a call outside the sequence is an error that names it
  bool infer_clocks = false;    // a table for which no TableClock is recorded is clocked by its
                                // last Update of the sequence, and by one of the same rows that
                                // comes where the sequence has another call; while a sequence is
                                // recorded, by finish_sequence()
  bool poison = false;          // buffers that are given back become NaN, but those whose rows
                                // are kept for the next read
  uint32_t partitions = 1;      // of the tables, each with its own moving threads
  Stream* compute = nullptr;    // where the application computes; null: in the calling thread
  std::chrono::milliseconds timeout{0};  // of a blocking call; 0: none (the exchange has its own)
  bool measure_stalls = false;  // with a compute stream: time its waits (costs two callbacks each)
  std::string trace;  // a file for ui.perfetto.dev: compute, copies, pushes and pulls by table
};

enum class Fetch : bool { kNo, kYes };
enum class Save : bool { kNo, kYes };

// Plain data: the rows that were asked for, in that order, in device memory. Those of a read are
// not to be written: they may stay where they are for the next read.
struct Buffer {
  float* data = nullptr;  // null in a virtual iteration
  size_t rows = 0;
  uint32_t row_floats = 0;
  uint64_t handle = 0;  // never used twice
  // Of a read: every worker's updates of so many clocks (counted from this cache's beginning) are
  // in it; with a staleness, rows may be newer than others. Nothing: the job is asynchronous.
  std::optional<uint64_t> age;

  size_t floats() const { return rows * row_floats; }
};

struct CacheStats {
  uint64_t calls = 0, outside_sequence = 0;
  uint64_t prefetched = 0;              // buffers that were filled before they were asked for
  std::chrono::nanoseconds stalled{0};  // the application (or its stream) waited for buffers
  uint64_t bytes_to_device = 0, bytes_to_host = 0;  // copied in the background
  uint64_t bytes_staged = 0;  // of these, gathered or added by threads of the cache
  // Within calls, by the calling thread or while it waited: rows of calls outside the sequence, of
  // what is pinned where the sequence changes, and, without a compute stream, between pinned rows
  // and buffers.
  uint64_t bytes_copied_by_caller = 0;
  uint64_t pushes = 0, pulls = 0;
};

class Cache {
 public:
  // The exchange's keys are the tables of parameters, in order. Device, exchange and stream outlive
  // the cache.
  Cache(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
        CacheOptions options = {});
  ~Cache();  // waits for pushes that are under way
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // The calls of an iteration, recorded: virtually (nothing else happens, buffers have no data), or
  // in a real iteration. finish_sequence() places everything anew; what the tables hold stays.
  // kTimeout, results are not here: it can be called again; kFull: the sequence before goes on.
  void begin_virtual();
  void begin_gathering();
  void finish_sequence();

  // Table 1. `staleness` in clocks: 0 is BSP; nothing is what the job's consistency gives.
  Buffer read(uint32_t table, std::span<const uint64_t> keys,
              std::optional<uint32_t> staleness = {});
  void post_read(uint64_t handle);
  Buffer pre_update(uint32_t table, std::span<const uint64_t> keys);
  void update(uint64_t handle);
  Buffer local_access(uint32_t table, std::span<const uint64_t> keys, Fetch fetch = Fetch::kYes);
  void post_local_access(uint64_t handle, Save save = Save::kYes);
  void table_clock(uint32_t table);

  void discard(uint64_t handle);  // any buffer: gives it back, nothing is updated or saved
  void wait_all();                // until what was clocked is pushed, and its result is here

  std::span<const TableSpec> tables() const;
  const Placement& placement() const;  // after finish_sequence()
  CacheStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The same with scopes. A buffer that is not updated is discarded at the end of its scope; local
// data is saved, unless it ends by an exception.
class ReadBuffer {
 public:
  ReadBuffer(Cache& cache, uint32_t table, std::span<const uint64_t> keys,
             std::optional<uint32_t> staleness = {})
      : cache_(cache), buffer_(cache.read(table, keys, staleness)) {}
  ~ReadBuffer();
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;

  const float* data() const { return buffer_.data; }
  const Buffer& buffer() const { return buffer_; }

 private:
  Cache& cache_;
  Buffer buffer_;
};

class UpdateBuffer {
 public:
  UpdateBuffer(Cache& cache, uint32_t table, std::span<const uint64_t> keys)
      : cache_(cache), buffer_(cache.pre_update(table, keys)) {}
  ~UpdateBuffer();
  UpdateBuffer(const UpdateBuffer&) = delete;
  UpdateBuffer& operator=(const UpdateBuffer&) = delete;

  float* data() const { return buffer_.data; }
  const Buffer& buffer() const { return buffer_; }
  void update();

 private:
  Cache& cache_;
  Buffer buffer_;
  bool given_back_ = false;
};

class LocalBuffer {
 public:
  LocalBuffer(Cache& cache, uint32_t table, std::span<const uint64_t> keys,
              Fetch fetch = Fetch::kYes, Save save = Save::kYes);
  ~LocalBuffer();
  LocalBuffer(const LocalBuffer&) = delete;
  LocalBuffer& operator=(const LocalBuffer&) = delete;

  float* data() const { return buffer_.data; }
  const Buffer& buffer() const { return buffer_; }

 private:
  Cache& cache_;
  Buffer buffer_;
  Save save_;
  int exceptions_;
};

}  // namespace phub::geeps

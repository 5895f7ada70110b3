// GeePS: a cache of the parameters, and of this worker's own (local) data, in device memory. The
// application computes in buffers that the cache owns. Data that does not fit in device memory is
// in host memory; threads of the cache copy it ahead of time. The calls are those of Table 1 in
// GeePS (000), sections 3 and 4.
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
// With a compute stream (CacheOptions::compute) a buffer can be used by work that is enqueued there
// after the call, and a release takes effect after the work that was enqueued before it: the caller
// does not wait for the device. Without one, the caller computes in its own thread.
//
// The recorded sequence of an iteration is a hint by which buffers are placed and filled. A call
// outside of it is served from the reserved memory: slower, but never wrong.
//
// One thread makes all calls. Errors are phub::Error: kInvalid, a wrong call, which has no effect;
// kFull, device memory is too small; kTimeout, a read was not fresh enough in time; and errors of
// the device or the exchange, which every later call throws again.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/control/messages.h"
#include "worker/device/device.h"
#include "worker/geeps/exchange.h"
#include "worker/geeps/placement.h"

namespace phub::geeps {

class Driver;
class Mover;

constexpr uint64_t kPieceBytes = 2 << 20;

// A table: rows of `row_floats` floats, each with a key. REQUIRES, for parameters: every worker has
// the same keys in the same order.
struct TableSpec {
  std::string name;
  uint32_t row_floats = 0;
  std::vector<uint64_t> keys;  // any numbers, each once, in the order of the rows in memory
  bool local = false;          // this worker's own data, zero at first; false: parameters
  // Reads include this worker's updates that were not clocked yet. Only for jobs of plain SGD with
  // a rate of 1 (parameters -= updates).
  bool read_my_writes = false;
  // The largest staleness, in clocks, that a read of this table may request. If it exceeds the
  // job's slack, the table is kept twice.
  uint32_t max_staleness = 0;
  // For a matrix of parameters whose gradient is a sum of outer products of the rows' vectors and
  // the columns': at most so many pairs of a clock are sent, in place of updates (Poseidon, 001,
  // section 4.3.1). table_clock() takes them. 0: updates are sent.
  uint32_t samples = 0;
  bool scratch = false;  // local data that no iteration needs from the one before: it is not saved
  // True: each branch of the job has its own rows of this local data; a child begins with its
  // parent's rows as they are at the fork. save_point() changes the rows over. No branches: no
  // effect.
  bool by_branch = false;
  // The size of the pieces that move independently of each other: to and from the device, and, as a
  // key of the job, to and from the box. A piece has whole rows, at least one. 0 means that the
  // table is one piece; so is a table with samples. REQUIRES, for parameters: the same on every
  // worker.
  uint64_t piece_bytes = kPieceBytes;
};

std::vector<uint64_t> dense(uint64_t rows);  // keys 0 … rows − 1
// The keys of the job: the pieces of the tables of parameters, in their order. So all parameters of
// the job are the rows of one table behind those of the other. `devices`: of each process, whose
// factors go together (device_group.h).
std::vector<KeySpec> keys_of(std::span<const TableSpec> tables, uint32_t devices = 1);
// The rows that each of these keys has.
struct RowsOfKey {
  uint32_t table;
  uint32_t first_row, rows;
};
std::vector<RowsOfKey> rows_of_keys(std::span<const TableSpec> tables);

struct CacheOptions {
  uint64_t budget_bytes = 0;    // device memory to use; 0: all that the device has left
  uint64_t reserved_bytes = 0;  // its part for calls outside the sequence; 0: one buffer of the
                                // largest size, if that fits
  uint32_t max_lead = 4;        // phases by which buffers are filled ahead, at most
  bool peak_first = false;      // rows are pinned in the order of the paper's Algorithm 2
  bool prefetch = true;         // false: buffers are filled when they are requested
  bool strict = false;          // a call outside the sequence is an error that names it
  bool infer_clocks = false;    // a table without a recorded TableClock is clocked by its last
                                // Update in the sequence, or by an Update of the same rows outside
                                // of it; while a sequence is recorded, by finish_sequence()
  bool poison = false;          // released buffers become NaN, except those whose rows are kept for
                                // the next read
  uint32_t partitions = 1;      // sets of copying threads, which share the pieces of each table
  Stream* compute = nullptr;    // the application computes there; null: in the calling thread
  std::chrono::milliseconds timeout{0};  // limit of a blocking call; 0: only that of the exchange
  bool measure_stalls = false;  // with a compute stream: time its waits (two callbacks for each)
  std::string trace;  // file for ui.perfetto.dev: computation, copies, pushes, pulls; empty: none
};

enum class Fetch : bool { kNo, kYes };
enum class Save : bool { kNo, kYes };

// The requested rows, in the order of the request, in device memory. A buffer of read() must not be
// written: the next read may use it.
struct Buffer {
  float* data = nullptr;  // null in a virtual iteration
  size_t rows = 0;
  uint32_t row_floats = 0;
  uint64_t handle = 0;  // a number that is never used twice
  // For a read: it includes every worker's updates of so many clocks, counted from the start of
  // this cache; with a staleness, some rows may be newer. nullopt if the job is asynchronous.
  std::optional<uint64_t> age;

  size_t floats() const { return rows * row_floats; }
};

struct CacheStats {
  uint64_t calls = 0, outside_sequence = 0;
  uint64_t prefetched = 0;              // buffers that were filled before they were requested
  std::chrono::nanoseconds stalled{0};  // time for which the application waited for buffers
  uint64_t bytes_to_device = 0, bytes_to_host = 0;  // copied in the background
  uint64_t bytes_staged = 0;  // those that threads of the cache gathered or added
  // Copied while the calling thread waited: for calls outside the sequence, for pinned rows when
  // the sequence changes, and, without a compute stream, between pinned rows and buffers.
  uint64_t bytes_copied_by_caller = 0;
  uint64_t pushes = 0, pulls = 0;
  uint64_t branch_bytes = 0;  // in host memory, now: rows of branches that do not run
};

class Cache {
 public:
  // REQUIRES: the exchange's keys are those of the tables of parameters, in their order; device,
  // exchange and stream outlive the cache. kInvalid: the local tables are too large to be saved.
  // kMismatch: a local table was saved with other rows.
  Cache(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
        CacheOptions options = {});
  // For tests: with another driver (driver.h) of the background work than threads.
  using MakeDriver = std::function<std::unique_ptr<Driver>(Mover&, std::mutex&)>;
  Cache(Device& device, Exchange& exchange, std::vector<TableSpec> tables, CacheOptions options,
        const MakeDriver& make_driver);
  ~Cache();  // waits for pushes that are in progress
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // Record the calls of an iteration: a virtual one (nothing is moved, buffers have no data), or a
  // real one. finish_sequence() places all buffers anew; the contents of tables stay. kTimeout:
  // results are missing, call it again. kFull: the old sequence stays in use.
  void begin_virtual();
  void begin_gathering();
  void finish_sequence();

  // Table 1. `staleness` in clocks: 0 is BSP; nothing: that of the job's consistency.
  Buffer read(uint32_t table, std::span<const uint64_t> keys,
              std::optional<uint32_t> staleness = {});
  void post_read(uint64_t handle);
  Buffer pre_update(uint32_t table, std::span<const uint64_t> keys);
  void update(uint64_t handle);
  Buffer local_access(uint32_t table, std::span<const uint64_t> keys, Fetch fetch = Fetch::kYes);
  void post_local_access(uint64_t handle, Save save = Save::kYes);
  void table_clock(uint32_t table);
  // For a table with samples: sends the factors, in memory of the device, which is copied in the
  // application's order. There are at most as many as its samples. Without any it is a null.
  void table_clock(uint32_t table, std::span<const FactorPairs> factors);

  void discard(uint64_t handle);  // releases any buffer, without an update or save
  void wait_all();                // waits until the results of all clocked updates are here

  // For a worker with a saver: the end of an iteration, with which all tables of parameters are
  // clocked equally often, and nothing was updated since. If the state of the rank is to be saved
  // after this round, it waits for the round's results, calls the saver in this thread, and adds
  // the rows of the local tables that are not scratch, as "geeps/NAME". A restored rank's cache
  // begins with these rows. A call after another round costs nothing. If the call is missing, the
  // TableClock after a round that is to be saved is kInvalid. kInvalid: a local buffer or one for
  // an update is in use, or there are updates that were not clocked. kTimeout: results are missing,
  // call it again. An exception of the saver is thrown here; then there is no checkpoint of the
  // round, and the cache goes on.
  //
  // In a job with branches, tables by branch need it at the end of every iteration, with or without
  // a saver: else the next TableClock is kInvalid. It waits for the round's results, and asks the
  // server which branch runs in the next round. If that is another, it changes the rows over. When
  // the server does not answer (kUnavailable), call it again. A rank that comes later than a fork
  // begins the child with its own rows.
  void save_point();

  std::span<const TableSpec> tables() const;
  const Placement& placement() const;  // REQUIRES: finish_sequence() was called
  CacheStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Buffers that the end of a scope releases. An UpdateBuffer without update() is discarded; local
// data is saved, unless an exception ends the scope.
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

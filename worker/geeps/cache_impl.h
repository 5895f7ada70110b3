// Inside the cache. Who does what:
//
//   application ── read, local_access ──▶ waits for ──┐            fetchers: host rows ─▶ buffers
//        │                                            └── buffers ◀──── ahead, by the schedule
//        ├── update, post_local_access ──▶ jobs ──▶ reclaimers: buffers ─▶ log, local rows
//        └── table_clock ────────────────▶ jobs ──▶ reclaimers ──▶ pushers ──▶ exchange
//                                                     puller: exchange ─▶ rows ─▶ pinned rows
//
// Rows that are in device memory move in the application's order (DeviceWork); only rows in host
// memory pass through the threads. One mutex guards what they share; no copy is made under it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "worker/device/arena.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/cache_trace.h"
#include "worker/geeps/device_work.h"
#include "worker/geeps/follower.h"
#include "worker/geeps/host_rows.h"
#include "worker/geeps/schedule.h"
#include "worker/geeps/table.h"

namespace phub::geeps {

// An access of the schedule, over the iterations. Instance k is that of iteration k.
struct AccessState {
  uint64_t filled = 0;      // instances whose rows from host memory are on their way (`ready`)
  uint64_t released = 0;    // instances that were given back (`done`), all up to this one
  uint64_t skipped_to = 0;  // those from here back are left out, once the one before is given back
  bool filling = false;
  bool left_out = false;  // while filling: the application will not ask for it
  bool held = false;
  bool done_recorded = false;         // otherwise it is done
  uint64_t version = 0, changes = 0;  // of the table, when it was filled
  uint64_t back = 0;                  // clocks behind the newest that its reads accept
  std::unique_ptr<Event> ready, computed, done;
};

struct EntryState {
  bool log_used = false;             // pinned: updates of this clock
  bool dirty = false;                // pinned local rows: newer than the host's
  HostLog host_log = HostLog::kOld;  // of the reclaimer
};

struct Instance {
  uint32_t access;
  uint64_t iteration;
  bool operator==(const Instance&) const = default;
};

// A buffer outside the sequence.
struct Outside {
  std::vector<Run> runs;  // row of the buffer -> row of the table
  size_t offset = 0;      // in the reserved memory
  std::unique_ptr<Event> computed;
};

// What the application holds.
struct Held {
  uint64_t handle = 0;
  Call call = Call::kRead;
  uint32_t table = 0;
  Buffer buffer;
  std::span<const uint64_t> keys;  // of the list, or of `own_keys`
  std::vector<uint64_t> own_keys;
  std::optional<Instance> planned;
  std::unique_ptr<Outside> outside;
  bool last_update = false;          // the sequence's of its table, in or outside of the sequence
  std::optional<uint32_t> recorded;  // the recorder's step
  uint64_t since_ns = 0;
};

// For a reclaimer.
struct Job {
  enum class Kind : uint8_t { kUpdate, kSave, kClock, kFree };
  Kind kind;
  uint32_t table;
  const float* buffer = nullptr;
  Instance planned{};
  std::unique_ptr<Outside> outside;      // null: planned
  std::vector<uint32_t> used_logs = {};  // kClock: pinned entries
};

struct Partition {
  std::vector<Instance> waiting;  // to be filled, first opened first
  std::deque<Job> jobs;
  struct Push {
    uint32_t table;
    bool null;
  };
  std::deque<Push> pushes;
  std::condition_variable fetch, reclaim, push;
  std::unique_ptr<Stream> fetch_stream, store_stream;
  std::jthread fetcher, reclaimer, pusher;
};

struct Cache::Impl {
  Impl(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
       const CacheOptions& options);
  ~Impl();

  using Lock = std::unique_lock<std::mutex>;
  class Reading;

  // Calls of the application.
  template <class Run>
  auto guarded(Run run);
  Buffer acquire(Call call, uint32_t table, std::span<const uint64_t> keys, bool fetch,
                 std::optional<uint32_t> staleness);
  void release(Call call, uint64_t handle, bool use);  // use: update, save
  void table_clock(uint32_t table);
  void begin(bool virtually);
  void finish_sequence();
  void wait_all();
  CacheStats stats();

  // cache_calls.cc, cache_release.cc
  void check_table(Call call, uint32_t table) const;
  void check_not_held(uint32_t table, std::span<const uint64_t> keys) const;
  uint64_t clocks_back(uint32_t table, std::optional<uint32_t> staleness) const;
  std::optional<Instance> follow(Call call, uint32_t table, std::span<const uint64_t> keys);
  Buffer acquire_planned(Lock& lock, Instance instance, bool fetch, uint64_t back);
  void wait_for_memory(Lock& lock, Instance instance, uint32_t table);
  bool blocked_by_held(const Instance& instance) const;
  void read_pinned(const ListPlan& list, float* buffer);
  void save_pinned(const ListPlan& list, const float* buffer);
  void update_pinned(const ListPlan& list, const float* buffer);
  void release_planned(Lock& lock, Held held, bool use);
  void clock(uint32_t table);
  Buffer hold(Held held);
  std::optional<uint64_t> age_of(uint64_t version) const;

  // cache_outside.cc
  Held acquire_outside(Lock& lock, Held held, bool fetch, uint64_t back);
  void release_outside(Held held, bool use);
  Outside resolve(uint32_t table, std::span<const uint64_t> keys) const;
  void reserve(Lock& lock, uint32_t table, size_t bytes, Outside& outside);
  void fill_outside(uint32_t table, float* buffer, std::span<const Run> runs);
  void update_outside(uint32_t table, const float* buffer, std::span<const Run> runs);
  void log_outside(HostRows& rows, uint32_t table, const float* buffer, std::span<const Run> runs);
  void save_outside(HostRows& rows, uint32_t table, const float* buffer, std::span<const Run> runs);
  uint32_t entry_of(uint32_t table, uint32_t row) const;
  enum class Part : bool {
    kRows,
    kLog
  };  // of an entry: what the sequence never updates has no log
  bool on_device(uint32_t entry, Part part) const;
  template <class Use>
  void for_pinned(uint32_t table, std::span<const Run> runs, Part part, Use use);
  template <class Use>
  void for_host(uint32_t table, std::span<const Run> runs, Part part, Use use);

  // cache_schedule.cc: instances that come and go
  Placement place_anew(const Sequence& sequence, SequenceDemand& demand) const;
  void install(Sequence sequence);
  void change_to(Sequence sequence, const SequenceDemand& demand, Placement placement);
  void load_pinned(const std::vector<bool>& unclocked);
  std::vector<bool> save_dirty();
  void open(Instance instance);
  void open_until(uint64_t phase);
  void leave_out(Instance instance);
  void add_waiting(Instance instance);
  bool is_kept(const Instance& instance, uint64_t back) const;
  bool can_fill(const Instance& instance) const;
  void set_released(Instance instance);
  void mark_irregular(Table& table);
  bool waits_are_over(const Instance& instance) const;
  std::vector<const Event*> events_before(const Instance& instance) const;

  // cache_threads.cc
  void start_threads();
  void stop_threads();
  template <class Loop>
  std::jthread thread(const char* what, Loop loop);
  void fetch_loop(Partition& partition);
  void fill(Partition& partition, HostRows& rows, const Instance& instance);
  void reclaim_loop(Partition& partition);
  void work_off(Lock& lock, Partition& partition, HostRows& rows, Job& job);
  void wait_for_log(Lock& lock, Partition& partition, const Table& table);
  void log_update(HostRows& rows, const Table& table, const ListPlan& list, const float* buffer);
  bool finish_log(HostRows& rows, uint32_t table, const std::vector<uint32_t>& used_logs);
  void push_loop(Partition& partition);
  void pull_loop();
  void refresh(HostRows& rows, uint32_t table);
  void fail_all(const std::exception_ptr& error);
  void keep_failure(const std::exception_ptr& error);
  void throw_if_failed() const;
  void wake_all();
  template <class Done, class What>
  void wait_here(Lock& lock, uint32_t table, Done done, What what);
  std::string describe_read(const Table& table, uint64_t back);
  void wait_for(const Event& event, uint32_t table);
  void wait_for_log_handed_over(Lock& lock, uint32_t table);
  void traced(Stream& stream, CacheTrack track, const char* name, uint32_t table,
              const std::function<void()>& enqueue);

  Device& device_;
  Exchange& exchange_;
  const CacheOptions options_;
  std::vector<Table> tables_;
  std::vector<TableSpec> specs_;
  std::vector<RowMap> maps_;
  std::vector<uint32_t> table_of_key_;
  uint64_t budget_ = 0;
  DeviceMemory memory_;
  std::vector<PinnedMemory> pinned_;  // the exchange's
  DeviceWork work_;
  std::unique_ptr<Stream> own_stream_;  // of copies outside the sequence, in the caller's thread
  std::unique_ptr<HostRows> own_rows_;
  std::unique_ptr<CacheTrace> trace_;
  std::jthread puller_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // for the application
  std::condition_variable pull_;     // for the puller
  std::deque<Partition> partitions_;
  bool stopping_ = false;
  ErrorCode failure_code_ = ErrorCode::kInternal;
  std::string failure_;  // empty: none
  CacheStats stats_;

  // Of the application's thread, and read by others under the mutex.
  std::optional<Schedule> schedule_;
  Follower follower_;
  std::vector<AccessState> accesses_;
  std::vector<EntryState> entries_;
  size_t opened_ = 0;  // openings of the circle that are over
  uint64_t opening_circle_ = 0;
  std::unique_ptr<Arena> reserved_;
  size_t reserved_offset_ = 0;
  uint32_t outside_jobs_ = 0;  // buffers outside the sequence that are being given back

  std::optional<Recorder> recorder_;
  bool virtual_ = false;
  std::vector<bool> inferred_;  // by table: its last Update of the sequence clocks it
  std::vector<Held> held_;
  uint64_t next_handle_ = 1;
  uint64_t copied_at_start_ = 0;
  std::atomic<uint64_t> stalled_ns_ = 0, bytes_to_device_ = 0, bytes_to_host_ = 0;
};

}  // namespace phub::geeps

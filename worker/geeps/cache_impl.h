// Inside the cache: the application's side. Rows in device memory are copied in the application's
// order (DeviceWork), in its thread or on its stream. Rows in host memory are moved by the lanes of
// a Mover, in the background. One mutex guards their shared state; nothing is copied while it is
// held.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include "worker/device/arena.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/device_work.h"
#include "worker/geeps/driver.h"

namespace phub::geeps {

// A buffer that the application holds.
struct Held {
  uint64_t handle = 0;
  Call call = Call::kRead;
  uint32_t table = 0;
  Buffer buffer;
  std::span<const uint64_t> keys;  // they lie in the list, or in `own_keys`
  std::vector<uint64_t> own_keys;
  std::optional<Instance> planned;   // set for an access in the sequence
  std::shared_ptr<Outside> outside;  // set for one outside of it; neither: virtual
  bool last_update = false;          // it is, or replaces, the table's last Update of the sequence
  std::optional<uint32_t> recorded;  // its step in the recorder
  uint64_t since_ns = 0;
};

struct Cache::Impl {
  Impl(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
       const CacheOptions& options, const MakeDriver& make_driver);
  ~Impl();

  // The cache's lock. Releasing it wakes the lanes that are due.
  class Lock {
   public:
    explicit Lock(Impl& cache) : cache_(cache), lock_(cache.mutex_) {}
    ~Lock() {
      if (lock_.owns_lock()) unlock();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    void lock() { lock_.lock(); }
    void unlock() {
      for (const Lane& lane : cache_.mover_.lanes()) {
        if (!lane.due) continue;
        cache_.driver_->wake();
        break;
      }
      lock_.unlock();
    }
    bool owns_lock() const { return lock_.owns_lock(); }
    bool wait(const std::function<bool()>& over, std::chrono::milliseconds limit);

   private:
    Impl& cache_;
    std::unique_lock<std::mutex> lock_;
  };
  class Reading;

  // cache_read.cc
  Buffer acquire(Call call, uint32_t table, std::span<const uint64_t> keys, bool fetch,
                 std::optional<uint32_t> staleness);
  void check_table(Call call, uint32_t table) const;
  void check_not_held(uint32_t table, std::span<const uint64_t> keys) const;
  uint64_t clocks_back(uint32_t table, std::optional<uint32_t> staleness) const;
  std::optional<uint64_t> age_of(uint64_t version) const;
  std::vector<uint32_t> rows_of(uint32_t table, std::span<const uint64_t> keys) const;
  std::optional<Instance> follow(Call call, uint32_t table, std::span<const uint64_t> keys);
  bool blocked_by_held(const Instance& instance) const;
  void acquire_planned(Lock& lock, Held& held, bool fetch, uint64_t back);
  void fetch_planned(Lock& lock, Held& held, uint64_t back);
  void acquire_outside(Lock& lock, Held& held, bool fetch, uint64_t back);
  void reserve(Lock& lock, Held& held);
  void read_pinned(Lock& lock, Held& held, const ListPlan& list, uint64_t back);
  Buffer hold(Held held);

  // cache_release.cc
  void release(Call call, uint64_t handle, bool use);  // use: update, save
  std::vector<Held>::iterator find_held(Call call, uint64_t handle, bool discards);
  void give_back(Lock& lock, Held held, bool use);
  void table_clock(uint32_t table, std::span<const FactorPairs> factors);
  void check_factors(const Table& table, std::span<const FactorPairs> factors) const;
  std::vector<FactorPairs> copy_factors(const Table& table, std::span<const FactorPairs> factors);
  void clock(uint32_t table, std::vector<FactorPairs> factors = {});

  // cache_sequence.cc
  void begin(bool virtually);
  void finish_sequence();
  Placement place_anew(const Sequence& sequence, SequenceDemand& demand) const;
  void install(Sequence sequence);
  std::vector<bool> save_dirty();
  void store_dirty(bool (*of)(const Table& table));
  void load_pinned(const std::vector<bool>& unclocked);

  // cache_save.cc
  void check_saved_size() const;
  void restore_local();
  void check_may_clock(const Table& table) const;
  bool must_save() const;
  void check_at_save_point();
  std::optional<RankState> local_state();  // nothing: this round is not saved

  // cache_branches.cc
  void begin_branches();
  bool ends_round();
  void begin_next_round(const Exchange::Branches& at);
  bool is_clocked() const;
  void enter_round(const Exchange::Branches& at);
  void settle_branches();
  void hold_fills();
  void go_on_with_rows();
  bool load_branches();
  void save_branches(RankState& state) const;

  // cache.cc
  template <class Run>
  auto guarded(Run run);
  template <class Done, class What>
  void wait_until(Lock& lock, uint32_t table, Done done, What what);
  void wait_for(const Event& event, uint32_t table);
  void wait_for_memory(Lock& lock, Instance instance, uint32_t table);
  void wait_for_log(Lock& lock, uint32_t table);
  std::string describe_read(const Table& table, uint64_t back);
  void wait_all();
  CacheStats stats();

  Table& table_of(const Held& held) { return mover_.tables[held.table]; }
  PlannedAccess& access_of(Instance instance) { return mover_.schedule->accesses[instance.access]; }
  const ListPlan& list_of(const Held& held) {
    return held.planned ? mover_.schedule->lists[access_of(*held.planned).list]
                        : held.outside->list;
  }

  // NOLINTBEGIN(readability-identifier-naming): the cache's, which is this class
  Device& device_;
  const CacheOptions options_;
  const std::vector<TableSpec> specs_;
  uint64_t budget_ = 0;
  DeviceMemory memory_;
  Mover mover_;
  std::vector<PinnedMemory> pinned_;  // the exchange's
  DeviceWork work_;
  Lane own_lane_;  // for copies outside the sequence, in the caller's thread
  mutable std::mutex mutex_;

  // Used by the application's thread only.
  size_t reserved_offset_ = 0;
  std::optional<Recorder> recorder_;
  bool virtual_ = false;
  std::vector<bool> inferred_;  // by table: its last Update in the sequence clocks it
  std::vector<Held> held_;
  bool has_branches_ = false;  // the job, and there are tables by branch
  uint64_t rounds_ = 0;        // then: ended by save_point()
  uint32_t branch_ = 0;        // the branch whose rows the tables by branch have
  uint64_t next_round_ = 1;    // forks before earlier rounds are known
  uint64_t next_handle_ = 1;
  std::atomic<uint64_t> stalled_ns_ = 0;

  std::unique_ptr<Driver> driver_;
  // NOLINTEND(readability-identifier-naming)
};

// Allows reading a table's rows without the lock, until the end of the scope; then the lock is held
// again.
class Cache::Impl::Reading {
 public:
  Reading(Mover& mover, Lock& lock, Table& table) : mover_(mover), lock_(lock), table_(table) {
    mover_.begin_reading(table_);
    lock_.unlock();
  }
  ~Reading() {
    lock_.lock();
    mover_.end_reading(table_);
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  Mover& mover_;
  Lock& lock_;
  Table& table_;
};

// Waits until done(). Throws the cache's failure, or after the timeout kTimeout, with what() as the
// thing that it waited for.
template <class Done, class What>
void Cache::Impl::wait_until(Lock& lock, uint32_t table, Done done, What what) {
  mover_.throw_if_failed();
  if (done()) return;
  const uint64_t begin = trace_now_ns();
  const bool in_time = lock.wait([&] { return mover_.failed() || done(); }, options_.timeout);
  if (!work_.in_stream()) stalled_ns_ += trace_now_ns() - begin;
  if (mover_.trace) {
    mover_.trace->add(CacheTrack::kWait, "wait", table, mover_.tables[table].clocks, begin);
  }
  mover_.throw_if_failed();
  if (!in_time) {
    fail(ErrorCode::kTimeout, "waited {} ms for {}", options_.timeout.count(), what());
  }
}

}  // namespace phub::geeps

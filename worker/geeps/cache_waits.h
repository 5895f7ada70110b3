// How the application waits for the lanes of its cache.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/device_work.h"
#include "worker/geeps/driver.h"
#include "worker/geeps/mover.h"

namespace phub::geeps {

// Has the lock that the application shares with the lanes, the driver that runs them, and the time
// that the application lost in waiting. A cache owns it. The application's thread calls it.
class CacheWaits {
 public:
  // REQUIRES: the arguments outlive this.
  CacheWaits(Mover& mover, DeviceWork& work, const CacheOptions& options)
      : mover_(mover), work_(work), options_(options) {}
  CacheWaits(const CacheWaits&) = delete;
  CacheWaits& operator=(const CacheWaits&) = delete;

  void start(const Cache::MakeDriver& make_driver) { driver_ = make_driver(mover_, mutex_); }
  void stop();  // once the lanes have done what they were given

  // The cache's lock. Releasing it wakes the lanes that are due.
  class Lock {
   public:
    explicit Lock(CacheWaits& waits) : waits_(waits), lock_(waits.mutex_) {}
    ~Lock() {
      if (lock_.owns_lock()) unlock();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    void lock() { lock_.lock(); }
    void unlock() {
      for (const Lane& lane : waits_.mover_.lanes.all()) {
        if (!lane.due) continue;
        waits_.driver_->wake();
        break;
      }
      lock_.unlock();
    }
    bool owns_lock() const { return lock_.owns_lock(); }
    bool wait(const std::function<bool()>& over, std::chrono::milliseconds limit) {
      return waits_.driver_->wait(lock_, over, limit);
    }

   private:
    CacheWaits& waits_;
    std::unique_lock<std::mutex> lock_;
  };

  // Waits until done(). Throws the cache's failure, or after the timeout kTimeout, with what() as
  // the thing that it waited for.
  template <class Done, class What>
  void until(Lock& lock, uint32_t table, Done done, What what);
  // Makes the application's stream, or its thread, wait.
  void for_event(const Event& event, uint32_t table);
  // For the work that uses the memory of the instance's buffer.
  void for_memory(Lock& lock, Instance instance, uint32_t table);
  // The log has room for the updates of one clock.
  void for_log(Lock& lock, uint32_t table);
  // Until parameters are no older than `back` clocks.
  template <class Done>
  void for_rows(Lock& lock, uint32_t table, uint64_t back, Done done) {
    until(lock, table, done, [&] { return describe_rows(mover_.tables[table], back); });
  }
  void for_results();  // of all that was clocked

  // kInvalid has no effect on the cache; every other error ends its work.
  template <class Run>
  auto guarded(Run run);

  std::chrono::nanoseconds lost() const { return std::chrono::nanoseconds(lost_ns_); }

 private:
  std::string describe_rows(const Table& table, uint64_t back);

  Mover& mover_;
  DeviceWork& work_;
  const CacheOptions& options_;
  std::mutex mutex_;
  std::atomic<uint64_t> lost_ns_ = 0;
  std::unique_ptr<Driver> driver_;
};

// Allows reading a table's rows without the lock, until the end of the scope; then the lock is held
// again.
class Reading {
 public:
  Reading(Mover& mover, CacheWaits::Lock& lock, Table& table)
      : mover_(mover), lock_(lock), table_(table) {
    mover_.table_use.begin_reading(table_);
    lock_.unlock();
  }
  ~Reading() {
    lock_.lock();
    mover_.table_use.end_reading(table_);
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  Mover& mover_;
  CacheWaits::Lock& lock_;
  Table& table_;
};

template <class Done, class What>
void CacheWaits::until(Lock& lock, uint32_t table, Done done, What what) {
  mover_.failure.check();
  if (done()) return;
  const uint64_t begin = trace_now_ns();
  const bool in_time =
      lock.wait([&] { return mover_.failure.happened() || done(); }, options_.timeout);
  if (!work_.in_stream()) lost_ns_ += trace_now_ns() - begin;
  if (mover_.trace) {
    mover_.trace->add(CacheTrack::kWait, "wait", table, mover_.tables[table].clocks, begin);
  }
  mover_.failure.check();
  if (!in_time) {
    fail(ErrorCode::kTimeout, "waited {} ms for {}", options_.timeout.count(), what());
  }
}

template <class Run>
auto CacheWaits::guarded(Run run) {
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

}  // namespace phub::geeps

// How threads wait inside the cache, and what they read without its lock.
#pragma once

#include <chrono>

#include "transport/error.h"
#include "worker/geeps/cache_impl.h"

namespace phub::geeps {

// A table's rows are read, without the lock, for as long as this lives: they are not replaced and
// its key is not handed over meanwhile. Has the lock again afterwards, whatever happens in between.
class Cache::Impl::Reading {
 public:
  // REQUIRES: the lock is held.
  Reading(Impl& cache, Lock& lock, Table& table) : cache_(cache), lock_(lock), table_(table) {
    ++table_.moving;
    lock_.unlock();
  }
  ~Reading() {
    lock_.lock();
    if (--table_.moving > 0) return;
    cache_.pull_.notify_all();
    cache_.partitions_[table_.partition].push.notify_all();
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  Impl& cache_;
  Lock& lock_;
  Table& table_;
};

// Until done(), a failure, or the time is over: then what() says for what it waited.
template <class Done, class What>
void Cache::Impl::wait_here(Lock& lock, uint32_t table, Done done, What what) {
  const uint64_t begin = trace_now_ns();
  const auto over = [&] { return !failure_.empty() || done(); };
  bool in_time = true;
  if (options_.timeout.count() > 0) {
    in_time = changed_.wait_for(lock, options_.timeout, over);
  } else {
    changed_.wait(lock, over);
  }
  if (!work_.in_stream()) stalled_ns_ += trace_now_ns() - begin;
  if (trace_) trace_->add(CacheTrack::kWait, "wait", table, tables_[table].clocks, begin);
  throw_if_failed();
  if (!in_time) {
    fail(ErrorCode::kTimeout, "waited {} ms for {}", options_.timeout.count(), what());
  }
}

}  // namespace phub::geeps

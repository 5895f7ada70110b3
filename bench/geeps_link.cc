#include "bench/geeps_link.h"

#include <sys/prctl.h>

#include <algorithm>

namespace phub::geeps_bench {
namespace {

constexpr size_t kSliceBytes = 32 << 10;  // of a chunk of 8,192 elements

// The default slack of timers is as long as the time of a slice on a fast link.
void wake_up_in_time() { prctl(PR_SET_TIMERSLACK, 1000); }

}  // namespace

LinkedExchange::LinkedExchange(geeps::Exchange& behind, double bytes_per_second)
    : behind_(behind), bytes_per_second_(bytes_per_second), keys_(behind.keys()) {
  threads_.emplace_back([this](const std::stop_token& stop) { guarded([&] { send(stop); }); });
  threads_.emplace_back([this](const std::stop_token& stop) { guarded([&] { receive(stop); }); });
  threads_.emplace_back([this] { guarded([&] { await_results(); }); });
}

LinkedExchange::~LinkedExchange() { behind_.stop(); }  // then all threads end

LinkedExchange::Clock::duration LinkedExchange::time_of(size_t bytes) const {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(static_cast<double>(bytes) / bytes_per_second_));
}

template <class Run>
void LinkedExchange::guarded(Run run) {
  wake_up_in_time();
  try {
    run();
  } catch (const std::exception& error) {
    here_.fail(error);
  }
}

void LinkedExchange::push(size_t key, int32_t priority) {
  here_.check();
  const std::lock_guard lock(mutex_);
  keys_.at(key) = {};
  sending_.push({.priority = priority,
                 .order = pushes_++,
                 .key = key,
                 .left_bytes = elements(key) * sizeof(float),
                 .since = Clock::now()});
  sending_changed_.notify_one();
}

void LinkedExchange::push_null(size_t key) {  // a few bytes
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    keys_.at(key) = {.null = true, .first_up = now, .last_up = now};
  }
  behind_.push_null(key);
}

void LinkedExchange::send(const std::stop_token& stop) {
  Clock::time_point free;  // when what was sent is up
  std::unique_lock lock(mutex_);
  while (sending_changed_.wait(lock, stop, [this] { return !sending_.empty(); }),
         !stop.stop_requested()) {
    Sending sending = sending_.top();
    sending_.pop();
    const size_t slice = std::min(kSliceBytes, sending.left_bytes);
    free = std::max(free, sending.since) + time_of(slice);
    lock.unlock();
    std::this_thread::sleep_until(free);
    lock.lock();
    Key& key = keys_[sending.key];
    if (sending.left_bytes == elements(sending.key) * sizeof(float)) key.first_up = free;
    sending.left_bytes -= slice;
    if (sending.left_bytes > 0) {
      sending_.push(sending);
      continue;
    }
    key.last_up = free;
    lock.unlock();
    behind_.push(sending.key, sending.priority);
    lock.lock();
  }
}

void LinkedExchange::await_results() {
  while (const std::optional<size_t> key = behind_.next()) {
    const std::lock_guard lock(mutex_);
    results_.push({*key, Clock::now()});
    results_changed_.notify_one();
  }
}

void LinkedExchange::receive(const std::stop_token& stop) {
  Clock::time_point free;  // when what came is down
  std::unique_lock lock(mutex_);
  while (results_changed_.wait(lock, stop, [this] { return !results_.empty(); }),
         !stop.stop_requested()) {
    const Result result = results_.top();
    results_.pop();
    const Key key = keys_[result.key];
    const size_t bytes = elements(result.key) * sizeof(float);
    const auto first = key.null ? result.at : key.first_up + (result.at - key.last_up);
    free = std::max(std::max(free, first) + time_of(bytes),
                    result.at + time_of(std::min(kSliceBytes, bytes)));
    lock.unlock();
    std::this_thread::sleep_until(free);
    here_.add(result.key);
    lock.lock();
  }
}

}  // namespace phub::geeps_bench

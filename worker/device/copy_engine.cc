#include "worker/device/copy_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "worker/device/poison.h"

namespace phub {

CopyEngine::Outcome CopyEngine::move(const HostCopy& copy, Clock::time_point ready) {
  using std::chrono::duration_cast;
  using Nanoseconds = std::chrono::duration<double, std::nano>;
  if (options_.poison) {
    poison(copy.to, copy.bytes);
    forbid(copy.to, copy.bytes);
  }
  const bool throttled = options_.bytes_per_second > 0;
  Outcome outcome{std::max(ready, free_at_), std::nullopt};
  if (throttled) {
    const Nanoseconds moving(static_cast<double>(copy.bytes) * 1e9 / options_.bytes_per_second);
    free_at_ = outcome.end + duration_cast<Clock::duration>(moving);
    outcome.end = free_at_;
  }
  outcome.end += options_.latency;

  const Nanoseconds expected(static_cast<double>(copy.bytes) / machine_bytes_per_ns_);
  std::this_thread::sleep_until(outcome.end - duration_cast<Clock::duration>(expected));
  const auto failing = failure_of_this_copy();
  const size_t moved = failing ? std::min(*failing, copy.bytes) : copy.bytes;
  const auto begin = Clock::now();
  permit(copy.to, copy.bytes);
  std::memcpy(copy.to, copy.from, moved);
  if (failing) {
    poison(copy.to, copy.bytes);
    outcome.error =
        fmt::format("copy of {} bytes {} the device, from {} to {}, failed after {} bytes",
                    copy.bytes, copy.to_device ? "to" : "from", copy.from, copy.to, moved);
    return outcome;
  }
  const auto now = Clock::now();
  if (copy.bytes >= 64 * 1024) {
    const Nanoseconds took = now - begin;
    machine_bytes_per_ns_ = static_cast<double>(copy.bytes) / std::max(took.count(), 1.0);
  }
  if (throttled || options_.latency.count() > 0) {
    std::this_thread::sleep_until(outcome.end);
  } else {
    outcome.end = now;
  }
  return outcome;
}

void CopyEngine::inject_failure(uint64_t copies, size_t bytes) {
  const std::lock_guard lock(mutex_);
  injected_ = {copies, bytes};
}

std::optional<size_t> CopyEngine::failure_of_this_copy() {
  const std::lock_guard lock(mutex_);
  if (!injected_) return std::nullopt;
  if (injected_->copies > 0) {
    --injected_->copies;
    return std::nullopt;
  }
  const size_t bytes = injected_->bytes;
  injected_.reset();
  return bytes;
}

}  // namespace phub

// One direction of a host device's copies, at a given or the highest possible speed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace phub {

struct HostCopy {
  bool to_device;
  void* to;
  const void* from;
  size_t bytes;
};

struct CopyEngineOptions {
  double bytes_per_second = 0;  // 0: as fast as this machine copies
  std::chrono::nanoseconds latency{0};
  bool poison = false;  // poisons the destination for the duration of a copy
};

// Used by the thread that copies; any thread may call inject_failure().
class CopyEngine {
 public:
  using Clock = std::chrono::steady_clock;

  explicit CopyEngine(const CopyEngineOptions& options) : options_(options) {}

  struct Outcome {
    Clock::time_point end;             // according to bandwidth and latency; the clock may be later
    std::optional<std::string> error;  // set: the destination is not usable
  };
  // Copies, and returns not before bandwidth and latency allow. `ready`: the time from which the
  // copy could begin.
  Outcome move(const HostCopy& copy, Clock::time_point ready);

  // Skips `copies` copies, and lets the next one fail after `bytes` of it were copied.
  void inject_failure(uint64_t copies, size_t bytes);

 private:
  struct Injected {
    uint64_t copies;
    size_t bytes;
  };

  std::optional<size_t> failure_of_this_copy();

  CopyEngineOptions options_;
  Clock::time_point free_at_;          // the time when the engine has moved all that it was given
  double machine_bytes_per_ns_ = 4.0;  // the speed of the last memcpy: it tells when to begin in
                                       // order to end in time
  std::mutex mutex_;                   // guards the next one
  std::optional<Injected> injected_;
};

}  // namespace phub

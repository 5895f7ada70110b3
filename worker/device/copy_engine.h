// One direction of a host device's copies: moves bytes as fast as it was told to, or as it can.
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
  bool poison = false;  // the destination is poisoned from the beginning of a copy to its end
};

// Owned by the thread that copies; inject_failure() from any thread.
class CopyEngine {
 public:
  using Clock = std::chrono::steady_clock;

  explicit CopyEngine(const CopyEngineOptions& options) : options_(options) {}

  struct Outcome {
    Clock::time_point end;             // by the bandwidth; the clock itself may be later
    std::optional<std::string> error;  // then nothing usable has arrived
  };
  // Copies, and returns when the bandwidth and the latency allow. `ready`: when it could have
  // begun.
  Outcome move(const HostCopy& copy, Clock::time_point ready);

  // Lets one copy fail after `bytes` of it have moved: the next one after `copies` more.
  void inject_failure(uint64_t copies, size_t bytes);

 private:
  struct Injected {
    uint64_t copies;
    size_t bytes;
  };

  std::optional<size_t> failure_of_this_copy();

  CopyEngineOptions options_;
  Clock::time_point free_at_;  // when the engine has moved all that it was given
  double machine_bytes_per_ns_ =
      4.0;            // what memcpy reached last: when to begin in order to end in time
  std::mutex mutex_;  // guards the next one
  std::optional<Injected> injected_;
};

}  // namespace phub

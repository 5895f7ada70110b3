// Monotonic time. It is injected, since the simulator has its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace phub {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual uint64_t now_ms() const = 0;
};

class SteadyClock final : public Clock {
 public:
  uint64_t now_ms() const override {
    using namespace std::chrono;
    return static_cast<uint64_t>(
        duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count());
  }
};

inline const SteadyClock kSteadyClock;  // for users that get no other

// The time by which leases, progress and join limits are measured. While the control thread does
// not run (it is busy, or the process was stopped) no heartbeat is read. So a gap between two
// rounds of its loop counts for no more than `longest_ms` of begin_round().
class ServedTime {
 public:
  explicit ServedTime(const Clock& clock) : clock_(clock), round_ms_(clock.now_ms()) {}

  uint64_t now_ms() const {
    return now_ms_ + std::min(clock_.now_ms() - round_ms_, longest_round_ms_);
  }
  // REQUIRES: called by the control thread at the start of each round of its loop.
  void begin_round(uint64_t longest_ms) {
    now_ms_ = now_ms();
    round_ms_ = clock_.now_ms();
    longest_round_ms_ = longest_ms;
  }

 private:
  const Clock& clock_;
  uint64_t round_ms_;
  uint64_t now_ms_ = 1;
  uint64_t longest_round_ms_ = 0;
};

}  // namespace phub

// Monotonic time, injected: the simulator brings its own.
#pragma once

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

}  // namespace phub

// The clock of one simulated box: the network's time, and what the box stood still for.
#pragma once

#include <cstdint>

#include "phub/clock.h"
#include "transport/sim/net.h"

namespace phub::sim {

inline constexpr uint64_t kMs = 1'000'000;  // in ns, in which the network counts

class VirtualClock final : public Clock {
 public:
  explicit VirtualClock(const SimNet& net) : net_(net) {}
  uint64_t now_ms() const override { return 1000 + jumped_ms_ + net_.now_ns() / kMs; }
  void jump(uint64_t ms) { jumped_ms_ += ms; }

 private:
  uint64_t jumped_ms_ = 0;
  const SimNet& net_;
};

}  // namespace phub::sim

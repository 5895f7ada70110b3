// Two endpoints of one thread as one: that of the near link and that of the network.
#pragma once

#include <cstdint>
#include <span>

#include "transport/transport.h"

namespace phub {

// Owned by its thread, as both. A queue pair is connected at one of them at most; the other refuses
// posts to it.
class BesideEndpoint : public virtual Endpoint {
 public:
  // Throws Error as wake_for(). REQUIRES: both outlive this.
  BesideEndpoint(Endpoint& near, Endpoint& network) : near_(near), network_(network) {
    network_.wake_for(near_.wake_fd());
  }

  // They take turns: neither holds the other up.
  size_t poll(std::span<Arrival> out) final {
    Endpoint& first = near_first_ ? near_ : network_;
    Endpoint& second = near_first_ ? network_ : near_;
    near_first_ = !near_first_;
    const size_t taken = first.poll(out);
    return taken + second.poll(out.subspan(taken));
  }
  bool post(QueuePair to, const Write& write) final {
    return near_.post(to, write) || network_.post(to, write);
  }
  void flush() final {
    near_.flush();
    network_.flush();
  }
  // The network's first: it takes the events so far from the descriptor, also those of the other.
  bool arm(std::span<const uint32_t> wake_after) final {
    return network_.arm(wake_after) && near_.arm(wake_after);
  }
  void disarm() final {
    near_.disarm();
    network_.disarm();
  }
  int wake_fd() const final { return network_.wake_fd(); }
  bool crosses_nic(QueuePair to) const final { return near_.crosses_nic(to); }
  uint64_t refused_for_ns() const final { return network_.refused_for_ns(); }
  EndpointCounters counters() const final {
    EndpointCounters all = near_.counters();
    return all += network_.counters();
  }

 private:
  Endpoint& near_;
  Endpoint& network_;
  bool near_first_ = false;
};

}  // namespace phub

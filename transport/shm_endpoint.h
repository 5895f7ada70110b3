// The queue pairs of one thread over shared memory: a ring each way and a doorbell, per peer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/nic.h"
#include "transport/shm_memory.h"
#include "transport/shm_ring.h"

namespace phub {

// Either side's. Opened queue pairs are walked through a compact list, so that a poll costs one
// load of a shared line for each, and an idle one nothing more. The box's endpoint of a core adds
// attach() and detach().
class ShmEndpoint : public Endpoint {
 public:
  // Up to `qps` queue pairs, none open. Throws Error(kFull) when descriptors run out.
  explicit ShmEndpoint(uint32_t qps);

  size_t poll(std::span<Arrival> out) final;
  bool post(uint32_t qp, const Write& write) final;
  void flush() final;
  bool arm(std::span<const uint32_t> wake_after) final;
  void disarm() final;
  int wake_fd() const final { return epoll_.get(); }
  EndpointCounters counters() const final { return {.wakeups = wakeups_sent_}; }

  // A worker's queue pairs are open from the start.
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;

  // Before the queue pair is used: rings on it wake this endpoint. Any thread. Throws Error(kFull).
  void watch(int doorbell, uint32_t events);
  void unwatch(int doorbell);
  // The descriptor that wakes this endpoint and fills up if nobody reads it (a pipe); -1: none.
  void set_drain(int fd) { drain_fd_ = fd; }

  // `doorbell` wakes the peer: an eventfd or a pipe, not blocking.
  void open(uint32_t qp, ShmConsumer in, ShmProducer out, int doorbell);
  void close(uint32_t qp);

 private:
  enum class Status : uint8_t {
    kClosed,
    kLive,
    kBroken,  // and the owner does not know yet
    kSilent,  // broken, and the owner knows
  };
  struct State {
    Status status = Status::kClosed;
    bool dirty = false;  // in dirty_
    int doorbell = -1;
  };

  size_t take(uint32_t qp, std::span<Arrival> out);
  bool ready(uint32_t qp);

  std::vector<ShmConsumer> consumers_;  // by queue pair, as the two below
  std::vector<State> states_;
  std::vector<ShmProducer> producers_;
  std::vector<uint32_t> live_;   // open queue pairs
  std::vector<uint32_t> dirty_;  // posted to since the last flush
  size_t next_ = 0;              // in live_: where the next poll begins
  uint64_t wakeups_sent_ = 0;
  bool armed_ = false;
  int drain_fd_ = -1;
  ShmFd epoll_;
};

}  // namespace phub

// The queue pairs of one thread over shared memory: a ring each way and a doorbell, per peer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/fd.h"
#include "transport/shm/ring.h"
#include "transport/transport.h"
#include "transport/turns.h"

namespace phub {

// Both sides use it; the box's endpoint of a core adds attach() and detach(). A poll costs one load
// of a shared line for each open queue pair, and nothing more for an idle one.
class ShmEndpoint : public virtual Endpoint {
 public:
  // A queue pair for each of `queues` and `ranks` (1 at the worker), none open. Throws Error(kFull)
  // when descriptors run out.
  ShmEndpoint(uint32_t queues, uint32_t ranks);

  size_t poll(std::span<Arrival> out) final;
  bool post(QueuePair to, const Write& write) final;
  void flush() final;
  bool arm(std::span<const uint32_t> wake_after) final;
  void disarm() final;
  int wake_fd() const final { return epoll_.get(); }
  EndpointCounters counters() const final { return {.wakeups = wakeups_sent_}; }

  // From now on rings on the doorbell wake this endpoint. REQUIRES: called before the queue pair is
  // used. Any thread. Throws Error(kFull).
  void watch(int doorbell, uint32_t events);
  void unwatch(int doorbell);
  // The descriptor that wakes this endpoint and fills up if nobody reads it (a pipe); -1: none.
  void set_drain(int fd) { drain_fd_ = fd; }

  // `doorbell` wakes the peer: an eventfd or a pipe, not blocking.
  void open(QueuePair pair, ShmConsumer in, ShmProducer out, int doorbell);
  void close(QueuePair pair);

 private:
  enum class Status : uint8_t {
    kClosed,
    kLive,
    kBroken,  // and the owner does not know yet
    kSilent,  // broken, and the owner knows
  };
  struct State {
    QueuePair pair;
    Status status = Status::kClosed;
    bool dirty = false;  // in dirty_
    int doorbell = -1;
  };

  uint32_t index_of(QueuePair pair) const { return pair.queue * ranks_ + pair.rank; }
  size_t take(uint32_t qp, std::span<Arrival> out);
  bool ready(uint32_t qp);

  const uint32_t ranks_;
  std::vector<ShmConsumer> consumers_;  // by index_of(), as the two below
  std::vector<State> states_;
  std::vector<ShmProducer> producers_;
  Turns live_;                   // open queue pairs
  std::vector<uint32_t> dirty_;  // posted to since the last flush
  uint64_t wakeups_sent_ = 0;
  bool armed_ = false;
  int drain_fd_ = -1;
  Fd epoll_;
};

}  // namespace phub

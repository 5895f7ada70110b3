// The queue pairs of one thread over libfabric. Each has a completion queue of its own, which takes
// turns with the others, and the TCP connection that it was set up over: its end is the pair's.
//
// To sleep, a thread waits for the descriptors of its completion queues and connections in one
// epoll, and for a timer while writes are on their way. Where a provider has no such descriptor
// (shm), a byte over the connection follows every batch of writes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/fd.h"
#include "transport/in_flight.h"
#include "transport/ofi/pair.h"
#include "transport/transport.h"
#include "transport/turns.h"

namespace phub {

// The socket and the fabric's pair of a connected queue pair; they outlive close().
struct OfiConnected {
  int socket = -1;
  OfiPair* pair = nullptr;
};

// Queue pairs are listed first and opened when their connection is there.
class OfiEndpoint : public virtual Endpoint {
 public:
  // A queue pair for each of `queues` and `ranks` (1 at the worker), none listed. `endpoints`: how
  // many there are of this kind, this one included. Throws Error(kFull) when descriptors run out.
  OfiEndpoint(uint32_t queues, uint32_t ranks, uint32_t endpoints);

  size_t poll(std::span<Arrival> out) final;
  bool post(QueuePair to, const Write& write) final;
  void flush() final;
  bool arm(std::span<const uint32_t> wake_after) final;
  void disarm() final { armed_ = false; }
  int wake_fd() const final { return epoll_.get(); }
  void wake_for(int fd) final;
  EndpointCounters counters() const final { return counters_; }

  // Any thread: puts the socket into the epoll, silent until announce(). Throws Error(kFull).
  void watch(int socket, QueuePair pair);
  // Any thread: from now on events at the socket, first that it is writable, wake the owner.
  void announce(int socket, QueuePair pair);

  void list(QueuePair pair);
  // REQUIRES: listed, and the socket watched. Throws Error(kFull).
  void open(QueuePair pair, const OfiConnected& connected);
  void close(QueuePair pair);  // whatever is there, and the fabric's pair with it

 protected:
  // Something happened at a queue pair that is listed but not open.
  virtual void connection_announced(QueuePair) {}

 private:
  enum class Status : uint8_t {
    kClosed,
    kListed,
    kLive,
    kBroken,  // and the owner does not know yet
    kSilent,  // broken, and the owner knows
  };
  struct Pair {
    QueuePair name;
    Status status = Status::kClosed;
    bool dirty = false;   // in dirty_
    bool ending = false;  // the peer is gone: its last writes are still to be taken
    OfiConnected connected;
    std::vector<uint32_t> landed;  // taken from the provider, not from here yet
    size_t taken = 0;              // those of `landed` that were taken
  };

  uint32_t index_of(QueuePair pair) const { return pair.queue * ranks_ + pair.rank; }
  size_t take(uint32_t qp, std::span<Arrival> out);
  bool fetch(Pair& pair);
  void ring(const Pair& pair);
  void take_events();
  void take_event(uint32_t qp, uint32_t events);
  bool is_blocked(const Pair& pair) const;
  void set_timer();
  void break_off(Pair& pair);

  const uint32_t ranks_;
  std::vector<Pair> pairs_;      // by index_of()
  Turns live_;                   // all but the closed
  std::vector<uint32_t> dirty_;  // posted to since the last flush
  InFlight in_flight_;           // counts writes that are posted and not completed
  uint32_t polls_without_events_ = 0;
  bool armed_ = false;  // and may be asleep
  EndpointCounters counters_;
  Fd epoll_, timer_;
};

}  // namespace phub

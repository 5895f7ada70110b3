// The queue pairs of one thread over TCP: a socket each, an epoll for all. The hot path of both
// sides.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/nic.h"
#include "transport/tcp_pair.h"
#include "transport/tcp_socket.h"

namespace phub {

// What a connected queue pair works on; all of it outlives close().
struct TcpQueuePair {
  int socket = -1;
  std::span<Write> ring;
  std::span<const std::byte> source;  // what is sent from
  std::span<std::byte> target;        // where frames land
};

// Queue pairs are listed first and opened when their connection is there. An opened one is read
// only while it is known to be readable: epoll's edges say when.
class TcpEndpoint : public Endpoint {
 public:
  // Up to `qps` queue pairs, none listed. Throws Error(kFull) when descriptors run out.
  explicit TcpEndpoint(uint32_t qps);

  size_t poll(std::span<Arrival> out) final;
  bool post(uint32_t qp, const Write& write) final;
  void flush() final;
  bool arm(std::span<const uint32_t> wake_after) final;
  void disarm() final {}
  int wake_fd() const final { return epoll_.get(); }
  EndpointCounters counters() const final;

  // A worker's queue pairs are its link's.
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;

  // Any thread: puts the socket into the epoll, silent until announce(). Throws Error(kFull).
  void watch(int socket, uint32_t qp);
  // Any thread: from now on what happens at the socket, first that it is writable, wakes the owner.
  void announce(int socket, uint32_t qp);

  void list(uint32_t qp);
  void open(uint32_t qp,
            const TcpQueuePair& connected);  // REQUIRES: listed, and the socket watched
  void close(uint32_t qp);  // whatever is there; the socket stays open, but out of the epoll

  const TcpCounters& tcp_counters() const { return counters_; }

 protected:
  // Something happened at a queue pair that is listed but not open.
  virtual void connection_announced(uint32_t) {}

 private:
  enum class Status : uint8_t {
    kClosed,
    kListed,
    kLive,
    kBroken,  // and the owner does not know yet
    kSilent,  // broken, and the owner knows
  };
  struct Pair {
    Status status = Status::kClosed;
    bool readable = false;  // not known to be drained
    bool writable = false;  // not known to be full
    bool ending = false;    // the peer is gone: what it sent last is still to be read
    bool dirty = false;     // in dirty_
    int socket = -1;
    TcpReceiver receiver;
    TcpSender sender;
  };

  bool has_work(const Pair& pair) const;
  bool take_events();
  void take_event(uint32_t qp, uint32_t events);
  size_t take(uint32_t qp, std::span<Arrival> out);
  void receive(Pair& pair, uint64_t& bytes);
  void send(Pair& pair);
  void break_off(Pair& pair);

  std::vector<Pair> pairs_;      // by queue pair
  std::vector<uint32_t> live_;   // all but the closed
  std::vector<uint32_t> dirty_;  // posted to since the last flush
  size_t next_ = 0;              // in live_: where the next poll begins
  TcpCounters counters_;
  TcpFd epoll_;
};

}  // namespace phub

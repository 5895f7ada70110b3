// The queue pairs of one thread over TCP: a socket each, an epoll for all. The hot path of both
// sides.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "transport/in_flight.h"
#include "transport/tcp/in_step.h"
#include "transport/tcp/pair.h"
#include "transport/tcp/socket.h"
#include "transport/trace.h"
#include "transport/transport.h"
#include "transport/turns.h"

namespace phub {

// The parts of a connected queue pair; all of them outlive close().
struct TcpQueuePair {
  TcpStream stream;
  std::span<Write> ring;
  std::span<const std::byte> source;  // writes are sent from here
  std::span<std::byte> target;        // frames land here
  const InPlace* in_place = nullptr;  // the worker's: parts of source and target that lie elsewhere
  SlotWindow* window = nullptr;       // the box's: frames land in it, and not in the target
};

// Queue pairs are listed first and opened when their connection is there. An opened one is read
// only while it is known to be readable: epoll's edges say when.
class TcpEndpoint : public virtual Endpoint {
 public:
  // A queue pair for each of `queues` and `ranks` (1 at the worker), none listed. `endpoints`: how
  // many there are of this kind, this one included. Throws Error(kFull) when descriptors run out.
  TcpEndpoint(uint32_t queues, uint32_t ranks, uint32_t endpoints = 1);

  // The box's: reads from no rank that is more chunks ahead of one that delivers (in_step.h).
  // Throws Error(kFull) when descriptors run out.
  void keep_in_step(uint32_t lead_chunks, uint64_t (*now_ns)() = trace_now_ns);

  size_t poll(std::span<Arrival> out) final;
  bool post(QueuePair to, const Write& write) final;
  void flush() final;
  bool arm(std::span<const uint32_t> wake_after) final;
  void disarm() final {}
  int wake_fd() const final { return epoll_.get(); }
  EndpointCounters counters() const final;
  bool crosses_nic(QueuePair to) const final { return !pairs_[index_of(to)].stream.peer; }

  // Any thread: puts the socket into the epoll, silent until announce(). Throws Error(kFull).
  void watch(int socket, QueuePair pair);
  // Any thread: from now on events at the socket, first that it is writable, wake the owner.
  void announce(int socket, QueuePair pair);

  void list(QueuePair pair);
  // REQUIRES: listed, and the socket watched.
  void open(QueuePair pair, const TcpQueuePair& connected);
  void close(QueuePair pair);  // whatever is there; the socket stays open, but out of the epoll

  const TcpCounters& tcp_counters() const { return counters_; }

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
    bool readable = false;  // not known to be drained
    bool writable = false;  // not known to be full
    bool ending = false;    // the peer is gone: its last bytes are still to be read
    bool dirty = false;     // in dirty_
    TcpStream stream;
    TcpReceiver receiver;
    TcpSender sender;
  };

  uint32_t index_of(QueuePair pair) const { return pair.queue * ranks_ + pair.rank; }
  bool is_held(const Pair& pair) const;
  bool is_read(const Pair& pair) const;
  // No queue pair is open, and none has been announced.
  bool is_idle() const { return open_ == 0 && !announced_.load(std::memory_order_acquire); }
  static void make_place(const Pair& pair);
  bool has_work(const Pair& pair) const;
  void look_at_leads();
  void wake_in(uint64_t ns);
  bool take_events();
  void take_event(uint32_t qp, uint32_t events);
  size_t take(uint32_t qp, std::span<Arrival> out);
  static bool waits_for_room(const Pair& pair);
  void receive(Pair& pair, uint64_t& bytes);
  void send(Pair& pair);
  void break_off(Pair& pair);

  const uint32_t ranks_;
  std::vector<Pair> pairs_;              // by index_of()
  Turns live_;                           // all but the closed
  uint32_t open_ = 0;                    // neither closed nor listed
  std::atomic<bool> announced_ = false;  // something, that the owner has not looked for yet
  std::vector<uint32_t> dirty_;          // posted to since the last flush
  InFlight in_flight_;                   // counts the bytes that the senders hold
  const uint32_t queues_;
  std::optional<InStep> in_step_;
  uint64_t (*now_ns_)() = nullptr;
  TcpCounters counters_;
  Fd epoll_;
  Fd timer_;  // in the epoll: when a rank that is not read from may have to be
};

}  // namespace phub

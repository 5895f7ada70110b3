// The box's end of a transport that workers connect to over sockets: accepts connections and reads
// their hellos. README.md ("Admission") describes it.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "transport/admission.h"
#include "transport/error.h"
#include "transport/fd.h"
#include "transport/transport.h"

namespace phub {

// A connection is half open until its whole hello has come. There are at most `max_half_open` of
// them, each for at most `half_open_ms`; the oldest makes room for the newest. A refusal tells the
// peer the reason, and the server's log (TransportEvent::kRefused).
class SocketTransport : public Transport {
 public:
  int event_fd() const final { return admissions_.epoll.get(); }
  void handle_events(std::vector<TransportEvent>& out) final;

 protected:
  // Raises the soft limit of open files to the hard one. Throws Error.
  SocketTransport(uint32_t half_open_ms, uint32_t max_half_open);
  ~SocketTransport() override;
  // Non-blocking, and listening. A hello that comes there may have so many descriptors with it.
  void listen(Fd listener, size_t most_descriptors = 0);

  // Throws Error when the peer may not use this server.
  virtual void check_peer(int /*socket*/) const {}
  virtual std::string describe_peer(int socket) const = 0;  // "from 10.0.0.2:4711"
  // The number of bytes of the hello that may be read after `so_far`; 0: it is whole, or too long.
  // Throws Error when it is not a hello.
  virtual size_t missing(std::span<const std::byte> so_far) const = 0;
  // Answers a whole hello and hands the connection over to its incarnation. Throws Error when it is
  // refused: the socket is still the caller's then.
  virtual void welcome(std::span<const std::byte> hello, Fd& socket) = 0;
  // Does the same for one that may have descriptors with it.
  virtual void welcome_with(std::span<const std::byte> hello, Fd& socket,
                            std::span<const Fd> /*descriptors*/) {
    welcome(hello, socket);
  }
  virtual void send_refusal(int socket, ErrorCode code, const std::string& reason) const = 0;

  // Takes a new connection over before its hello is read, or leaves it: false.
  virtual bool take_over(Fd& /*socket*/) { return false; }
  // Calls finish_others() when the descriptor is readable. Throws Error.
  void watch_others(int fd);
  virtual void finish_others(std::vector<TransportEvent>& /*out*/) {}
  // Called before a socket is closed on which the reason of a refusal was sent.
  static void end_gently(int socket);

  Admissions admissions_;

 private:
  using Clock = std::chrono::steady_clock;
  struct HalfOpen {
    uint64_t id = 0;
    Fd socket;
    Clock::time_point deadline;
    std::array<std::byte, 256> hello = {};
    size_t bytes = 0;  // bytes of `hello` that have come
    size_t most_descriptors = 0;
    std::vector<Fd> descriptors = {};
  };
  struct Listener {
    uint64_t id = 0;
    Fd socket;
    size_t most_descriptors = 0;
  };

  bool accept_one(const Listener& listener, std::vector<TransportEvent>& out);
  bool refuse_for_want_of_descriptors(int listener, std::vector<TransportEvent>& out);
  void make_room(std::vector<TransportEvent>& out);
  static ssize_t receive(HalfOpen& half_open, size_t most);
  bool read_hello(HalfOpen& half_open, std::vector<TransportEvent>& out);
  void refuse(Fd socket, ErrorCode code, const std::string& reason,
              std::vector<TransportEvent>& out) const;
  void expire(std::vector<TransportEvent>& out);
  void set_timer();

  const std::chrono::milliseconds half_open_time_;
  const size_t max_half_open_;
  std::vector<Listener> listeners_;
  Fd timer_;
  Fd spare_;  // given up for a moment to refuse a connection when descriptors have run out
  std::deque<HalfOpen> half_open_;  // the oldest first
};

}  // namespace phub

// Lets workers in over TLS: shakes hands and reads hellos, in a thread of its own, so that
// strangers hold up neither the control thread nor a core.
//
// A connection has `half_open_ms` until its hello is there. It takes no memory for TLS before its
// first byte; at most 256 handshakes are under way, and at most `max_half_open` connections: the
// oldest makes room for the newest.
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/fd.h"
#include "transport/tcp/format.h"
#include "transport/tcp/tls.h"
#include "transport/tls/counters.h"
#include "transport/tls/opening.h"
#include "transport/tls/server.h"

namespace phub {

class TcpTlsOpening;

// Control thread.
class TcpTlsDoor {
 public:
  // `context` outlives this. Throws Error(kFull): no descriptors.
  TcpTlsDoor(const TlsServerContext& context, uint32_t half_open_ms, uint32_t max_half_open);
  ~TcpTlsDoor();

  // Takes over a new connection; `from` is for messages. If there are far too many it is closed.
  void open(Fd socket, std::string from);

  struct Guest {
    std::string from;
    std::string refused;  // the reason why it was not let in; "": it was, and the rest is set
    Fd socket;            // outlives `tls`
    std::unique_ptr<TcpTls> tls;
    std::vector<std::byte> hello;  // shorter if its header is wrong
  };
  // Those who came in or were refused since the last call. event_fd() is readable if there are any.
  std::vector<Guest> take();
  int event_fd() const { return event_.get(); }

 private:
  friend class TcpTlsOpening;
  void admit(Fd socket, std::string from);  // the door's thread calls this and the functions below
  void deliver(Guest guest);

  const TlsServerContext& context_;
  const uint32_t half_open_ms_;
  const uint32_t max_half_open_;
  const Fd event_;
  std::mutex mutex_;
  std::vector<Guest> guests_;          // guarded by mutex_
  std::atomic<uint32_t> present_ = 0;  // connections, until they are delivered or closed
  TlsCounters counters_;
  std::deque<std::weak_ptr<TcpTlsOpening>> openings_;  // the oldest first; door's thread
  boost::asio::io_context io_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{
      io_.get_executor()};
  TlsTurns turns_;
  const TlsOpening::Shared shared_;
  std::jthread thread_;
};

}  // namespace phub

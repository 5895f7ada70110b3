// TLS in front of the control port. A connection's bytes are decrypted and encrypted here, and go
// over a pair of local sockets to and from its HttpSession, which speaks plain HTTP. The session's
// limits hold for both: when it closes its end, because a client sends nothing or too slowly, the
// client's connection is closed.
//
// Two threads of its own: one for handshakes, one for the connections after them, so that strangers
// who begin handshakes hold up neither the control thread nor those who are in. A connection takes
// no memory for TLS before its first byte, and at most `max_handshakes` are under way: more wait
// for their turn, and one that has taken longer than `evict_after_ms` makes room for them.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "transport/tls/counters.h"
#include "transport/tls/server.h"

namespace boost::asio {
class io_context;
}

namespace phub {

struct TlsOptions {
  TlsServerFiles files;
  uint32_t max_handshakes = 256;
  uint32_t evict_after_ms = 1000;
  // By a thread of its own: why a client was refused. Few lines a second. Null: nobody is told.
  std::function<void(const std::string& line)> note;
};

// One thread at a time calls its functions. REQUIRES: outlives the sessions; SIGPIPE is ignored.
class TlsFront {
 public:
  // Throws Error(kInvalid): a file is wrong.
  explicit TlsFront(TlsOptions options);
  ~TlsFront();

  // Reads the files again, for connections that come later. Throws Error(kInvalid); then those read
  // before stay in use.
  void reload();

  struct Opened {
    boost::asio::ip::tcp::socket socket;  // the session's end
    // Set before the socket's end arrives, if the client's connection broke instead of ending.
    std::shared_ptr<const std::atomic<bool>> broken;
  };
  // Takes over a client's connection. The socket is one of `context`. Throws Error(kFull): no
  // descriptors.
  Opened open(boost::asio::ip::tcp::socket client, boost::asio::io_context& context);

  const TlsCounters& counters() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phub

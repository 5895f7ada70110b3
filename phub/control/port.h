// The control port: HTTP/1.1 over the io_context of the control thread.
//
// These are bounded, whatever clients do: the number of connections, their idle time, bytes and
// time of a header, bytes of a body (by its route, before it is read), and the sums of all long
// bodies and of all long answers. A request may be answered much later. Its connection waits; if
// the client is gone by then, the answer is dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phub/background.h"
#include "phub/control/access.h"
#include "phub/control/handler.h"

namespace boost::asio {
class io_context;
}

namespace phub {

class TlsFront;

struct HttpOptions {
  std::vector<std::string> listen = {"127.0.0.1:7717"};  // port 0: a free one
  uint32_t max_connections = 4096;                       // more get status 503
  uint32_t request_timeout_ms = 10000;  // to receive a request, and to send an answer
  uint32_t idle_timeout_ms = 60000;     // between requests
  // A new connection beyond max_connections replaces the one that has been idle the longest, if
  // that is longer than this; those that never completed a request first.
  uint32_t evict_after_ms = 2000;
  uint32_t max_header_bytes = 8192;
  // Received bytes of all bodies of more than 4 KiB that are not decoded yet. A request that would
  // exceed it gets status 503.
  uint64_t max_long_body_bytes = uint64_t{128} << 20;
  // All answers of more than 64 KiB that are being sent; more become status 503.
  uint64_t max_unread_bytes = uint64_t{64} << 20;
  // Gets a line for each request that was done or refused: its sender, their address, the request,
  // its end. It gets few lines a second, and the number of those that were left out. They hold no
  // token and no ticket. Null: nobody gets them.
  std::function<void(const std::string& line)> audit;
  std::function<void()> after_request;  // called after each call of the handler
  const Access* access = nullptr;       // null: everybody may do everything
  TlsFront* tls = nullptr;              // null: plain HTTP
  // Decodes and encodes long bodies and answers. Null: the control thread does.
  Background* background = nullptr;
};

// Control thread only, construction too. REQUIRES: io_context and handler outlive it. Answers after
// stop() or the destructor are dropped.
class HttpServer {
 public:
  // Listens. Throws Error, which names the address and the way out: kInvalid (not an address),
  // kTaken (the port is in use), kUnavailable (not an address of this host, not permitted).
  HttpServer(boost::asio::io_context& context, ControlHandler& handler, HttpOptions options);
  ~HttpServer();

  // As "127.0.0.1:43210", with the actual port.
  std::vector<std::string> addresses() const;
  size_t connections() const;

  // Closes listeners and connections. Their last events come with the io_context, or never.
  void stop();

 private:
  class Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace phub

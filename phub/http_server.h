// The control port: HTTP/1.1 over the io_context of the control thread.
//
// What strangers can hold is bounded: connections, bytes and time of a header, bytes of a body by
// its route before any of it is read, all long bodies and all long answers together, idle time. A
// request may be answered much later; its connection waits, and if the client has gone meanwhile
// the answer is dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phub/background.h"
#include "phub/control_handler.h"

namespace boost::asio {
class io_context;
}

namespace phub {

struct HttpOptions {
  std::vector<std::string> listen = {"127.0.0.1:7717"};  // port 0: a free one
  uint32_t max_connections = 4096;                       // further ones get status 503
  uint32_t request_timeout_ms =
      10000;                         // from a request's first byte to its last; for an answer too
  uint32_t idle_timeout_ms = 60000;  // between requests
  // With max_connections open, the one that has been without a request for longest makes room for
  // a new one if that is longer than this; first those that never completed one.
  uint32_t evict_after_ms = 2000;
  uint32_t max_header_bytes = 8192;
  // What has come of bodies of more than 4 KiB that are being read, together; who brings more gets
  // status 503.
  uint64_t max_long_body_bytes = uint64_t{128} << 20;
  // Answers of more than 64 KiB that are on their way, together; further ones become a 503.
  uint64_t max_unread_bytes = uint64_t{64} << 20;
  std::function<void()> after_request;  // called when the handler has been
  // Where long bodies and answers are decoded and encoded. Null: on the control thread.
  Background* background = nullptr;
};

// Control thread only, construction too. The io_context and the handler outlive it; answers that
// come after stop() or the destructor are dropped.
class HttpServer {
 public:
  // Listens. Throws Error that names the address and the way out: kInvalid (not an address), kTaken
  // (port in use), kUnavailable (no such address here, not permitted).
  HttpServer(boost::asio::io_context& context, ControlHandler& handler, HttpOptions options);
  ~HttpServer();

  // "127.0.0.1:43210", with the port that was taken.
  std::vector<std::string> addresses() const;
  size_t connections() const;

  // Closes listeners and connections. The closed sockets' last events run with the io_context.
  void stop();

 private:
  class Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace phub

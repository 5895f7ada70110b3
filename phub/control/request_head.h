// The requirements on a request's header before its body is read. It keeps web pages away: a
// browser on this machine, or on a machine that reaches this port, sends what any page asks it to
// send.
//
// - Host: a client that connects over loopback must name this machine. A page whose own name was
//   made to mean 127.0.0.1 (DNS rebinding) sends that name.
// - Origin: a browser names the page that sends the request. This port's own page only reads, so
//   nothing is changed for a page at all: one whose name was made to mean this machine looks like
//   our own. Only the port's own page may read.
// - Content-Type: a page may send any text to anybody, but application/json and
//   application/octet-stream only after it asked whether it may, which this port refuses.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/error.h"

namespace phub {

struct RequestHead {
  std::string_view host, origin, content_type;  // "": not there
  size_t hosts = 0;                             // the number of Host headers
  bool http_1_0 = false;                        // HTTP/1.0 needs no Host header
  bool has_body = false;
  bool of_bytes = false;       // the body is a rank's part of a checkpoint, not JSON
  bool reads = true;           // GET or HEAD
  bool over_loopback = false;  // the address that it came to
};

struct HeadRefusal {
  unsigned status = 400;
  ErrorCode code = ErrorCode::kInvalid;
  std::string message;
};

// The names that the control port may be asked by over loopback: localhost, 127.0.0.0/8, [::1],
// those that it was told to listen at, this machine's name, and its other names at a loopback
// address.
class HostNames {
 public:
  // `listen`: HOST:PORT each. `hosts_file`: has the names of addresses, as hosts(5) says.
  explicit HostNames(const std::vector<std::string>& listen = {},
                     const std::string& hosts_file = "/etc/hosts");

  // `host` is that of a Host header, with or without a port.
  bool has(std::string_view host) const;

 private:
  std::vector<std::string> names_;  // lower case
};

// Returns nullopt if the request may go on. Any thread.
std::optional<HeadRefusal> refuse_head(const RequestHead& head, const HostNames& names);

}  // namespace phub

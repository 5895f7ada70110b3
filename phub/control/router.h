// Turns a complete HTTP request into a call of the ControlHandler, and its result into an answer.
// It has no sockets. Control thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "phub/background.h"
#include "phub/control/access.h"
#include "phub/control/handler.h"
#include "phub/control/metrics.h"
#include "transport/control/calls.h"

namespace phub {

struct HttpRequest {
  std::string method;
  std::string target;
  std::string authorization;  // the header's value; never shown in an answer or a log
  Caller caller;              // as authorize() found out
  std::string body;
  std::shared_ptr<void> charge = nullptr;  // accounts for the body's memory; released with it
};
struct HttpResponse {
  unsigned status = 200;
  std::string body;
  std::string_view content_type = "application/json";
  std::string allow;      // methods, with status 405
  std::string_view path;  // the pattern that the target matches; "": none
  std::string about;      // for the audit: "rank=3 incarnation=1", or why it was refused
};

// One row is all that a path is to the control port.
struct RouteInfo {
  std::string_view method;
  std::string_view pattern;  // "/v1/jobs/{job}/join"; other names in braces are numbers
  Need need;
  std::string_view body;    // the message's name; "": there is none
  std::string_view answer;  // the message's name, or a content type
  std::string_view summary;
  uint64_t most_bytes = kMaxBodyBytes;  // of the body
  bool admin_too = false;               // a ticket is needed, or a token of role admin
};
std::span<const RouteInfo> http_routes();

// The largest body of such a request.
uint64_t body_limit(std::string_view method, std::string_view target);

// The body is a piece of a rank's part of a checkpoint, or of a state: bytes, not JSON.
bool takes_bytes(std::string_view method, std::string_view target);

// The reason why the handler does not want such a body. Returns nullopt if it does, or if this is
// another request.
std::optional<HeadRefusal> refuse_bytes(std::string_view method, std::string_view target,
                                        std::string_view authorization, uint64_t bytes,
                                        ControlHandler& handler);

// Whether the sender may do what it asks, once the header is there. Sets `caller`. Null `access`:
// everybody may.
std::optional<HeadRefusal> authorize(std::string_view method, std::string_view target,
                                     std::string_view authorization, const Access* access,
                                     const ControlHandler& handler, Caller& caller);

// A `Problem` (transport/control/README.md), with the HTTP status of the code unless another is
// given.
HttpResponse error_response(ErrorCode code, std::string_view message);
HttpResponse error_response(unsigned status, ErrorCode code, std::string_view message);

// The sender of a request: `beats` if it was a heartbeat, `waits` if it waits in a barrier.
struct Routed {
  std::optional<Credential> beats, waits;
};

// Calls `reply` exactly once, possibly later. Long messages are decoded and encoded in the
// background; null: by the caller.
Routed route(HttpRequest request, ControlHandler& handler, const HttpCounters& counters,
             Background* background, const Access* access, std::function<void(HttpResponse)> reply);

}  // namespace phub

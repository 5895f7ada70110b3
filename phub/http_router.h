// From a complete HTTP request to a call of the ControlHandler, and from its result to an answer.
// No sockets here. Control thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "phub/background.h"
#include "phub/control_handler.h"
#include "phub/http_counters.h"

namespace phub {

struct HttpRequest {
  std::string method;
  std::string target;
  std::string authorization;  // the header's value; never shown in an answer or a log
  std::string body;
  std::shared_ptr<void> charge = nullptr;  // for the body's memory: to be let go of with it
};
struct HttpResponse {
  unsigned status = 200;
  std::string body;
  std::string_view content_type = "application/json";
  std::string allow;      // methods, with status 405
  std::string_view path;  // the pattern that the target fits; "": none
};

// For documentation and its test.
struct RouteInfo {
  std::string_view method;
  std::string_view pattern;  // "/v1/jobs/{job}/join"
};
std::span<const RouteInfo> http_routes();

inline constexpr uint64_t kMaxJoinBytes = uint64_t{64} << 20;  // key tables
inline constexpr uint64_t kMaxBodyBytes = uint64_t{64} << 10;  // everything else

// The most bytes that the body of such a request may have; known before any of it is read.
uint64_t body_limit(std::string_view method, std::string_view target);

// {"error": …, "message": …} with the HTTP status that fits the code.
HttpResponse error_response(ErrorCode code, std::string_view message);
HttpResponse error_response(unsigned status, ErrorCode code, std::string_view message);

// Whose heartbeat a request was, and who waits in a barrier for its answer.
struct Routed {
  std::optional<Credential> beats, waits;
};

// Calls `reply` exactly once, possibly later. What is long is decoded and encoded in the
// background; null: at once.
Routed route(HttpRequest request, ControlHandler& handler, const HttpCounters& counters,
             Background* background, std::function<void(HttpResponse)> reply);

}  // namespace phub

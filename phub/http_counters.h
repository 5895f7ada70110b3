// What the control port did so far. Control thread only.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <utility>

namespace phub {

struct HttpCounters {
  uint64_t connections = 0;  // now
  uint64_t accepted = 0;     // ever
  uint64_t refused = 0;      // told at once that they are too many
  uint64_t evicted = 0;      // idle, closed to make room
  uint64_t timed_out = 0;    // between a request's first byte and its last, or idle
  uint64_t request_bytes = 0, response_bytes = 0;  // of bodies
  // By the pattern of the path, "" if it was never looked at, and the status of the answer.
  std::map<std::pair<std::string_view, unsigned>, uint64_t> answers;
};

}  // namespace phub

// The budget of a NIC: the bytes per second that it may send, as they are on the wire (Poseidon,
// section 4.3.3).
//
// A queue pair counts the bytes that it posts, with the headers that Ethernet, IP and TCP put
// before them. Other traffic of the NIC does not count: heartbeats, acknowledgements,
// retransmissions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace phub {

// Nanoseconds that never go back.
using PacedClock = std::function<uint64_t()>;
PacedClock steady_paced_clock();

// "1gbit", "250mbit", "800kbit", or bytes per second: "12500000". Throws Error(kInvalid).
uint64_t parse_rate(std::string_view text);
std::string describe_rate(uint64_t bytes_per_s);  // "250 Mbit/s"

// The burst that may go at once after a pause. Threads that sleep until there are tokens come late
// by a millisecond or more: so much is saved up meanwhile.
uint64_t burst_of(uint64_t bytes_per_s);

struct NicBudget {
  uint64_t bytes_per_s = 0;
  uint64_t burst_bytes = 0;  // 0: burst_of() the rate, or of a core's part of it
  PacedClock clock = steady_paced_clock();

  uint64_t burst(uint64_t rate) const { return burst_bytes > 0 ? burst_bytes : burst_of(rate); }
};

// The bytes on the wire of a write with so many bytes of payload.
constexpr uint64_t wire_bytes(uint64_t payload_bytes) {
  constexpr uint64_t kHeaders = 66;    // headers of Ethernet, IPv4, and TCP with timestamps
  constexpr uint64_t kSegment = 1448;  // the payload behind them, in packets of 1,500 bytes
  constexpr uint64_t kFrame = 16;      // our own header
  const uint64_t bytes = payload_bytes + kFrame;
  return bytes + (bytes + kSegment - 1) / kSegment * kHeaders;
}

}  // namespace phub

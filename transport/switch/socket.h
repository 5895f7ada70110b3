// UDP over IPv4 as the switch needs it: without checksums, which its program does not make anew.
// What does not go out is lost; whoever sends repeats it.
#pragma once

#include <netinet/in.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "transport/fd.h"

namespace phub {

// Throws Error(kInvalid): it is not an IPv4 address with a port, as 10.0.0.1:7718.
sockaddr_in switch_address(const std::string& text);

// One thread.
class SwitchSocket {
 public:
  // Takes what comes to this port on every address of the host. Throws Error(kUnavailable), with
  // the port and what the system said.
  explicit SwitchSocket(uint16_t port);

  void send(std::span<const std::byte> bytes, const sockaddr_in& to);
  // What came, at most `into` of it, and from whom; nothing: none came within the time.
  std::optional<size_t> receive(std::span<std::byte> into, sockaddr_in& from, int timeout_ms);

 private:
  Fd fd_;
};

// The broadcast address of the interface that has this address, with the port. Throws
// Error(kNotFound): no interface here has it, or it has none.
sockaddr_in broadcast_of(const sockaddr_in& own, uint16_t port);

}  // namespace phub

// Addresses of a host, without waiting for a resolver that hangs.
#pragma once

#include <sys/socket.h>

#include <future>
#include <string>
#include <vector>

namespace phub {

struct FoundAddresses {
  int error = 0;                            // getaddrinfo's error
  std::vector<sockaddr_storage> addresses;  // IPv4 and IPv6, without ports
};

// A number is there at once. A name is looked up on a thread of its own, because getaddrinfo cannot
// be given a deadline: a caller that has waited long enough lets go of the future. Throws
// Error(kFull) when no thread can be started.
std::future<FoundAddresses> look_up(const std::string& host);

}  // namespace phub

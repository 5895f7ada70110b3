// Connections for data, both ends of which are in this process, to be broken.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/worker/box.h"
#include "transport/text.h"

namespace phub::testing {

inline uint16_t port_of(const sockaddr_storage& address) {
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

using Ports = std::set<uint16_t>;

// A connected TCP socket, either end, that is not of a control port.
inline bool is_data_connection(int fd, const Ports& control) {
  sockaddr_storage own = {}, peer = {};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) != 0) return false;
  if (own.ss_family != AF_INET) return false;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0) return false;
  return !control.contains(port_of(own)) && !control.contains(port_of(peer));
}

inline std::vector<int> data_connections(const Ports& control) {
  std::vector<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    if (is_data_connection(fd, control)) found.push_back(fd);
  }
  return found;
}

inline uint16_t control_port(const Box& box) { return parse_host_port(box.address()).port; }

}  // namespace phub::testing

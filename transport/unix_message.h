// Messages between processes of one host, over Unix sockets, with descriptors.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "transport/fd.h"

namespace phub {

inline constexpr size_t kMostMessageFds = 253;  // SCM_MAX_FD of the kernel

// Sends one message, to which the descriptors belong, without blocking. Returns 0 or an errno.
// REQUIRES: on a stream, room for all of it.
int send_message(int socket, std::span<const std::byte> message, std::span<const int> fds = {});

struct UnixMessage {
  int error = 0;                 // an errno (EAGAIN: nothing there now), or 0
  std::vector<std::byte> bytes;  // empty with error 0: the peer has closed the connection
  std::vector<Fd> fds;
};
// Receives without blocking, up to `max_bytes`: one message (a longer one is EMSGSIZE), or the
// bytes that a stream has. More than `max_fds` descriptors are EMFILE.
UnixMessage receive_message(int socket, size_t max_bytes, size_t max_fds = kMostMessageFds);

}  // namespace phub

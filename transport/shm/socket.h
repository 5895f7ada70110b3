// The Unix socket between box and workers: whole messages (SOCK_SEQPACKET), descriptors with them.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "transport/fd.h"

namespace phub {

// Makes `dir` (0700) if it is not there. Throws Error when it belongs to someone else or others may
// enter it.
void prepare_socket_dir(const std::string& dir);

// Removes the sockets in `dir` whose server is dead.
void remove_stale_sockets(const std::string& dir);

// A listening, non-blocking socket at `path`, mode 0600.
Fd listen_at(const std::string& path);

// A connected, non-blocking socket; waits while the server's backlog is full, up to `timeout_ms`.
Fd connect_to(const std::string& path, uint32_t timeout_ms);

// Sends one message without blocking. Returns 0 or an errno.
int send_message(int socket, std::span<const std::byte> message, std::span<const int> fds = {});

struct ShmReceived {
  int error = 0;                 // an errno (EAGAIN: nothing there now), or 0
  std::vector<std::byte> bytes;  // empty with error 0: the peer has closed the connection
  std::vector<Fd> fds;
};
// Receives one message of at most `max_bytes` (a longer one is EMSGSIZE) without blocking.
ShmReceived receive_message(int socket, size_t max_bytes);

// The process and the user at the other end, the way they were when it connected; user -1 where the
// kernel does not tell.
struct ShmPeer {
  pid_t pid = 0;
  uid_t uid = ~uid_t{0};
};
ShmPeer peer_of(int socket);
// A descriptor of that process, readable when it has ended; none where the kernel has no such thing
// or the process is in a namespace of its own.
Fd open_peer(int socket);

}  // namespace phub

// The Unix socket between box and workers: whole messages (SOCK_SEQPACKET), descriptors with them.
#pragma once

#include <sys/types.h>

#include <string>

#include "transport/fd.h"
#include "transport/unix_message.h"

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

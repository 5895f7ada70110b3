// Shared memory, for workers on the box itself. No payload is ever copied: a worker's gradient
// slots are the memory that the box sums from, and the box's results are mapped, read-only, into
// every worker. A 32-bit immediate per chunk moves, through a ring, and a doorbell when the other
// side sleeps. README.md describes every byte of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace phub {

struct ShmOptions {
  // The folder for the Unix socket, mode 0700 and owned by this user. Empty: default_socket_dir().
  std::string socket_dir;
  uint32_t half_open_ms = 5000;  // a connection that has not shown its ticket by then is closed
  uint32_t max_half_open = 64;   // at most; the oldest makes room for the newest
};

// $XDG_RUNTIME_DIR/phub, else /tmp/phub-<uid>.
std::string default_socket_dir();

// Listens on <socket_dir>/phub-<pid>-<random>.sock, removes the sockets of dead servers, and raises
// the soft limit of open files to the hard one. Throws Error that names the path and the reason.
// Must outlive its links. Pages of results() and slots() are untouched after open_job() and
// admit(): numa::prefer_node() on them decides where they will lie.
std::unique_ptr<Transport> make_shm_transport(const ShmOptions& options = {});

// Connects the worker that `offer` was made for. `layout` is the one that the worker derived from
// the plan (max_ranks and core_node are not looked at): a box that answers with other sizes is a
// kMismatch. Throws Error: kUnavailable (no server there), kTimeout, kUnauthorized (the ticket),
// kFull (out of descriptors or memory). Blocks up to `timeout_ms`.
std::unique_ptr<WorkerLink> connect_shm(const Offer& offer, const LinkLayout& layout,
                                        uint32_t timeout_ms);

}  // namespace phub

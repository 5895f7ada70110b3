// TCP, for commodity Ethernet. A worker has one connection for each queue of the plan, owned by the
// core that the queue is of, and payload moves straight between a socket and the memory of
// gradients and results. The plan spreads queues over all of the box's addresses, by
// bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/tls/client_options.h"
#include "transport/tls/server.h"
#include "transport/transport.h"

namespace phub {

using TcpNic = std::vector<std::string>;  // its addresses, as numbers

struct TcpOptions {
  std::vector<TcpNic> nics = {{"127.0.0.1"}};  // tcp_nics()
  uint16_t port = 0;                           // on each address; 0: any that is free
  // No addresses, and workers of this host only, which exchange over memory. Throws Error if the
  // process may not listen for them.
  bool only_near = false;
  uint32_t half_open_ms = 5000;   // a connection that has not said its hello by then is closed
  uint32_t max_half_open = 1024;  // at most; the oldest makes room for the newest
  // If it is not null, every connection over a network must speak TLS. Outlives the transport.
  const TlsServerContext* tls = nullptr;
};

// The NICs that a server listening at `hosts` carries data on: names are resolved; "0.0.0.0", "::",
// "*" and "" stand for every interface that is up, with all its addresses ("0.0.0.0": those of
// IPv4). Bridges of containers and the like, and loopback, count only where there is nothing else.
// Throws Error(kInvalid) for a name that is none, and for a link-local address.
std::vector<TcpNic> tcp_nics(const std::vector<std::string>& hosts);
// The first address of each.
std::vector<std::string> tcp_data_addresses(const std::vector<std::string>& hosts);
bool is_every_address(const std::string& host);  // "*" and the others

// Listens on every address, and raises the soft limit of open files to the hard one. Throws Error
// that names the address and the reason. Must outlive its links.
std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options = {});

// The authorities that a worker trusts if its offer asks for TLS, and the place at which it has
// reached the box.
struct TcpTrust {
  std::string host;  // the server's certificate must be for this: the name of its control port
  ClientTls tls;
  std::string reached = {};  // the number of the control port's address; empty: not known
};

// Connects the worker that `offer` was made for. `layout` is the one that the worker derived from
// the plan; a box with other sizes refuses with kMismatch. Throws Error: kUnavailable (no server
// there), kTimeout, kUnauthorized (the ticket; over TLS: one of the two does not trust the other),
// kFull (out of descriptors or memory), or the box's answer. Blocks up to `timeout_ms`. `near`:
// with a box on this host it exchanges over memory, not over TCP, where the box offers that. Queues
// that the offer has no place for, neither an address nor near, stay unconnected: their posts are
// refused.
std::unique_ptr<WorkerLink> connect_tcp(const Offer& offer, const LinkLayout& layout,
                                        uint32_t timeout_ms, TcpTrust trust = {},
                                        bool near = false);

}  // namespace phub

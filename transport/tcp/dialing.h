// A worker's connections begin all at once, each with a hello, and over TLS or near where that is
// asked for.
#pragma once

#include <chrono>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "transport/fd.h"
#include "transport/tcp/tls.h"
#include "transport/tls/client.h"
#include "transport/transport.h"

namespace phub {

// A connection that a box has welcomed.
struct TcpWelcomed {
  Fd socket;                    // outlives `tls`
  std::unique_ptr<TcpTls> tls;  // null: plain
};

// The options of dialing: over TLS if there is a context, with the server of that name; near, if
// the offer has that and there is memory to show.
struct TcpDialing {
  TlsContext context;           // null: plain
  std::string server = {};      // its name for TLS
  std::span<const int> memory;  // descriptors of gradients and results; empty: not near
  std::chrono::steady_clock::time_point deadline;
  std::string reached = {};  // the number at which the control port was reached; empty: not known
  // Addresses that could not be reached, which are tried last; the call adds to it. Null: none.
  std::set<std::string>* unreached = nullptr;
};

// The addresses of a queue in the order in which they are tried.
std::vector<std::string> in_order(const QueueOffer& offer, const TcpDialing& how);

// Returns the connections by queue. Throws Error as connect_tcp() does.
std::vector<TcpWelcomed> dial_tcp(const Offer& offer, const LinkLayout& layout,
                                  const TcpDialing& how);

}  // namespace phub

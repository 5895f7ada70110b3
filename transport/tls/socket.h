// A non-blocking socket under a connection of OpenSSL. Writes raise no SIGPIPE, and a call reads a
// bounded number of bytes: OpenSSL reads on by itself where records hold nothing for its caller.
#pragma once

#include <cstddef>
#include <memory>

struct ssl_st;  // SSL

namespace phub {

struct SslFree {
  void operator()(ssl_st* ssl) const;
};
using Ssl = std::unique_ptr<ssl_st, SslFree>;

struct TlsSocket {
  int fd = -1;
  size_t allowance = ~size_t{0};  // bytes that may be read, until it is set again
  bool drained = false;           // the latest read found nothing, or the end
  bool more = false;              // the next write is not the last of its batch
  bool ended = false;             // by the peer
};

// Puts the socket, which stays the caller's, under the connection. False: no memory.
bool attach_socket(ssl_st* connection, int fd);
// REQUIRES: attach_socket() has returned true.
TlsSocket& socket_of(ssl_st* connection);

}  // namespace phub

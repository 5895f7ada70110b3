// Addresses and sockets of the tcp transport.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "transport/fd.h"

namespace phub {

struct TcpAddress {
  sockaddr_storage storage = {};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool is_loopback() const;
};

// "10.0.0.1", "::1" or "fe80::1%eth0". Throws Error(kInvalid) when `host` is no number.
TcpAddress tcp_address(const std::string& host, uint16_t port);
// "10.0.0.1:7718", "[::1]:7718".
std::string to_string(const TcpAddress& address);
// Whether they are of the same host, whatever the ports.
bool same_host(const TcpAddress& a, const TcpAddress& b);
TcpAddress local_address(int socket);
TcpAddress peer_address(int socket);
// Whether both ends of a connection are on this host.
bool is_local(int socket);
// The address of this machine that packets to `address` leave from; with size 0 if none do.
TcpAddress source_towards(const TcpAddress& address);
// Whether packets to `address` stay on this machine.
bool is_own(const TcpAddress& address);

// A listening, non-blocking socket. Throws Error that names the address and the way out.
Fd listen_on(const TcpAddress& address);
// A non-blocking socket that has begun to connect. `error`: 0 or an errno (EINPROGRESS is none).
// Throws Error where there is no memory or descriptor for one.
Fd begin_connect(const TcpAddress& address, int& error);
// Sets up any connection: small frames leave at once, a dead machine is noticed.
void tune(int socket);
// Sets up a connection over a network: the kernel takes little ahead of what it can send, so that
// the sender decides late what goes next.
void tune_for_a_network(int socket);
// Sets up a connection of ranks that are kept in step (in_step.h): the kernel takes little ahead of
// the reader, but enough for 200 MB/s over the present round trip, as far as net.core.rmem_max
// allows; else it decides by itself.
void limit_window(int socket);
// Sets up a connection within one machine: congestion control that does not pace, buffers that fit
// into the caches. It is best called before the socket is connected.
void tune_for_this_machine(int socket);
// The congestion control of new connections: "bbr", "cubic", …
std::string default_congestion_control();

// Sends all of a short message into an empty socket. Returns 0 or an errno.
int send_greeting(int socket, std::span<const std::byte> message);

}  // namespace phub

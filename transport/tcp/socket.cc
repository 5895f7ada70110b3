#include "transport/tcp/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>

#include "transport/error.h"
#include "transport/in_flight.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr int kBacklog = 4096;
// A connection to a machine that is gone ends after five minutes, idle or not; leases expire long
// before. The limit also ends a connection whose peer does not read for so long, and a worker that
// computes may read nothing for minutes.
constexpr int kUserTimeoutMs = 300'000;
constexpr int kLocalBufferBytes = 256 << 10;  // the kernel doubles it
constexpr uint64_t kWindowBytes = 1 << 20;
constexpr uint64_t kWindowBytesPerUs = 200;  // of the round trip: 200 MB/s
constexpr int kKeepIdleSeconds = 60;
constexpr int kKeepIntervalSeconds = 30;

void set(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof(value));
}

std::span<const std::byte> host_bytes(const TcpAddress& address) {
  if (address.storage.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address.storage);
    return std::as_bytes(std::span(&v4.sin_addr, 1));
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address.storage);
  return std::as_bytes(std::span(&v6.sin6_addr, 1));
}

TcpAddress name_of(int socket, int (*call)(int, sockaddr*, socklen_t*)) {
  TcpAddress address;
  address.size = sizeof(address.storage);
  if (call(socket, reinterpret_cast<sockaddr*>(&address.storage), &address.size) != 0) return {};
  return address;
}

}  // namespace

bool TcpAddress::is_loopback() const {
  const std::span<const std::byte> host = host_bytes(*this);
  if (storage.ss_family == AF_INET) return host[0] == std::byte{127};
  return std::memcmp(host.data(), &in6addr_loopback, host.size()) == 0;
}

TcpAddress tcp_address(const std::string& host, uint16_t port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0 || host.empty()) {
    fail(ErrorCode::kInvalid, "'{}' is not an IP address", printable(host));
  }
  TcpAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

std::string to_string(const TcpAddress& address) {
  std::array<char, NI_MAXHOST> host = {};
  std::array<char, NI_MAXSERV> port = {};
  if (getnameinfo(address.get(), address.size, host.data(), host.size(), port.data(), port.size(),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  return format_host_port(host.data(), static_cast<uint16_t>(std::stoi(port.data())));
}

bool same_host(const TcpAddress& a, const TcpAddress& b) {
  if (a.storage.ss_family != b.storage.ss_family || a.size == 0) return false;
  return std::memcmp(host_bytes(a).data(), host_bytes(b).data(), host_bytes(a).size()) == 0;
}

TcpAddress local_address(int socket) { return name_of(socket, getsockname); }
TcpAddress peer_address(int socket) { return name_of(socket, getpeername); }
bool is_local(int socket) { return same_host(local_address(socket), peer_address(socket)); }

// Connecting a datagram socket asks for the route and sends nothing.
TcpAddress source_towards(const TcpAddress& address) {
  const Fd probe(socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe || connect(probe.get(), address.get(), address.size) != 0) return {};
  return local_address(probe.get());
}

// The kernel sends to an address of its own from that address.
bool is_own(const TcpAddress& address) {
  if (address.is_loopback()) return true;
  const TcpAddress source = source_towards(address);
  return source.size != 0 && same_host(source, address);
}

Fd listen_on(const TcpAddress& address) {
  Fd listener(
      socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (!listener) fail_system(fmt::format("socket for {}", to_string(address)), errno);
  set(listener.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.storage.ss_family == AF_INET6) set(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  if (address.is_loopback()) tune_for_this_machine(listener.get());  // accepted ones inherit it
  if (bind(listener.get(), address.get(), address.size) != 0 ||
      listen(listener.get(), kBacklog) != 0) {
    const int error = errno;
    fail(
        ErrorCode::kInvalid, "listening for data at {}: {}; {}", to_string(address),
        std::strerror(error),
        error == EADDRINUSE
            ? "another server is there: stop it, or choose another --data-port"
            : "--listen must have an address of this machine, and --data-port a port that is free");
  }
  return listener;
}

Fd begin_connect(const TcpAddress& address, int& error) {
  Fd connecting(
      socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  error = connecting ? 0 : errno;
  if (error == EAFNOSUPPORT) return connecting;  // a kernel without IPv6
  if (error != 0) fail_system(fmt::format("socket for {}", to_string(address)), error);
  if (is_own(address)) {
    tune_for_this_machine(connecting.get());
  } else {
    tune_for_a_network(connecting.get());
  }
  tune(connecting.get());
  error = connect(connecting.get(), address.get(), address.size) == 0 ? 0 : errno;
  if (error == EINPROGRESS) error = 0;
  return connecting;
}

void tune(int socket) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleSeconds);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalSeconds);
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
}

void tune_for_a_network(int socket) {
  set(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, static_cast<int>(kKernelBytes));
}

namespace {

// What the kernel gives out when it is asked (net.core.rmem_max).
int largest_buffer() {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  int bytes = 0;
  socklen_t size = sizeof(bytes);
  if (!socket) return 0;
  set(socket.get(), SOL_SOCKET, SO_RCVBUF, std::numeric_limits<int>::max() / 2);
  const int error = getsockopt(socket.get(), SOL_SOCKET, SO_RCVBUF, &bytes, &size);
  return error == 0 ? bytes / 2 : 0;  // it doubles them
}

}  // namespace

void limit_window(int socket) {
  static const auto most = static_cast<uint64_t>(largest_buffer());
  tcp_info info = {};
  socklen_t size = sizeof(info);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  const uint64_t bytes = std::max(kWindowBytes, info.tcpi_rtt * kWindowBytesPerUs);
  if (bytes <= most) set(socket, SOL_SOCKET, SO_RCVBUF, static_cast<int>(bytes));
}

// Between processes of one machine no congestion control should pace, and what is on its way should
// fit into the caches: large buffers cost a trip through memory each way.
void tune_for_this_machine(int socket) {
  set(socket, SOL_SOCKET, SO_SNDBUF, kLocalBufferBytes);
  set(socket, SOL_SOCKET, SO_RCVBUF, kLocalBufferBytes);
  std::array<char, 16> now = {};  // TCP_CA_NAME_MAX
  socklen_t size = now.size();
  getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, now.data(), &size);
  const std::string_view name(now.data(), strnlen(now.data(), now.size()));
  if (name == "cubic" || name == "reno") return;
  if (setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5) != 0) {
    setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  }
}

std::string default_congestion_control() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_congestion_control");
  std::string name;
  file >> name;
  return name.empty() ? "unknown" : name;
}

int send_greeting(int socket, std::span<const std::byte> message) {
  for (;;) {
    const ssize_t sent = send(socket, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == static_cast<ssize_t>(message.size())) return 0;
    if (sent >= 0) return EAGAIN;
    if (errno != EINTR) return errno;
  }
}

}  // namespace phub

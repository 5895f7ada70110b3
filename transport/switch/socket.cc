#include "transport/switch/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "transport/error.h"
#include "transport/switch/packet.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr int kBufferBytes = 4 << 20;

void set(int fd, int option, int value, const char* name, bool must) {
  if (setsockopt(fd, SOL_SOCKET, option, &value, sizeof value) == 0 || !must) return;
  fail(ErrorCode::kUnavailable, "UDP for the switch: {}: {}", name, std::strerror(errno));
}

}  // namespace

sockaddr_in switch_address(const std::string& text) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  const size_t colon = text.find(':');
  uint16_t port = 0;
  if (colon != text.npos) {
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + colon + 1, end, port);
    if (parsed.ec == std::errc() && parsed.ptr == end && port != 0 &&
        inet_pton(AF_INET, text.substr(0, colon).c_str(), &address.sin_addr) == 1) {
      address.sin_port = htons(port);
      return address;
    }
  }
  fail(ErrorCode::kInvalid, "'{}' is not an IPv4 address and a port, such as 10.0.0.1:{}",
       escaped(text), uint32_t{kSwitchPort});
}

SwitchSocket::SwitchSocket(uint16_t port) : fd_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
  if (fd_.get() < 0) fail(ErrorCode::kUnavailable, "UDP: {}", std::strerror(errno));
  set(fd_.get(), SO_NO_CHECK, 1, "SO_NO_CHECK", true);
  set(fd_.get(), SO_BROADCAST, 1, "SO_BROADCAST", true);
  set(fd_.get(), SO_RCVBUF, kBufferBytes, "SO_RCVBUF", false);
  set(fd_.get(), SO_SNDBUF, kBufferBytes, "SO_SNDBUF", false);
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_port = htons(port);
  if (bind(fd_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) != 0) {
    fail(ErrorCode::kUnavailable, "UDP port {}: {}", port, std::strerror(errno));
  }
}

void SwitchSocket::send(std::span<const std::byte> bytes, const sockaddr_in& to) {
  sendto(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT,
         reinterpret_cast<const sockaddr*>(&to), sizeof to);
}

std::optional<size_t> SwitchSocket::receive(std::span<std::byte> into, sockaddr_in& from,
                                            int timeout_ms) {
  pollfd waits{fd_.get(), POLLIN, 0};
  if (timeout_ms != 0 && poll(&waits, 1, timeout_ms) <= 0) return std::nullopt;
  socklen_t size = sizeof from;
  const ssize_t got = recvfrom(fd_.get(), into.data(), into.size(), MSG_DONTWAIT | MSG_TRUNC,
                               reinterpret_cast<sockaddr*>(&from), &size);
  if (got < 0) return std::nullopt;
  return static_cast<size_t>(got);
}

sockaddr_in broadcast_of(const sockaddr_in& own, uint16_t port) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) {
    fail(ErrorCode::kUnavailable, "the addresses of this host: {}", std::strerror(errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, freeifaddrs);
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    const auto* address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
    if (address->sin_addr.s_addr != own.sin_addr.s_addr) continue;
    if ((each->ifa_flags & IFF_BROADCAST) == 0 || each->ifa_broadaddr == nullptr) break;
    sockaddr_in broadcast = *reinterpret_cast<const sockaddr_in*>(each->ifa_broadaddr);
    broadcast.sin_port = htons(port);
    return broadcast;
  }
  char text[INET_ADDRSTRLEN] = "";
  inet_ntop(AF_INET, &own.sin_addr, text, sizeof text);
  fail(ErrorCode::kNotFound,
       "no interface here has the address {} and a broadcast address, over which a box answers the "
       "workers behind a switch",
       text);
}

}  // namespace phub

#include "transport/switch/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

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

namespace {

sockaddr_in every_address(uint16_t port) {
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_port = htons(port);
  return own;
}

}  // namespace

// Those that a system call takes or sends; of these [next, count) are still to be handed out.
struct SwitchSocket::Batch {
  // One more than a packet has, so that what is longer shows.
  static constexpr size_t kBytes = sizeof(SwitchPacket) + 1;

  std::array<std::array<std::byte, kBytes>, kBatch> bytes;
  std::array<sockaddr_in, kBatch> addresses{};
  std::array<iovec, kBatch> pieces{};
  std::array<mmsghdr, kBatch> messages{};
  uint32_t next = 0, count = 0;

  Batch() {
    for (uint32_t i = 0; i < kBatch; ++i) {
      pieces[i] = {.iov_base = bytes[i].data(), .iov_len = kBytes};
      messages[i].msg_hdr.msg_name = &addresses[i];
      messages[i].msg_hdr.msg_namelen = sizeof addresses[i];
      messages[i].msg_hdr.msg_iov = &pieces[i];
      messages[i].msg_hdr.msg_iovlen = 1;
    }
  }
};

uint64_t SwitchSocket::bytes() { return 2 * sizeof(Batch); }

SwitchSocket::~SwitchSocket() = default;
SwitchSocket::SwitchSocket(SwitchSocket&&) noexcept = default;

SwitchSocket::SwitchSocket(uint16_t port) : SwitchSocket(every_address(port)) {}

SwitchSocket::SwitchSocket(const sockaddr_in& own)
    : fd_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)),
      in_(std::make_unique<Batch>()),
      out_(std::make_unique<Batch>()) {
  if (fd_.get() < 0) fail(ErrorCode::kUnavailable, "UDP: {}", std::strerror(errno));
  set(fd_.get(), SO_NO_CHECK, 1, "SO_NO_CHECK", true);
  set(fd_.get(), SO_BROADCAST, 1, "SO_BROADCAST", true);
  set(fd_.get(), SO_RCVBUF, kBufferBytes, "SO_RCVBUF", false);
  set(fd_.get(), SO_SNDBUF, kBufferBytes, "SO_SNDBUF", false);
  if (bind(fd_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) != 0) {
    fail(ErrorCode::kUnavailable, "UDP port {}: {}", ntohs(own.sin_port), std::strerror(errno));
  }
}

void SwitchSocket::send(std::span<const std::byte> bytes, const sockaddr_in& to) {
  PHUB_CHECK(bytes.size() <= sizeof(SwitchPacket));
  const uint32_t i = out_->count++;
  std::ranges::copy(bytes, out_->bytes[i].begin());
  out_->pieces[i].iov_len = bytes.size();
  out_->addresses[i] = to;
  if (out_->count == kBatch) flush();
}

void SwitchSocket::flush() {
  for (uint32_t done = 0; done < out_->count;) {
    const int sent =
        sendmmsg(fd_.get(), out_->messages.data() + done, out_->count - done, MSG_DONTWAIT);
    if (sent < 0 && (errno == EAGAIN || errno == ENOBUFS)) break;  // there is no room for any
    done += sent > 0 ? static_cast<uint32_t>(sent) : 1;            // or this one cannot go
  }
  out_->count = 0;
}

std::optional<Datagram> SwitchSocket::receive() {
  Batch& in = *in_;
  if (in.next == in.count) {
    in.next = in.count = 0;
    for (uint32_t i = 0; i < kBatch; ++i) {  // which the call before has changed
      in.messages[i].msg_hdr.msg_namelen = sizeof in.addresses[i];
    }
    const int got = recvmmsg(fd_.get(), in.messages.data(), kBatch, MSG_DONTWAIT, nullptr);
    if (got <= 0) return std::nullopt;
    in.count = static_cast<uint32_t>(got);
  }
  const uint32_t i = in.next++;
  return Datagram{std::span(in.bytes[i]).first(in.messages[i].msg_len), in.addresses[i]};
}

void SwitchSocket::close() {
  fd_.reset();
  in_->next = in_->count = out_->count = 0;
}

bool SwitchSocket::holds_some() const { return in_->next < in_->count; }

std::optional<Datagram> SwitchSocket::receive(int timeout_ms) {
  pollfd waits{fd_.get(), POLLIN, 0};
  if (!holds_some() && poll(&waits, 1, timeout_ms) <= 0) return std::nullopt;
  return receive();
}

namespace {

sockaddr_in own_address(int fd) {
  sockaddr_in own{};
  socklen_t size = sizeof own;
  getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size);
  return own;
}

using Interfaces = std::unique_ptr<ifaddrs, decltype(&freeifaddrs)>;
Interfaces interfaces() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) {
    fail(ErrorCode::kUnavailable, "the addresses of this host: {}", std::strerror(errno));
  }
  return {all, freeifaddrs};
}

// Null: no interface has this address.
const ifaddrs* find(const Interfaces& all, const sockaddr_in& own) {
  for (const ifaddrs* each = all.get(); each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    const auto* address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
    if (address->sin_addr.s_addr == own.sin_addr.s_addr) return each;
  }
  return nullptr;
}

}  // namespace

// The kernel knows the way there: a socket that is connected has the address of its interface.
void SwitchSocket::take_from_side_of(const sockaddr_in& peer) {
  const Fd probe(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe) fail(ErrorCode::kUnavailable, "UDP: {}", std::strerror(errno));
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&peer), sizeof peer) != 0) {
    fail(ErrorCode::kUnavailable, "the way to the box over UDP: {}", std::strerror(errno));
  }
  const Interfaces all = interfaces();
  const ifaddrs* const way = find(all, own_address(probe.get()));
  // A host's address may be on its loopback, and the way to the box another.
  if (way == nullptr || (way->ifa_flags & IFF_LOOPBACK) != 0) return;
  const std::string_view label = way->ifa_name;  // "eth0:1", of a second address
  const std::string name(label.substr(0, label.find(':')));
  setsockopt(fd_.get(), SOL_SOCKET, SO_BINDTODEVICE, name.c_str(),
             static_cast<socklen_t>(name.size() + 1));
}

uint16_t SwitchSocket::port() const { return ntohs(own_address(fd_.get()).sin_port); }

sockaddr_in broadcast_of(const sockaddr_in& own, uint16_t port) {
  const Interfaces all = interfaces();
  const ifaddrs* const at = find(all, own);
  const bool broadcasts =
      at != nullptr && (at->ifa_flags & IFF_BROADCAST) != 0 && at->ifa_netmask != nullptr;
  // (ifa_broadaddr is the host's own address where none was configured.)
  const uint32_t hosts =
      broadcasts ? ~reinterpret_cast<const sockaddr_in*>(at->ifa_netmask)->sin_addr.s_addr : 0;
  if (ntohl(hosts) >= 3) {
    sockaddr_in broadcast = own;
    broadcast.sin_addr.s_addr |= hosts;
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

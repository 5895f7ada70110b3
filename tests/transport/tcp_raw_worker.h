// A worker without manners: says hello by hand and writes what it likes into its connection, over
// TCP or over another socket. For tests of what the box puts up with.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/format.h"
#include "transport/tcp/socket.h"
#include "transport/text.h"
#include "transport/transport.h"

namespace phub {

template <typename Hello>
Hello hello_of(const Offer& offer, const LinkLayout& layout, uint32_t queue) {
  Hello hello;
  std::memcpy(hello.ticket.data(), offer.ticket.data(), hello.ticket.size());
  if constexpr (requires { hello.queue; }) {
    hello.queue = queue;
    hello.queues = static_cast<uint32_t>(layout.queue_chunks.size());
    hello.queue_chunks = layout.queue_chunks[queue];
    hello.gradient_bytes = layout.slots_bytes;
    hello.result_bytes = layout.results_bytes;
  }
  return hello;
}
inline TcpHello tcp_hello_of(const Offer& offer, const LinkLayout& layout, uint32_t queue) {
  return hello_of<TcpHello>(offer, layout, queue);
}

class RawTcp {
 public:
  explicit RawTcp(const std::string& address) {
    const HostPort where = parse_host_port(address);
    int error = 0;
    socket_ = begin_connect(tcp_address(where.host, where.port), error);
    pollfd writable = {socket_.get(), POLLOUT, 0};
    ::poll(&writable, 1, 5000);
  }
  explicit RawTcp(Fd connected) : socket_(std::move(connected)) {}

  int socket() const { return socket_.get(); }
  void close() { socket_.reset(); }

  // False: the connection takes no more.
  bool send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
    return true;
  }
  template <typename T>
  bool send_struct(const T& value) {
    return send(std::as_bytes(std::span(&value, 1)));
  }
  bool send_frame(const TcpFrame& frame, std::span<const std::byte> payload) {
    return send_struct(TcpBatch{.first = frame}) && send(payload);
  }

  // What is there to be read now.
  std::vector<std::byte> receive() {
    std::vector<std::byte> bytes(1 << 16);
    const ssize_t n = recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    ended_ = n == 0 || (n < 0 && errno != EAGAIN);
    bytes.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return bytes;
  }
  // Whether the box has closed it, as the last receive() found.
  bool ended() const { return ended_; }

 private:
  Fd socket_;
  bool ended_ = false;
};

}  // namespace phub

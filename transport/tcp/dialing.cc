#include "transport/tcp/dialing.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/error.h"
#include "transport/tcp/format.h"
#include "transport/tcp/near.h"
#include "transport/tcp/socket.h"
#include "transport/text.h"
#include "transport/unix_message.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

// One connection that is being made.
class Dialing {
 public:
  Dialing(const QueueOffer& to, const TcpHello& hello, const TcpDialing& how)
      : address_(to.address.empty() ? "this host" : to.address), hello_(hello) {
    if (!how.memory.empty()) socket_ = connect_near(to.near);
    if (socket_) {
      memory_ = how.memory;
    } else if (to.address.empty() && to.near.empty()) {
      stage_ = Stage::kDone;
      return;
    } else if (to.address.empty()) {
      fail(ErrorCode::kUnavailable, "no server on this host any more: is it running?");
    } else {
      begin_tcp(how);
    }
    advance();  // within one machine it is connected already
  }
  bool done() const { return stage_ == Stage::kDone; }
  pollfd wanted() const { return {done() ? -1 : socket_.get(), wanted_, 0}; }
  // Goes on as far as it can without blocking. Throws Error if the server is absent or refuses.
  void advance();
  TcpWelcomed take() {
    return {std::move(socket_), tls_ ? std::make_unique<TcpTls>(std::move(tls_)) : nullptr};
  }
  const std::string& address() const { return address_; }

 private:
  enum class Stage { kConnecting, kShaking, kAsked, kDone };

  [[noreturn]] void fail_to_connect(int error) const;
  void begin_tcp(const TcpDialing& how);
  void begin_tls(const TlsContext& context, const std::string& server);
  bool check_tls(int result);
  void reach();
  void shake_hands();
  void ask();
  void listen();
  size_t receive(std::span<std::byte> room);

  const std::string address_;
  const TcpHello hello_;
  TlsServer server_;  // of TLS
  Fd socket_;
  Ssl tls_;                      // null: plain
  std::span<const int> memory_;  // not empty: near
  Stage stage_ = Stage::kConnecting;
  short wanted_ = POLLOUT;
  std::vector<std::byte> answer_;
};

void Dialing::fail_to_connect(int error) const {
  if (error == ETIMEDOUT) fail(ErrorCode::kTimeout, "{}: the server does not answer", address_);
  fail(ErrorCode::kUnavailable,
       "no server at {} ({}); is it running, and is that address reachable from this machine?",
       address_, std::strerror(error));
}

void Dialing::advance() {
  if (stage_ == Stage::kConnecting) reach();
  if (stage_ == Stage::kShaking) shake_hands();
  if (stage_ == Stage::kAsked) listen();
}

void Dialing::begin_tcp(const TcpDialing& how) {
  const HostPort where = parse_host_port(address_);
  int error = 0;
  socket_ = begin_connect(tcp_address(where.host, where.port), error);
  if (error != 0) fail_to_connect(error);
  if (how.context) begin_tls(how.context, how.server);
}

void Dialing::begin_tls(const TlsContext& context, const std::string& server) {
  server_ = {server, address_};
  tls_.reset(SSL_new(context.get()));
  if (!tls_ || !attach_socket(tls_.get(), socket_.get())) {
    fail(ErrorCode::kFull, "{}: no memory for TLS", address_);
  }
  expect_server(tls_.get(), server_);
  SSL_set_connect_state(tls_.get());
}

// Whether the latest call of OpenSSL did what it should. False: it does so later. Throws Error.
bool Dialing::check_tls(int result) {
  if (result == 1) return true;
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      wanted_ = POLLIN;
      return false;
    case SSL_ERROR_WANT_WRITE:
      wanted_ = POLLOUT;
      return false;
    case SSL_ERROR_SSL:
      throw Error(tls_error(tls_.get(), server_, ERR_peek_last_error()));
    default:
      fail(ErrorCode::kUnavailable, "{}: the server closed the connection", address_);
  }
}

void Dialing::reach() {
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) fail_to_connect(error);
  pollfd there = {socket_.get(), POLLOUT, 0};
  if (::poll(&there, 1, 0) != 1) return;
  tls_ ? void(stage_ = Stage::kShaking) : ask();
}

void Dialing::shake_hands() {
  ERR_clear_error();
  if (check_tls(SSL_do_handshake(tls_.get()))) ask();
}

void Dialing::ask() {
  if (tls_) {
    size_t sent = 0;  // all of it: the socket is empty
    ERR_clear_error();
    if (!check_tls(SSL_write_ex(tls_.get(), &hello_, sizeof(hello_), &sent))) {
      fail(ErrorCode::kUnavailable, "{}: the server takes no hello", address_);
    }
    wanted_ = POLLIN;
    stage_ = Stage::kAsked;
    return;
  }
  const auto hello = std::as_bytes(std::span(&hello_, 1));
  const int error = memory_.empty() ? send_greeting(socket_.get(), hello)
                                    : send_message(socket_.get(), hello, memory_);
  // Refused already: the reason can still be received.
  if (error != 0 && error != EPIPE && error != ECONNRESET) {
    fail_system(fmt::format("sending to {}", address_), error);
  }
  wanted_ = POLLIN;
  stage_ = Stage::kAsked;
}

// How much has come; 0: nothing yet. Throws Error when the connection has ended.
size_t Dialing::receive(std::span<std::byte> room) {
  while (tls_) {
    size_t got = 0;
    ERR_clear_error();
    if (check_tls(SSL_read_ex(tls_.get(), room.data(), room.size(), &got))) return got;
    if (socket_of(tls_.get()).drained) return 0;
  }
  for (;;) {
    const ssize_t bytes = recv(socket_.get(), room.data(), room.size(), MSG_DONTWAIT);
    if (bytes > 0) return static_cast<size_t>(bytes);
    if (bytes < 0 && errno == EAGAIN) return 0;
    if (bytes < 0 && errno == EINTR) continue;
    fail(ErrorCode::kUnavailable, "{}: the server closed the connection{}", address_,
         bytes < 0 ? fmt::format(" ({})", std::strerror(errno)) : "");
  }
}

// Reads the answer, and no byte of the frames behind it.
void Dialing::listen() {
  for (;;) {
    size_t wanted = sizeof(TcpHeader);
    if (answer_.size() >= wanted) wanted += parse_tcp_header(answer_, "welcome").bytes;
    const size_t have = answer_.size();
    if (have >= sizeof(TcpHeader) && have == wanted) break;
    answer_.resize(wanted);
    const size_t got = receive(std::span(answer_).subspan(have));
    answer_.resize(have + got);
    if (got == 0) return;
  }
  parse_tcp_answer(answer_);
  stage_ = Stage::kDone;
}

}  // namespace

std::vector<TcpWelcomed> dial_tcp(const Offer& offer, const LinkLayout& layout,
                                  const TcpDialing& how) {
  check_offer(offer, "tcp", &layout);
  TcpHello hello;
  std::memcpy(hello.ticket.data(), offer.ticket.data(), hello.ticket.size());
  hello.queues = static_cast<uint32_t>(offer.queues.size());
  hello.gradient_bytes = layout.gradients_at_worker();
  hello.result_bytes = layout.results_at_worker();
  std::vector<Dialing> all;
  all.reserve(offer.queues.size());
  for (hello.queue = 0; hello.queue < hello.queues; ++hello.queue) {
    hello.queue_chunks = layout.queue_chunks[hello.queue];
    all.emplace_back(offer.queues[hello.queue], hello, how);
  }

  std::vector<pollfd> wanted(all.size());
  const auto is_done = [](const Dialing& dialing) { return dialing.done(); };
  for (;;) {
    const auto slow = std::find_if_not(all.begin(), all.end(), is_done);
    if (slow == all.end()) break;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(how.deadline - Clock::now()).count();
    if (left <= 0) {
      fail(ErrorCode::kTimeout, "{}: the server does not answer; is that address reachable?",
           slow->address());
    }
    std::transform(all.begin(), all.end(), wanted.begin(),
                   [](const Dialing& dialing) { return dialing.wanted(); });
    ::poll(wanted.data(), wanted.size(), static_cast<int>(std::min<int64_t>(left, 1000)));
    for (size_t i = 0; i < all.size(); ++i) {
      if (wanted[i].revents != 0) all[i].advance();
    }
  }
  std::vector<TcpWelcomed> connections;
  for (Dialing& dialing : all) connections.push_back(dialing.take());
  return connections;
}

}  // namespace phub

#include "transport/tcp/dialing.h"

#include <fmt/ranges.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <optional>

#include "transport/error.h"
#include "transport/tcp/format.h"
#include "transport/tcp/near.h"
#include "transport/tcp/socket.h"
#include "transport/text.h"
#include "transport/unix_message.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

// For one address to connect while others are left: enough for a packet that is sent twice.
constexpr std::chrono::milliseconds kAddressLimit{1500};

// One connection that is being made.
class Dialing {
 public:
  Dialing(const QueueOffer& to, const TcpHello& hello, const TcpDialing& how)
      : how_(&how), addresses_(in_order(to, how)), hello_(hello) {
    if (!how.memory.empty()) socket_ = connect_near(to.near);
    if (socket_) {
      memory_ = how.memory;
    } else if (to.address.empty() && to.near.empty()) {
      stage_ = Stage::kDone;
      return;
    } else if (to.address.empty()) {
      fail(ErrorCode::kUnavailable, "no server on this host any more: is it running?");
    } else {
      begin_tcp(0);
    }
    advance();  // within one machine it is connected already
  }
  bool done() const { return stage_ == Stage::kDone; }
  pollfd wanted() const { return {done() ? -1 : socket_.get(), wanted_, 0}; }
  // Goes on as far as it can without blocking. Throws Error if the server is absent or refuses at
  // every address.
  void advance();
  // Goes on to the next address if this one has not answered in its time.
  void check_time();
  bool may_go_on() const { return stage_ == Stage::kConnecting && has_more(); }
  TcpWelcomed take() {
    return {std::move(socket_), tls_ ? std::make_unique<TcpTls>(std::move(tls_)) : nullptr};
  }
  std::string address() const { return at_ < addresses_.size() ? addresses_[at_] : "this host"; }

 private:
  enum class Stage { kConnecting, kShaking, kAsked, kDone };

  bool has_more() const { return at_ + 1 < addresses_.size(); }
  void begin_tcp(size_t first);
  void not_reached(int error);
  [[noreturn]] void fail_everywhere(int error) const;
  void go_on();
  void begin_tls(const TlsContext& context, const std::string& server);
  bool check_tls(int result);
  void reach();
  void shake_hands();
  void ask();
  void listen();
  size_t receive(std::span<std::byte> room);

  const TcpDialing* how_;
  std::vector<std::string> addresses_;  // to be tried; empty: near
  size_t at_ = 0;                       // which one is
  Clock::time_point next_at_ = Clock::time_point::max();
  std::optional<Error> refusal_;  // the first one
  TcpHello hello_;
  TlsServer server_;  // of TLS
  Fd socket_;
  Ssl tls_;                      // null: plain
  std::span<const int> memory_;  // not empty: near
  Stage stage_ = Stage::kConnecting;
  short wanted_ = POLLOUT;
  std::vector<std::byte> answer_;
};

// Begins to connect to the first of the addresses from `first` on to which this host knows a way.
// Throws Error if there is none.
void Dialing::begin_tcp(size_t first) {
  int error = 0;
  for (at_ = first; at_ < addresses_.size(); ++at_) {
    const HostPort where = parse_host_port(address());
    tls_.reset();
    socket_ = begin_connect(tcp_address(where.host, where.port), error);
    if (error == 0) break;
    if (how_->unreached != nullptr) how_->unreached->insert(address());
  }
  if (at_ == addresses_.size()) fail_everywhere(error);
  stage_ = Stage::kConnecting;
  wanted_ = POLLOUT;
  answer_.clear();
  const auto left = std::max(how_->deadline - Clock::now(), Clock::duration());
  next_at_ = Clock::now() + std::min<Clock::duration>(
                                kAddressLimit, left / static_cast<int>(addresses_.size() - at_));
  if (how_->context) begin_tls(how_->context, how_->server);
}

// Goes on to the next address. Throws Error if there is none.
void Dialing::not_reached(int error) {
  if (how_->unreached != nullptr) how_->unreached->insert(address());
  has_more() ? begin_tcp(at_ + 1) : fail_everywhere(error);
}

void Dialing::fail_everywhere(int error) const {
  if (refusal_) throw Error(refusal_->code(), refusal_->what());
  const std::string all = fmt::format("{}", fmt::join(addresses_, ", nor at "));
  if (error == ETIMEDOUT) fail(ErrorCode::kTimeout, "{}: the server does not answer", all);
  fail(ErrorCode::kUnavailable,
       "no server at {} ({}); is it running, and is that address reachable from this machine?", all,
       std::strerror(error));
}

void Dialing::check_time() {
  if (may_go_on() && Clock::now() >= next_at_) not_reached(ETIMEDOUT);
}

void Dialing::advance() {
  try {
    go_on();
  } catch (const Error& error) {
    // Somebody else may be there: another host can have the same address in a network of its own.
    if (!has_more() || !memory_.empty() || error.code() == ErrorCode::kFull) throw;
    if (!refusal_ && stage_ != Stage::kConnecting) refusal_.emplace(error.code(), error.what());
    not_reached(ECONNREFUSED);
  }
}

void Dialing::go_on() {
  if (stage_ == Stage::kConnecting) reach();
  if (stage_ == Stage::kShaking) shake_hands();
  if (stage_ == Stage::kAsked) listen();
}

void Dialing::begin_tls(const TlsContext& context, const std::string& server) {
  server_ = {server, address()};
  tls_.reset(SSL_new(context.get()));
  if (!tls_ || !attach_socket(tls_.get(), socket_.get())) {
    fail(ErrorCode::kFull, "{}: no memory for TLS", address());
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
      fail(ErrorCode::kUnavailable, "{}: the server closed the connection", address());
  }
}

void Dialing::reach() {
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return not_reached(error);
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
      fail(ErrorCode::kUnavailable, "{}: the server takes no hello", address());
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
    fail_system(fmt::format("sending to {}", address()), error);
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
    fail(ErrorCode::kUnavailable, "{}: the server closed the connection{}", address(),
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

std::vector<std::string> in_order(const QueueOffer& offer, const TcpDialing& how) {
  std::vector<std::string> all;
  if (offer.address.empty()) return all;
  const auto is_ipv6 = [](const std::string& number) { return number.find(':') != number.npos; };
  const auto distance = [&](const std::string& address) {
    const std::string number = parse_host_port(address).host;
    if (how.reached.empty() || number == how.reached) return 0;
    return is_ipv6(number) == is_ipv6(how.reached) ? 1 : 2;
  };
  const auto add = [&](std::vector<std::string> addresses) {
    std::ranges::stable_sort(addresses, {}, distance);
    std::ranges::move(addresses, std::back_inserter(all));
  };
  std::vector<std::string> of_nic = {offer.address};
  of_nic.insert(of_nic.end(), offer.same_nic.begin(), offer.same_nic.end());
  add(std::move(of_nic));
  add(offer.other_nics);
  std::stable_partition(all.begin(), all.end(), [&how](const std::string& address) {
    return how.unreached == nullptr || !how.unreached->contains(address);
  });
  return all;
}

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
    const int64_t longest = std::ranges::any_of(all, &Dialing::may_go_on) ? 50 : 1000;
    ::poll(wanted.data(), wanted.size(), static_cast<int>(std::min(left, longest)));
    for (size_t i = 0; i < all.size(); ++i) {
      if (wanted[i].revents != 0) all[i].advance();
      all[i].check_time();
    }
  }
  std::vector<TcpWelcomed> connections;
  for (Dialing& dialing : all) connections.push_back(dialing.take());
  return connections;
}

}  // namespace phub

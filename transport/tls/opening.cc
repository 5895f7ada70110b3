#include "transport/tls/opening.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/tls/files.h"

namespace phub {
namespace {

constexpr char kHandshakeRecord = 22;  // the first byte of TLS
// A client that was refused may still be sending. Closing at once would take the reason from it.
constexpr auto kDrain = std::chrono::seconds(2);
constexpr size_t kMaxDrainedBytes = 4u << 20;

// Why the latest call of OpenSSL failed.
std::string reason_of(const SSL* ssl, int error, int system) {
  const long verified = SSL_get_verify_result(ssl);
  if (verified != X509_V_OK) {
    ERR_clear_error();
    return fmt::format("its certificate: {}", X509_verify_cert_error_string(verified));
  }
  if (error == SSL_ERROR_SYSCALL) return system == 0 ? "it went away" : std::strerror(system);
  return error == SSL_ERROR_ZERO_RETURN ? "it went away" : last_tls_error();
}

}  // namespace

TlsTurns::TlsTurns(boost::asio::io_context& context, uint32_t most, uint32_t evict_after_ms,
                   TlsCounters& counters)
    : most_(most), evict_after_(evict_after_ms), counters_(counters), timer_(context) {}

void TlsTurns::ask(const std::shared_ptr<TlsOpening>& opening) {
  // Those who have given up: they are the oldest.
  while (!waiting_.empty()) {
    const std::shared_ptr<TlsOpening> oldest = waiting_.front().lock();
    if (oldest && oldest->waits()) break;
    waiting_.pop_front();
  }
  waiting_.push_back(opening);
  grant();
}

void TlsTurns::done(const TlsOpening* opening) {
  if (std::erase_if(under_way_, [&](const Turn& turn) { return turn.opening == opening; }) == 0) {
    return;
  }
  --counters_.handshakes;
  if (!waiting_.empty()) {
    timer_.expires_after(std::chrono::milliseconds(0));
    timer_.async_wait([this](const boost::system::error_code& error) {
      if (!error) grant();
    });
  }
}

void TlsTurns::grant() {
  while (!waiting_.empty()) {
    const std::shared_ptr<TlsOpening> next = waiting_.back().lock();
    if (!next || !next->waits()) {
      waiting_.pop_back();
      continue;
    }
    if (under_way_.size() >= most_) {
      const Clock::time_point old = under_way_.front().since + evict_after_;
      if (Clock::now() < old) {
        timer_.expires_at(old);
        timer_.async_wait([this](const boost::system::error_code& error) {
          if (!error) grant();
        });
        return;
      }
      under_way_.front().opening->evict();  // calls done()
      continue;
    }
    waiting_.pop_back();
    under_way_.push_back({next.get(), Clock::now()});
    ++counters_.handshakes;
    next->begin();
  }
}

TlsOpening::TlsOpening(const Shared& shared, Descriptor client, std::string from)
    : client_(std::move(client)),
      from_(std::move(from)),
      shared_(shared),
      limit_(client_.get_executor()) {}

void TlsOpening::start() { wait(client_, Descriptor::wait_read, &TlsOpening::look); }

void TlsOpening::wait(Descriptor& descriptor, Descriptor::wait_type what, Step next) {
  descriptor.async_wait(what,
                        [self = shared_from_this(), next](const boost::system::error_code& error) {
                          if (!error && self->client_.is_open()) ((*self).*next)();
                        });
}

void TlsOpening::look() {
  char first = 0;
  const ssize_t got = recv(client_.native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    return wait(client_, Descriptor::wait_read, &TlsOpening::look);
  }
  if (got <= 0) return close();
  if (first != kHandshakeRecord) return refuse_plain();
  asked_ = true;
  shared_.turns.ask(shared_from_this());
}

void TlsOpening::begin() {
  ssl_ = shared_.new_connection();
  if (!ssl_ || !attach_socket(ssl_.get(), client_.native_handle())) {
    return refuse(last_tls_error());
  }
  SSL_set_accept_state(ssl_.get());
  shake_hands();
}

void TlsOpening::shake_hands() {
  ERR_clear_error();
  errno = 0;
  const int result = SSL_do_handshake(ssl_.get());
  const int system = errno;
  if (result == 1) {
    shared_.turns.done(this);
    ++shared_.counters.completed;
    return opened(std::move(ssl_));
  }
  const int error = SSL_get_error(ssl_.get(), result);
  if (error == SSL_ERROR_WANT_READ) {
    return wait(client_, Descriptor::wait_read, &TlsOpening::shake_hands);
  }
  if (error == SSL_ERROR_WANT_WRITE) {
    return wait(client_, Descriptor::wait_write, &TlsOpening::shake_hands);
  }
  refuse(reason_of(ssl_.get(), error, system));
}

void TlsOpening::evict() {
  ++shared_.counters.evicted;
  refuse("its handshake took too long");
  close();
}

void TlsOpening::refuse(const std::string& why) {
  refused_ = true;
  ++shared_.counters.failed;
  ssl_.reset();
  shared_.turns.done(this);
  if (shared_.note) shared_.note(from_, why);
  shutdown(client_.native_handle(), SHUT_WR);
  limit_.expires_after(kDrain);
  limit_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error) self->close();
  });
  drain();
}

void TlsOpening::give_up() {
  if (asked_ && !refused_) refuse("its handshake did not end in time");
  close();
}

void TlsOpening::refuse_plain() {
  char first = 0;
  recv(client_.native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
  const std::string_view text = plain_answer(first);
  if (!text.empty()) {
    send(client_.native_handle(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  refuse("it does not speak TLS");
}

void TlsOpening::drain() {
  std::array<char, 4096> block;
  for (ssize_t got = 1; got > 0;) {
    got = recv(client_.native_handle(), block.data(), block.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      return wait(client_, Descriptor::wait_read, &TlsOpening::drain);
    }
    drained_bytes_ += static_cast<size_t>(std::max<ssize_t>(got, 0));
    if (drained_bytes_ > kMaxDrainedBytes) break;
  }
  close();
}

void TlsOpening::close() {
  ssl_.reset();
  shared_.turns.done(this);
  boost::system::error_code ignored;
  client_.close(ignored);
  limit_.cancel();
  closed();
}

}  // namespace phub

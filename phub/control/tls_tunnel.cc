#include "phub/control/tls_tunnel.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <boost/asio/post.hpp>
#include <cerrno>
#include <chrono>
#include <utility>

namespace phub {
namespace {

// Then others have their turn.
constexpr int kRecordsAtOnce = 4;
constexpr size_t kBytesAtOnce = kRecordsAtOnce * (kTlsRecordBytes + 512);  // with what is around
// To send what is left when the session has closed.
constexpr auto kLastWords = std::chrono::seconds(2);

}  // namespace

TlsTunnel::TlsTunnel(Ssl ssl, Descriptor client, Descriptor session,
                     std::shared_ptr<std::atomic<bool>> broken, Scratch& scratch)
    : ssl_(std::move(ssl)),
      client_(std::move(client)),
      session_(std::move(session)),
      broken_(std::move(broken)),
      scratch_(scratch),
      last_words_(client_.get_executor()) {}

void TlsTunnel::start() {
  wait(session_, Descriptor::wait_error, &TlsTunnel::session_is_gone);
  read_session();
  read_client();
}

void TlsTunnel::wait(Descriptor& descriptor, Descriptor::wait_type what, Step next) {
  if (!descriptor.is_open()) return;
  descriptor.async_wait(what,
                        [self = shared_from_this(), next](const boost::system::error_code& error) {
                          if (!error && self->client_.is_open()) ((*self).*next)();
                        });
}

void TlsTunnel::again(Step next) {
  boost::asio::post(client_.get_executor(), [self = shared_from_this(), next] {
    if (self->client_.is_open()) ((*self).*next)();
  });
}

void TlsTunnel::read_client() {
  TlsSocket& socket = socket_of(ssl_.get());
  socket.allowance = kBytesAtOnce;  // records may hold nothing for us
  for (int i = 0; i < kRecordsAtOnce; ++i) {
    ERR_clear_error();
    const int got = SSL_read(ssl_.get(), scratch_.data(), static_cast<int>(scratch_.size()));
    if (got > 0) {
      if (!give_session({scratch_.data(), static_cast<size_t>(got)})) return;
      continue;
    }
    switch (SSL_get_error(ssl_.get(), got)) {
      case SSL_ERROR_WANT_READ:
        if (socket.allowance == 0) return again(&TlsTunnel::read_client);
        return wait(client_, Descriptor::wait_read, &TlsTunnel::read_client);
      case SSL_ERROR_WANT_WRITE:
        return wait(client_, Descriptor::wait_write, &TlsTunnel::read_client);
      case SSL_ERROR_ZERO_RETURN:
        return end_of_client();
      default:
        return break_off();
    }
  }
  again(&TlsTunnel::read_client);
}

// Whether all of it was written. The rest is kept, and reading goes on after it.
bool TlsTunnel::give_session(std::string_view bytes) {
  const ssize_t sent =
      send(session_.native_handle(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(bytes.size())) return true;
  if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return false;
  to_session_ = bytes.substr(static_cast<size_t>(sent < 0 ? 0 : sent));
  wait(session_, Descriptor::wait_write, &TlsTunnel::write_session);
  return false;
}

void TlsTunnel::write_session() {
  const std::string bytes = std::exchange(to_session_, {});
  if (give_session(bytes)) read_client();
}

void TlsTunnel::end_of_client() { shutdown(session_.native_handle(), SHUT_WR); }

void TlsTunnel::read_session() {
  for (int i = 0; i < kRecordsAtOnce; ++i) {
    const ssize_t got =
        recv(session_.native_handle(), scratch_.data(), scratch_.size(), MSG_DONTWAIT);
    if (got > 0) {
      if (!give_client({scratch_.data(), static_cast<size_t>(got)})) return;
      continue;
    }
    if (got == 0) return end_of_session();
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
      return wait(session_, Descriptor::wait_read, &TlsTunnel::read_session);
    }
    return end_of_session();
  }
  again(&TlsTunnel::read_session);
}

bool TlsTunnel::give_client(std::string_view bytes) {
  while (!bytes.empty()) {
    ERR_clear_error();
    const int sent = SSL_write(ssl_.get(), bytes.data(), static_cast<int>(bytes.size()));
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
      continue;
    }
    const int error = SSL_get_error(ssl_.get(), sent);
    if (error != SSL_ERROR_WANT_WRITE && error != SSL_ERROR_WANT_READ) {
      break_off();
      return false;
    }
    to_client_ = bytes;
    wait(client_, error == SSL_ERROR_WANT_WRITE ? Descriptor::wait_write : Descriptor::wait_read,
         &TlsTunnel::write_client);
    return false;
  }
  return true;
}

void TlsTunnel::write_client() {
  const std::string bytes = std::exchange(to_client_, {});
  if (give_client(bytes)) read_session();
}

void TlsTunnel::end_of_session() {
  ERR_clear_error();
  SSL_shutdown(ssl_.get());
  shutdown(client_.native_handle(), SHUT_WR);
  client_is_told_ = true;
  if (session_gone_) close();
}

// It has closed its end, and not only ended its answer.
void TlsTunnel::session_is_gone() {
  session_gone_ = true;
  if (client_is_told_) return close();
  last_words_.expires_after(kLastWords);
  last_words_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error) self->close();
  });
}

void TlsTunnel::break_off() {
  broken_->store(true);
  close();
}

void TlsTunnel::close() {
  boost::system::error_code ignored;
  client_.close(ignored);
  session_.close(ignored);
  last_words_.cancel();
}

}  // namespace phub

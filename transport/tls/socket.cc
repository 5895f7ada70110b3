#include "transport/tls/socket.h"

#include <openssl/bio.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace phub {
namespace {

TlsSocket& state_of(BIO* bio) { return *static_cast<TlsSocket*>(BIO_get_data(bio)); }

bool would_block(ssize_t result) {
  return result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
}

int read_some(BIO* bio, char* out, int bytes) {
  TlsSocket& state = state_of(bio);
  BIO_clear_retry_flags(bio);
  const size_t most = std::min(static_cast<size_t>(bytes), state.allowance);
  state.drained = false;
  if (most == 0) {
    BIO_set_retry_read(bio);
    return -1;
  }
  const ssize_t got = recv(state.fd, out, most, MSG_DONTWAIT);
  state.drained = got <= 0;
  state.ended = got == 0;
  if (got > 0) state.allowance -= static_cast<size_t>(got);
  if (would_block(got)) BIO_set_retry_read(bio);
  return static_cast<int>(got);
}

int write_some(BIO* bio, const char* data, int bytes) {
  const TlsSocket& state = state_of(bio);
  BIO_clear_retry_flags(bio);
  const int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (state.more ? MSG_MORE : 0);
  const ssize_t sent = send(state.fd, data, static_cast<size_t>(bytes), flags);
  if (would_block(sent)) BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}

long control(BIO* bio, int command, long, void*) {
  switch (command) {
    case BIO_CTRL_EOF:
      return state_of(bio).ended ? 1 : 0;
    case BIO_CTRL_FLUSH:
      return 1;
    default:
      return 0;
  }
}

int destroy(BIO* bio) {
  delete static_cast<TlsSocket*>(BIO_get_data(bio));
  BIO_set_data(bio, nullptr);
  return 1;
}

BIO_METHOD* make_method() {
  BIO_METHOD* method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "phub socket");
  if (method == nullptr) return nullptr;
  BIO_meth_set_read(method, read_some);
  BIO_meth_set_write(method, write_some);
  BIO_meth_set_ctrl(method, control);
  BIO_meth_set_destroy(method, destroy);
  return method;
}

}  // namespace

void SslFree::operator()(ssl_st* ssl) const { SSL_free(ssl); }

bool attach_socket(ssl_st* connection, int fd) {
  static BIO_METHOD* const method = make_method();
  BIO* bio = method == nullptr ? nullptr : BIO_new(method);
  if (bio == nullptr) return false;
  BIO_set_data(bio, new TlsSocket{.fd = fd});
  BIO_set_init(bio, 1);
  SSL_set_bio(connection, bio, bio);
  return true;
}

TlsSocket& socket_of(ssl_st* connection) { return state_of(SSL_get_rbio(connection)); }

}  // namespace phub

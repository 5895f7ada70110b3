// The TLS port before anybody is let in: the input is what a client sends before it closes its
// side.
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "phub/control/tls_opening.h"
#include "transport/error.h"
#include "transport/tls/files.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

constexpr size_t kMaxInputBytes = 64u << 10;  // fits into the socket's buffer

// With a key of its own; clients are asked for a certificate.
TlsContext make_context() {
  TlsContext context = make_tls_context(true);
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = X509_new();
  X509_set_version(certificate, 2);
  X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 1'000'000);
  X509_set_pubkey(certificate, key);
  PHUB_CHECK(X509_sign(certificate, key, EVP_sha256()) > 0);
  PHUB_CHECK(SSL_CTX_use_certificate(context.get(), certificate) == 1);
  PHUB_CHECK(SSL_CTX_use_PrivateKey(context.get(), key) == 1);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  X509_free(certificate);
  EVP_PKEY_free(key);
  return context;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const TlsContext context = make_context();
  if (size > kMaxInputBytes) return 0;
  int client[2], session[2];
  PHUB_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, client) == 0);
  PHUB_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, session) == 0);
  PHUB_CHECK(send(client[0], data, size, 0) == static_cast<ssize_t>(size));
  shutdown(client[0], SHUT_WR);

  TlsCounters counters;
  boost::asio::io_context io;
  TlsTurns turns(io, 1, 1000, counters);
  const TlsOpening::Shared shared{
      turns, counters, [] { return Ssl(SSL_new(context.get())); },
      [](const std::string&, const std::string& why) { PHUB_CHECK(!why.empty()); }};
  const TlsPortOpening::Opened opened = [](Ssl, int, int,
                                           const std::shared_ptr<std::atomic<bool>>&) {
    fail(ErrorCode::kInternal, "nobody has a certificate, and somebody was let in");
  };
  std::make_shared<TlsPortOpening>(shared, opened, TlsOpening::Descriptor(io, client[1]),
                                   TlsOpening::Descriptor(io, session[1]),
                                   std::make_shared<std::atomic<bool>>(false), "fuzz")
      ->open();
  io.run();  // everything has been sent: it ends with the connection
  PHUB_CHECK(counters.handshakes == 0);
  PHUB_CHECK(counters.completed == 0);
  char byte = 0;
  PHUB_CHECK(recv(session[0], &byte, 1, 0) == 0);  // the session has been told
  close(client[0]);
  close(session[0]);
  return 0;
}

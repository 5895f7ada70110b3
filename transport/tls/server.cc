#include "transport/tls/server.h"

#include <openssl/ssl.h>

#include <utility>

namespace phub {
namespace {

constexpr int kMaxChainLength = 8;

}  // namespace

TlsServerContext::TlsServerContext(TlsServerFiles files, Use use)
    : files_(std::move(files)), use_(use), loaded_(load()) {}

TlsServerContext::Loaded TlsServerContext::load() const {
  Loaded fresh = {.context = make_tls_context(true)};
  SSL_CTX* context = fresh.context.get();
  if (use_ == Use::kData) prepare_for_data(context);
  fresh.expires_s =
      load_certificate(context, {"--tls-cert", files_.certificate}, {"--tls-key", files_.key});
  if (!files_.client_authorities.empty()) {
    load_authorities(context, {"--tls-client-ca", files_.client_authorities}, true);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    SSL_CTX_set_verify_depth(context, kMaxChainLength);
  }
  return fresh;
}

void TlsServerContext::reload() {
  Loaded fresh = load();
  const std::lock_guard lock(mutex_);
  loaded_ = std::move(fresh);
}

Ssl TlsServerContext::new_connection() const {
  const std::lock_guard lock(mutex_);
  return Ssl(SSL_new(loaded_.context.get()));
}

uint64_t TlsServerContext::expires_s() const {
  const std::lock_guard lock(mutex_);
  return loaded_.expires_s;
}

}  // namespace phub

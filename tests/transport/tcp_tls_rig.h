// The tcp transport over TLS for the suite, with an authority of the test's own.
#pragma once

#include <memory>
#include <string>

#include "tests/phub/tls_certificates.h"
#include "tests/transport/tcp_rig.h"
#include "transport/tls/server.h"

namespace phub {

// The files of a box's certificate and of a worker that trusts its authority.
class TcpTlsFiles {
 public:
  TcpTlsFiles() { use(ca_.issue()); }

  void use(const testing::Certificate& certificate) {
    server_.certificate = files_.write("cert.pem", certificate.pem);
    server_.key = files_.write("key.pem", certificate.key);
  }
  TcpTrust trust() const {
    return {.host = "localhost", .tls = {.authorities = files_.write("ca.pem", ca_.pem())}};
  }

  const testing::Files files_;
  const testing::Authority ca_{"the authority"}, other_{"another authority"};
  TlsServerFiles server_;
};

// A transport of these files, and workers that trust them.
inline std::unique_ptr<TcpRig> make_tcp_tls_rig(TcpOptions options = {}) {
  struct Box {
    TcpTlsFiles files;
    TlsServerContext context{files.server_, TlsServerContext::Use::kData};
  };
  auto box = std::make_shared<Box>();
  options.tls = &box->context;
  return std::make_unique<TcpRig>(options, box->files.trust(), box);
}

}  // namespace phub

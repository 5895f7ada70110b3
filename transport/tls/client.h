// The client's side of TLS: the authorities that it trusts, the certificate that it shows, and the
// message when they do not agree.
#pragma once

#include <string>

#include "transport/error.h"
#include "transport/tls/client_options.h"
#include "transport/tls/files.h"

struct ssl_st;  // SSL

namespace phub {

// Checks the server's certificate, and shows one if there is one. Throws Error(kInvalid): a file is
// wrong.
TlsContext make_client_context(const ClientTls& options);

// A server as its user names it.
struct TlsServer {
  std::string host;     // the name or address that its certificate must be for
  std::string address;  // HOST:PORT, for messages
};

// Asks for the server by its name, and accepts no certificate but one for that name or address.
void expect_server(ssl_st* connection, const TlsServer& server);

// Returns the error of a failure, in a handshake or later. `code`: OpenSSL's. kUnauthorized: one of
// the two does not accept the other; kUnavailable: this is no TLS.
Error tls_error(ssl_st* connection, const TlsServer& server, unsigned long code);

}  // namespace phub

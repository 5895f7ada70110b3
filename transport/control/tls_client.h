// The client's side of TLS: whom it trusts, what it shows, and what to say when they do not agree.
#pragma once

#include <string>

#include "transport/control/server_address.h"
#include "transport/control/tls_files.h"
#include "transport/error.h"

struct ssl_st;  // SSL

namespace phub {

// Trusts the authorities in the file that PHUB_CA names, else those of the system. Shows the
// certificate of PHUB_CLIENT_CERT, with the key of PHUB_CLIENT_KEY. Throws Error(kInvalid): a file
// is wrong.
TlsContext client_context_from_environment();

// Whether PHUB_INSECURE says that the network is trusted with tokens in plain text.
bool network_is_trusted();

// Asks for the server by its name, and accepts no certificate but one for that name or address.
void expect_server(ssl_st* connection, const ServerAddress& server);

// What failed, of a handshake or later. `code`: OpenSSL's. kUnauthorized: one of the two does not
// accept the other; kUnavailable: this is no TLS.
Error tls_error(ssl_st* connection, const ServerAddress& server, unsigned long code);

}  // namespace phub

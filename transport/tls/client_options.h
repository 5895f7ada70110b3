// The authorities that a client trusts over TLS, and the certificate that it shows.
#pragma once

#include <string>

namespace phub {

struct ClientTls {
  // PEM files, read for each connection. Authorities that are trusted; empty: the system's.
  std::string authorities;
  std::string certificate, key;  // for a server that asks for one; empty: none
  // Tokens may cross the network in plain text.
  bool network_is_trusted = false;
};

// PHUB_CA, PHUB_CLIENT_CERT, PHUB_CLIENT_KEY, PHUB_INSECURE. REQUIRES: no other thread changes the
// environment meanwhile.
ClientTls client_tls_from_environment();

}  // namespace phub

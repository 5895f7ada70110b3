// A server as users name it: HOST:PORT, or https://HOST:PORT to ask it over TLS.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace phub {

struct ServerAddress {
  bool tls = false;
  std::string host;  // IPv6 without brackets
  uint16_t port = 0;
  std::string authority;  // HOST:PORT as it was given, for the Host header
};

// Throws Error(kInvalid) unless the text names a host and a port. Before it may stand https:// or
// http://, after it a slash.
ServerAddress parse_server_address(std::string_view text);

// The servers that a list with commas names, to be asked in turn.
std::vector<std::string> servers_of(std::string_view text);

}  // namespace phub

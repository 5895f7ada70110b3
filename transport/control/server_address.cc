#include "transport/control/server_address.h"

#include "transport/error.h"
#include "transport/text.h"

namespace phub {

ServerAddress parse_server_address(std::string_view text) {
  constexpr std::string_view kTls = "https://", kPlain = "http://";
  const std::string_view given = text;
  ServerAddress out;
  out.tls = text.starts_with(kTls);
  if (out.tls) text.remove_prefix(kTls.size());
  if (!out.tls && text.starts_with(kPlain)) text.remove_prefix(kPlain.size());
  if (text.size() != given.size() && text.ends_with('/')) text.remove_suffix(1);
  out.authority = text;
  HostPort address = parse_host_port(text);
  out.host = std::move(address.host);
  out.port = address.port;
  if (out.host.empty() || out.port == 0) {
    fail(ErrorCode::kInvalid, "'{}' does not name a server: host and port are needed",
         printable(given));
  }
  return out;
}

std::vector<std::string> servers_of(std::string_view text) {
  std::vector<std::string> servers;
  for (;;) {
    const size_t comma = text.find(',');
    servers.emplace_back(text.substr(0, comma));
    if (comma == text.npos) return servers;
    text.remove_prefix(comma + 1);
  }
}

}  // namespace phub

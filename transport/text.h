// Small things for messages and for words that people type.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace phub {

// For messages and logs: control characters replaced, long text cut.
std::string printable(std::string_view text);

// The candidate closest to a misspelt word, or "" if none is close.
std::string nearest(std::string_view word, const std::vector<std::string_view>& candidates);

// The first line of a file; "" if it cannot be read.
std::string first_line(const std::string& path);

// "HOST:PORT", "[IPv6]:PORT", ":PORT" or "*:PORT" (every address of this machine).
struct HostPort {
  std::string host;  // "" for every address; IPv6 without brackets
  uint16_t port = 0;
};
// Throws Error(kInvalid) that shows the text and the form it should have.
HostPort parse_host_port(std::string_view text);
std::string format_host_port(const std::string& host, uint16_t port);

}  // namespace phub

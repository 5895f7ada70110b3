// Helpers for messages, and for words that people type.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace phub {

// Text from outside, for a terminal or a log. Characters that could move the cursor, change the
// order of the text or not be seen are shown as \u001b: control characters (C0 and C1),
// bidirectional and other formatting characters, line and paragraph separators. A byte that is not
// UTF-8 is shown as \xff.
std::string escaped(std::string_view text);
// Does the same, but keeps line breaks.
std::string escaped_lines(std::string_view text);
// The same in one line of a message: long text is cut.
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

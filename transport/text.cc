#include "transport/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <numeric>

#include "transport/error.h"

namespace phub {
namespace {

// Levenshtein's distance, one row at a time.
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t above = row[j + 1];
      row[j + 1] = std::min({above + 1, row[j] + 1, diagonal + (a[i] == b[j] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

std::string printable(std::string_view text) {
  constexpr size_t kShownBytes = 80;
  std::string out;
  for (const char c : text.substr(0, kShownBytes)) {
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  if (text.size() > kShownBytes) out += fmt::format("… ({} bytes)", text.size());
  return out;
}

std::string nearest(std::string_view word, const std::vector<std::string_view>& candidates) {
  constexpr size_t kLongestWord = 64;
  if (word.size() > kLongestWord) return "";
  size_t best = std::max<size_t>(1, word.size() / 3) + 1;
  std::string_view found;
  for (const std::string_view candidate : candidates) {
    const size_t distance = edits(word, candidate);
    if (distance < best) {
      best = distance;
      found = candidate;
    }
  }
  return std::string(found);
}

HostPort parse_host_port(std::string_view text) {
  const auto refuse = [&](std::string_view why) {
    fail(ErrorCode::kInvalid, "'{}' is no address: {}; it should be HOST:PORT or [IPV6]:PORT",
         printable(text), why);
  };
  HostPort out;
  const size_t colon = text.rfind(':');
  if (colon == text.npos) refuse("there is no ':' before a port");
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') || host.ends_with(']')) {
    if (!host.starts_with('[') || !host.ends_with(']') || host.size() < 3) {
      refuse("the brackets do not match");
    }
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != host.npos) {
    refuse("an IPv6 address needs brackets");
  }
  if (host.size() > 255 || host.find_first_of(" /\\@?#[]\t\r\n") != host.npos) {
    refuse("the host is not a name or a number");
  }
  if (host != "*") out.host = host;
  const std::string_view port = text.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), out.port);
  if (error != std::errc() || end != port.data() + port.size()) {
    refuse("the port must be a number from 0 to 65535");
  }
  return out;
}

std::string format_host_port(const std::string& host, uint16_t port) {
  const bool brackets = host.find(':') != host.npos;
  return brackets ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace phub

#include "transport/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <numeric>
#include <utility>

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

// The character that `text` begins with. `bytes` 0: it does not begin with UTF-8.
struct Character {
  uint32_t code = 0;
  size_t bytes = 0;
};
Character first_character(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  const size_t bytes = lead < 0x80              ? 1
                       : (lead >> 5) == 0b110   ? 2
                       : (lead >> 4) == 0b1110  ? 3
                       : (lead >> 3) == 0b11110 ? 4
                                                : 0;
  if (bytes == 0 || bytes > text.size()) return {};
  uint32_t code = bytes == 1 ? lead : lead & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    const auto next = static_cast<unsigned char>(text[i]);
    if ((next >> 6) != 0b10) return {};
    code = code << 6 | (next & 0x3fu);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kLeast[bytes] || code > 0x10ffff || surrogate) return {};
  return {code, bytes};
}

// Characters that are not seen as themselves (first, last).
bool is_hidden(uint32_t code) {
  constexpr std::pair<uint32_t, uint32_t> kHidden[] = {
      {0x00, 0x1f},     {0x7f, 0x9f},        // control characters, C0 and C1
      {0xad, 0xad},                          // soft hyphen
      {0x061c, 0x061c}, {0x200e, 0x200f},    // bidirectional marks
      {0x202a, 0x202e}, {0x2066, 0x2069},    // bidirectional embeddings, overrides, isolates
      {0x180e, 0x180e}, {0x200b, 0x200d},    // without width
      {0x2028, 0x2029}, {0x2060, 0x2065},    // separators; invisible operators
      {0x206a, 0x206f}, {0xfeff, 0xfeff},    // deprecated formatting; byte order mark
      {0xfff9, 0xfffb}, {0xe0000, 0xe0fff},  // annotations; tags
  };
  return std::any_of(std::begin(kHidden), std::end(kHidden), [code](const auto& range) {
    return code >= range.first && code <= range.second;
  });
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const Character character = first_character(text);
    const size_t bytes = std::max<size_t>(character.bytes, 1);
    if (character.bytes == 0) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    } else if (is_hidden(character.code)) {
      out += fmt::format("\\u{:04x}", character.code);
    } else {
      out += text.substr(0, bytes);
    }
    text.remove_prefix(bytes);
  }
  return out;
}

std::string escaped_lines(std::string_view text) {
  std::string out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    out += escaped(text.substr(begin, end - begin));
    if (end < text.size()) out += '\n';
    begin = end + 1;
  }
  return out;
}

std::string printable(std::string_view text) {
  constexpr size_t kShownBytes = 80;
  if (text.size() <= kShownBytes) return escaped(text);
  size_t end = kShownBytes;  // not within a character
  while (end > kShownBytes - 3 && (static_cast<unsigned char>(text[end]) >> 6) == 0b10) --end;
  return escaped(text.substr(0, end)) + fmt::format("… ({} bytes)", text.size());
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
    fail(ErrorCode::kInvalid, "'{}' is not an address: {}; it should be HOST:PORT or [IPV6]:PORT",
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

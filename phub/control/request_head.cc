#include "phub/control/request_head.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>

#include "transport/text.h"

namespace phub {
namespace {

constexpr std::string_view kJson = "application/json";
constexpr std::string_view kBytes = "application/octet-stream";

std::string lower_case(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return out;
}

// "Box.example:7717" -> "box.example", "[::1]:7717" -> "::1". "": neither a name nor an address.
std::string name_in(std::string_view host) {
  if (host.starts_with('[')) {
    const size_t end = host.find(']');
    return end == host.npos ? "" : lower_case(host.substr(1, end - 1));
  }
  std::string name = lower_case(host.substr(0, host.find(':')));
  if (name.ends_with('.')) name.pop_back();
  return name;
}

bool is_loopback_address(const std::string& name) {
  in_addr four{};
  in6_addr six{};
  if (inet_pton(AF_INET, name.c_str(), &four) == 1) return ntohl(four.s_addr) >> 24 == 127;
  return inet_pton(AF_INET6, name.c_str(), &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six);
}

// "http://box:7717" is the origin of pages that come from Host "box:7717".
bool is_own_origin(std::string_view origin, std::string_view host) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (origin.starts_with(scheme)) {
      return lower_case(origin.substr(scheme.size())) == lower_case(host);
    }
  }
  return false;
}

bool is_type(std::string_view content_type, std::string_view expected) {
  std::string_view type = content_type.substr(0, content_type.find(';'));
  while (type.ends_with(' ') || type.ends_with('\t')) type.remove_suffix(1);
  return lower_case(type) == expected;
}

// The names on the lines that have `own`, a name of this machine, at a loopback address. Debian has
// the name with the domain there: "127.0.1.1 box.example.org box".
std::vector<std::string> names_beside(const std::string& own, const std::string& hosts_file) {
  std::vector<std::string> names;
  std::ifstream file(hosts_file);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::string address;
    if (!(words >> address) || !is_loopback_address(address)) continue;
    std::vector<std::string> of_line;
    for (std::string name; words >> name;) of_line.push_back(lower_case(name));
    if (std::ranges::count(of_line, own) == 0) continue;
    names.insert(names.end(), of_line.begin(), of_line.end());
  }
  return names;
}

}  // namespace

HostNames::HostNames(const std::vector<std::string>& listen, const std::string& hosts_file)
    : names_{"localhost"} {
  for (const std::string& address : listen) {
    const std::string host = lower_case(parse_host_port(address).host);
    if (!host.empty()) names_.push_back(host);
  }
  std::array<char, 256> own{};
  if (gethostname(own.data(), own.size() - 1) != 0 || own[0] == 0) return;
  names_.push_back(lower_case(own.data()));
  const std::vector<std::string> beside = names_beside(names_.back(), hosts_file);
  names_.insert(names_.end(), beside.begin(), beside.end());
}

bool HostNames::has(std::string_view host) const {
  const std::string name = name_in(host);
  return is_loopback_address(name) || std::find(names_.begin(), names_.end(), name) != names_.end();
}

std::optional<HeadRefusal> refuse_head(const RequestHead& head, const HostNames& names) {
  if (head.hosts != 1 && !(head.http_1_0 && head.hosts == 0)) {
    return HeadRefusal{400, ErrorCode::kInvalid,
                       fmt::format("a request has one Host header, this one has {}", head.hosts)};
  }
  if (head.over_loopback && head.hosts > 0 && !names.has(head.host)) {
    return HeadRefusal{
        421, ErrorCode::kInvalid,
        fmt::format("'{}' is not a name of this server over loopback; ask for localhost, or give "
                    "the name with --listen",
                    printable(head.host))};
  }
  if (!head.origin.empty() && !(head.reads && is_own_origin(head.origin, head.host))) {
    return HeadRefusal{
        403, ErrorCode::kUnauthorized,
        fmt::format("pages of '{}' may not use this server", printable(head.origin))};
  }
  const std::string_view type = head.of_bytes ? kBytes : kJson;
  if (head.has_body && !is_type(head.content_type, type)) {
    return HeadRefusal{415, ErrorCode::kInvalid,
                       fmt::format("{}: send 'Content-Type: {}', not '{}'",
                                   head.of_bytes ? "this body is bytes" : "a body must be JSON",
                                   type, printable(head.content_type))};
  }
  return std::nullopt;
}

}  // namespace phub

// On which addresses a server carries data.
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>

#include "transport/error.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/transport.h"
#include "transport/text.h"

namespace phub {
namespace {

std::string number_of(const sockaddr* address) {
  TcpAddress copy;
  copy.size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::memcpy(&copy.storage, address, copy.size);
  return parse_host_port(to_string(copy)).host;
}

// It is of no use without the name of the worker's interface.
bool is_link_local(const sockaddr* address) {
  if (address->sa_family != AF_INET6) return false;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// One address of each interface, so that each gets an equal share of the traffic.
std::vector<std::string> of_interfaces(bool ipv4_only) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) fail_system("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  std::vector<std::string> names;  // in the kernel's order
  std::map<std::string, std::string> v4, v6, loopback;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    const unsigned needed = IFF_UP | IFF_RUNNING;
    if (at->ifa_addr == nullptr || (at->ifa_flags & needed) != needed) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && (family != AF_INET6 || ipv4_only)) continue;
    if (is_link_local(at->ifa_addr)) continue;
    if (std::find(names.begin(), names.end(), at->ifa_name) == names.end()) {
      names.emplace_back(at->ifa_name);
    }
    auto& of_kind = (at->ifa_flags & IFF_LOOPBACK) ? loopback : family == AF_INET ? v4 : v6;
    of_kind.emplace(at->ifa_name, number_of(at->ifa_addr));
  }
  std::vector<std::string> addresses;
  for (const std::string& name : names) {
    if (v4.contains(name)) {
      addresses.push_back(v4[name]);
    } else if (v6.contains(name)) {
      addresses.push_back(v6[name]);
    }
  }
  if (addresses.empty() && !loopback.empty()) addresses.push_back(loopback.begin()->second);
  if (addresses.empty()) {
    fail(ErrorCode::kInvalid, "no network interface is up; name an address to listen at");
  }
  return addresses;
}

std::string resolve(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    fail(ErrorCode::kInvalid, "'{}' is not an address of this machine: {}", printable(host),
         gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    if (!is_link_local(at->ai_addr)) return number_of(at->ai_addr);
  }
  fail(ErrorCode::kInvalid,
       "'{}' is a link-local address, to which a worker cannot connect without the name of its own "
       "interface; name another address of this machine with --listen",
       printable(host));
}

}  // namespace

bool is_every_address(const std::string& host) {
  return host.empty() || host == "*" || host == "::" || host == "0.0.0.0";
}

std::vector<std::string> tcp_data_addresses(const std::vector<std::string>& hosts) {
  std::vector<std::string> all;
  for (const std::string& host : hosts) {
    const std::vector<std::string> found =
        is_every_address(host) ? of_interfaces(host == "0.0.0.0") : std::vector{resolve(host)};
    for (const std::string& address : found) {
      if (std::find(all.begin(), all.end(), address) == all.end()) all.push_back(address);
    }
  }
  return all;
}

}  // namespace phub

// On which addresses a server carries data.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string_view>

#include "transport/error.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/transport.h"
#include "transport/text.h"

namespace phub {
namespace {

namespace fs = std::filesystem;

// An address of this machine.
struct Own {
  std::string interface;
  std::string number;
  int family = 0;
  bool loopback = false;
};

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

// The IPv6 addresses that go away, or that nobody can listen at yet: 32 hexadecimal digits each.
std::vector<std::string> passing_ipv6() {
  constexpr unsigned kTemporary = 0x01, kDuplicate = 0x08, kDeprecated = 0x20, kTentative = 0x40;
  std::vector<std::string> passing;
  std::ifstream file("/proc/net/if_inet6");
  std::string digits, index, prefix, scope, flags, name;
  while (file >> digits >> index >> prefix >> scope >> flags >> name) {
    const unsigned long bits = std::strtoul(flags.c_str(), nullptr, 16);
    if (bits & (kTemporary | kDuplicate | kDeprecated | kTentative)) passing.push_back(digits);
  }
  return passing;
}

bool passes(const sockaddr* address, const std::vector<std::string>& passing) {
  if (address->sa_family != AF_INET6) return false;
  std::string digits;
  for (const uint8_t byte : reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr.s6_addr) {
    fmt::format_to(std::back_inserter(digits), "{:02x}", byte);
  }
  return std::ranges::count(passing, digits) > 0;
}

// Of every interface that is up, in the kernel's order. Link-local ones are left out.
std::vector<Own> own_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) fail_system("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  const std::vector<std::string> passing = passing_ipv6();
  std::vector<Own> all;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    const unsigned needed = IFF_UP | IFF_RUNNING;
    if (at->ifa_addr == nullptr || (at->ifa_flags & needed) != needed) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (is_link_local(at->ifa_addr) || passes(at->ifa_addr, passing)) continue;
    const std::string name = at->ifa_name;  // "eth0:1" is a label of eth0's
    all.push_back({name.substr(0, name.find(':')), number_of(at->ifa_addr), family,
                   (at->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return all;
}

// Whether a network card, real or of a virtual machine, is the interface or below it: as a bridge's
// port, a VLAN's or bond's device, and so on.
bool has_card(const fs::path& interface, int depth = 0) {
  constexpr int kDeepest = 8;
  std::error_code none;
  if (fs::exists(interface / "device", none)) return true;
  if (depth == kDeepest) return false;
  for (const auto& entry : fs::directory_iterator(interface, none)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("lower_") && has_card(entry.path(), depth + 1)) return true;
  }
  return false;
}

// Whether the interface leads to containers and virtual machines of this host alone: a bridge
// without a card, or this host's end of a container's wire. Other hosts have such bridges with the
// same addresses.
bool leads_inside(const std::string& name) {
  const auto begins_with = [&name](const auto& prefixes) {
    return std::ranges::any_of(prefixes, [&](const char* one) { return name.starts_with(one); });
  };
  constexpr std::array kWires = {"veth", "cali", "lxc", "ve-", "vb-", "vnet", "kube-ipvs"};
  constexpr std::array kBridges = {"docker", "br-", "cni", "virbr", "lxdbr", "podman", "weave"};
  const fs::path interface = "/sys/class/net/" + name;
  std::error_code none;
  if (!fs::exists(interface, none)) return begins_with(kWires) || begins_with(kBridges);
  const bool is_inner_kind = fs::exists(interface / "bridge", none) || begins_with(kWires);
  return is_inner_kind && !has_card(interface);
}

// The addresses of each interface are one NIC, IPv4 first. Loopback, and what leads inside of this
// host, count only where there is nothing else.
std::vector<TcpNic> of_interfaces(bool ipv4_only) {
  std::vector<Own> found = own_addresses();
  if (ipv4_only) std::erase_if(found, [](const Own& own) { return own.family != AF_INET; });
  const auto erase_unless_all = [&found](const auto& unwanted) {
    if (!std::ranges::all_of(found, unwanted)) std::erase_if(found, unwanted);
  };
  erase_unless_all([](const Own& own) { return own.loopback; });
  erase_unless_all([](const Own& own) { return leads_inside(own.interface); });
  if (found.empty()) {
    fail(ErrorCode::kInvalid, "no network interface is up; name an address to listen at");
  }
  std::vector<std::string> interfaces;
  std::vector<TcpNic> nics;
  for (const Own& own : found) {
    if (std::ranges::count(interfaces, own.interface) > 0) continue;
    interfaces.push_back(own.interface);
    TcpNic& nic = nics.emplace_back();
    for (const int family : {AF_INET, AF_INET6}) {
      for (const Own& of : found) {
        if (of.interface == own.interface && of.family == family) nic.push_back(of.number);
      }
    }
  }
  return nics;
}

// The addresses of a name, without those of other machines if it has any of this one.
std::vector<std::string> resolve(const std::string& host, const std::vector<Own>& own) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    fail(ErrorCode::kInvalid, "'{}' is not an address of this machine: {}", printable(host),
         gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  std::vector<std::string> numbers;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    if (!is_link_local(at->ai_addr)) numbers.push_back(number_of(at->ai_addr));
  }
  if (numbers.empty()) {
    fail(ErrorCode::kInvalid,
         "'{}' is a link-local address, to which a worker cannot connect without the name of its "
         "own interface; name another address of this machine with --listen",
         printable(host));
  }
  const auto is_foreign = [&own](const std::string& number) {
    return std::ranges::count(own, number, &Own::number) == 0;
  };
  if (!std::ranges::all_of(numbers, is_foreign)) std::erase_if(numbers, is_foreign);
  return numbers;
}

// An address that was named is a NIC of its own, unless a NIC of the same interface has none of its
// family yet.
void add_named(const std::string& number, const std::vector<Own>& all, std::vector<TcpNic>& nics) {
  const auto own_of = [&all](const std::string& of) {
    const auto found = std::ranges::find(all, of, &Own::number);
    return found == all.end() ? Own() : *found;
  };
  const Own own = own_of(number);
  const auto takes = [&](const TcpNic& nic) {
    return !own.interface.empty() && std::ranges::all_of(nic, [&](const std::string& other) {
      const Own there = own_of(other);
      return there.interface == own.interface && there.family != own.family;
    });
  };
  const auto nic = std::ranges::find_if(nics, takes);
  nic == nics.end() ? nics.push_back({number}) : nic->push_back(number);
}

}  // namespace

// "0", "0.0.0.0" and "::0" are as getaddrinfo() reads them.
bool is_every_address(const std::string& host) {
  in_addr four{};
  in6_addr six{};
  if (host.empty() || host == "*") return true;
  if (inet_aton(host.c_str(), &four) != 0) return four.s_addr == INADDR_ANY;
  return inet_pton(AF_INET6, host.c_str(), &six) == 1 && IN6_IS_ADDR_UNSPECIFIED(&six);
}

std::vector<TcpNic> tcp_nics(const std::vector<std::string>& hosts) {
  std::vector<TcpNic> nics;
  const auto is_there = [&nics](const std::string& number) {
    return std::ranges::any_of(
        nics, [&](const TcpNic& nic) { return std::ranges::count(nic, number) > 0; });
  };
  const std::vector<Own> own = own_addresses();
  for (const std::string& host : hosts) {
    if (is_every_address(host)) {
      const bool ipv4_only = host.starts_with('0');
      for (TcpNic& nic : of_interfaces(ipv4_only)) {
        std::erase_if(nic, is_there);
        if (!nic.empty()) nics.push_back(std::move(nic));
      }
      continue;
    }
    for (const std::string& number : resolve(host, own)) {
      if (!is_there(number)) add_named(number, own, nics);
    }
  }
  return nics;
}

std::vector<std::string> tcp_data_addresses(const std::vector<std::string>& hosts) {
  std::vector<std::string> first;
  for (const TcpNic& nic : tcp_nics(hosts)) first.push_back(nic.front());
  return first;
}

}  // namespace phub

// `phub doctor`: gathers the facts from /sys, /proc, /dev, and system calls.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>

#include "phub/commands/doctor.h"
#include "transport/ofi/library.h"
#include "transport/text.h"

namespace phub {
namespace {

namespace fs = std::filesystem;

template <typename T>
std::optional<T> number(std::string_view text, int base = 10) {
  T value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

template <typename T>
T number_in(const std::string& path, T otherwise) {
  return number<T>(first_line(path)).value_or(otherwise);
}

std::vector<std::string> words_of(const std::string& path) {
  std::istringstream line(first_line(path));
  std::vector<std::string> words;
  for (std::string word; line >> word;) words.push_back(word);
  return words;
}

// "always [madvise] never": the word in brackets.
std::string chosen_in(const std::string& path) {
  for (const std::string& word : words_of(path)) {
    if (word.size() > 2 && word.front() == '[') return word.substr(1, word.size() - 2);
  }
  return "";
}

// "0-3,8" as the kernel writes lists of CPUs.
std::vector<uint32_t> cpu_list(std::string_view text) {
  constexpr uint32_t kMostCpus = 1u << 16;
  std::vector<uint32_t> cpus;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(part.size() + 1, text.size()));
    const auto first = number<uint32_t>(part);
    if (!first) continue;
    const size_t dash = part.find('-');
    const auto last = dash == part.npos ? first : number<uint32_t>(part.substr(dash + 1));
    for (uint32_t cpu = *first; cpu <= std::min(last.value_or(*first), kMostCpus); cpu++) {
      cpus.push_back(cpu);
    }
  }
  return cpus;
}

// Names in a folder, sorted; none if it is not there.
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    names.push_back(at->path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// The NUMA node of a network device: its own or, for virtio, that of its PCI device. The kernel's
// -1 means that it is unknown.
std::optional<uint32_t> node_below(const std::string& folder) {
  for (const char* path : {"/device/numa_node", "/device/../numa_node"}) {
    const int node = number_in(folder + path, -1);
    if (node >= 0) return static_cast<uint32_t>(node);
  }
  return std::nullopt;
}

// "10.77.0.0/24" for 10.77.0.1 and 24 bits; "" if it is not an IPv4 address.
std::string subnet_of(const InterfaceAddress& at) {
  in_addr address = {};
  if (inet_pton(AF_INET, at.address.c_str(), &address) != 1) return "";
  const uint32_t bits = std::min(at.prefix_bits, 32u);
  const uint32_t mask = bits == 0 ? 0 : ~uint32_t{0} << (32 - bits);
  address.s_addr = htonl(ntohl(address.s_addr) & mask);
  char text[INET_ADDRSTRLEN] = {};
  inet_ntop(AF_INET, &address, text, sizeof text);
  return fmt::format("{}/{}", text, bits);
}

NicFacts nic_of(const FactSources& sources, const std::string& name) {
  const std::string folder = sources.root + "/sys/class/net/" + name;
  const std::string conf = sources.root + "/proc/sys/net/ipv4/conf/";
  const auto setting = [&](const char* what) {
    return std::max(number_in(conf + "all/" + what, 0), number_in(conf + name + "/" + what, 0));
  };
  NicFacts nic;
  nic.name = name;
  nic.hardware = exists(folder + "/device");
  const int type = number_in(folder + "/type", 0);
  nic.arp = type == ARPHRD_ETHER || type == ARPHRD_INFINIBAND;
  nic.bridge = exists(folder + "/bridge");
  // The carrier cannot be read of an interface that is down.
  nic.up = number_in(folder + "/carrier", 0) == 1;
  nic.mtu = number_in(folder + "/mtu", 0u);
  nic.os_node = node_below(folder);
  nic.arp_ignore = setting("arp_ignore");
  nic.arp_announce = setting("arp_announce");
  nic.rp_filter = setting("rp_filter");
  for (const InterfaceAddress& at : sources.addresses) {
    if (at.name != name) continue;
    nic.has_address = true;
    const std::string subnet = subnet_of(at);
    if (!subnet.empty()) nic.subnets.push_back(subnet);
  }
  return nic;
}

RdmaPortFacts port_of(const FactSources& sources, const VerbsPort& port) {
  const std::string folder = sources.root + "/sys/class/infiniband/" + port.device;
  const std::string parent = first_line(folder + "/parent");  // of soft-RoCE
  RdmaPortFacts facts;
  facts.name = port.name();
  facts.link = port.link;
  facts.netdev = port.netdev;
  facts.address = port.address;
  facts.gid = port.gid;
  facts.gid_index = port.gid_index;
  facts.mtu_bytes = port.mtu_bytes;
  facts.software = !parent.empty();
  facts.no_dma_buf = port.no_dma_buf;
  facts.os_node = node_below(folder);
  if (!facts.os_node && !parent.empty()) {
    facts.os_node = node_below(sources.root + "/sys/class/net/" + parent);
  }
  return facts;
}

void gather_status(const std::string& root, HostFacts& facts) {
  constexpr int kNetAdmin = 12, kIpcLock = 14;  // linux/capability.h
  std::ifstream status(root + "/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::string_view value(line);
    value.remove_prefix(std::min(value.find_first_of(" \t"), value.size()));
    value.remove_prefix(std::min(value.find_first_not_of(" \t"), value.size()));
    if (line.starts_with("Cpus_allowed_list:")) facts.allowed_cpus = cpu_list(value);
    if (line.starts_with("CapEff:")) {
      const uint64_t capabilities = number<uint64_t>(value, 16).value_or(0);
      facts.may_lock = (capabilities >> kIpcLock) & 1;
      facts.may_set_network = (capabilities >> kNetAdmin) & 1;
    }
  }
  std::ifstream memory(root + "/proc/meminfo");
  for (std::string key, unit; memory >> key;) {
    uint64_t value = 0;
    memory >> value;
    std::getline(memory, unit);
    if (key == "MemTotal:") facts.memory_bytes = value * 1024;
  }
}

void gather_nodes(const std::string& root, HostFacts& facts) {
  const std::string folder = root + "/sys/devices/system/node";
  for (const std::string& name : names_in(folder)) {
    if (!name.starts_with("node")) continue;
    const auto os_node = number<uint32_t>(std::string_view(name).substr(4));
    if (!os_node) continue;
    facts.nodes.push_back(
        {*os_node, cpu_list(first_line(fmt::format("{}/{}/cpulist", folder, name)))});
  }
  std::sort(facts.nodes.begin(), facts.nodes.end(),
            [](const NodeFacts& a, const NodeFacts& b) { return a.os_node < b.os_node; });
}

std::optional<uint64_t> limit_of(__rlimit_resource resource, bool hard) {
  rlimit limit = {};
  if (getrlimit(resource, &limit) != 0) return 0;
  const rlim_t value = hard ? limit.rlim_max : limit.rlim_cur;
  return value == RLIM_INFINITY ? std::nullopt : std::optional<uint64_t>(value);
}

// Addresses that workers can connect to: not link-local ones.
std::vector<InterfaceAddress> own_addresses() {
  std::vector<InterfaceAddress> addresses;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return addresses;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr) continue;
    char text[INET6_ADDRSTRLEN] = {};
    uint32_t bits = 0;
    if (at->ifa_addr->sa_family == AF_INET) {
      const auto* address = reinterpret_cast<const sockaddr_in*>(at->ifa_addr);
      inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
      if (at->ifa_netmask != nullptr) {
        const auto* mask = reinterpret_cast<const sockaddr_in*>(at->ifa_netmask);
        bits = static_cast<uint32_t>(std::popcount(mask->sin_addr.s_addr));
      }
    } else if (at->ifa_addr->sa_family == AF_INET6) {
      const auto* address = reinterpret_cast<const sockaddr_in6*>(at->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) continue;
      inet_ntop(AF_INET6, &address->sin6_addr, text, sizeof text);
    } else {
      continue;
    }
    addresses.push_back({at->ifa_name, text, bits});
  }
  return addresses;
}

}  // namespace

FactSources this_host() {
  FactSources sources;
  sources.addresses = own_addresses();
  sources.ports = choose_verbs_ports({}, {}, sources.passed_over);
  sources.no_libfabric = ofi_library_problem();
  sources.providers = find_ofi_providers();
  sources.locked_memory = limit_of(RLIMIT_MEMLOCK, false);
  sources.open_files = limit_of(RLIMIT_NOFILE, true).value_or(UINT64_MAX);
  try {
    sources.topology_notes = numa::this_machine().notes;
  } catch (const std::runtime_error& error) {
    sources.topology_notes = {{error.what(), "without it 'phub serve' needs --topology"}};
  }
  return sources;
}

HostFacts gather_facts(const FactSources& sources) {
  const std::string& root = sources.root;
  HostFacts facts;
  for (const std::string& name : names_in(root + "/sys/class/net")) {
    if (name != "lo" && exists(fmt::format("{}/sys/class/net/{}/mtu", root, name))) {
      facts.nics.push_back(nic_of(sources, name));
    }
  }
  facts.rdma_devices = names_in(root + "/sys/class/infiniband");
  for (const VerbsPort& port : sources.ports) facts.rdma_ports.push_back(port_of(sources, port));
  facts.rdma_problems = sources.passed_over;
  facts.providers = sources.providers;
  facts.no_libfabric = sources.no_libfabric;
  facts.rdma_cm = exists(root + "/dev/infiniband/rdma_cm");
  gather_nodes(root, facts);
  facts.topology_notes = sources.topology_notes;
  gather_status(root, facts);
  facts.container = container_memory(root);
  facts.locked_memory = sources.locked_memory;
  facts.open_files = sources.open_files;
  const std::string pages = root + "/sys/kernel/mm/";
  facts.huge_pages = chosen_in(pages + "transparent_hugepage/enabled");
  facts.shared_huge_pages = chosen_in(pages + "transparent_hugepage/shmem_enabled");
  for (const std::string& size : names_in(pages + "hugepages")) {
    facts.reserved_huge_pages +=
        number_in(fmt::format("{}hugepages/{}/nr_hugepages", pages, size), uint64_t{0});
  }
  const std::string tcp = root + "/proc/sys/net/ipv4/tcp_";
  facts.congestion_control = first_line(tcp + "congestion_control");
  facts.congestion_available = words_of(tcp + "available_congestion_control");
  facts.congestion_allowed = words_of(tcp + "allowed_congestion_control");
  return facts;
}

}  // namespace phub

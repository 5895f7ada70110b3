#include "transport/verbs/devices.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <infiniband/verbs.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <rdma/rdma_cma.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "transport/error.h"
#include "transport/text.h"
#include "transport/verbs/library.h"
#include "transport/verbs/resources.h"

namespace phub {
namespace {

constexpr std::string_view kSysfs = "/sys/class/infiniband";
constexpr int kMaxGids = 1024;

std::string text_of(int family, const void* address) {
  std::array<char, INET6_ADDRSTRLEN> text = {};
  inet_ntop(family, address, text.data(), text.size());
  return text.data();
}

// InfiniBand: the address of the IPoIB interface whose hardware address ends with this GID.
std::string ipoib_address(const ibv_gid& gid, std::string& netdev) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_PACKET) continue;
    // A hardware address of 20 bytes: the queue pair and the GID.
    constexpr size_t kIpoibBytes = 20;
    const auto* link = reinterpret_cast<const sockaddr_ll*>(i->ifa_addr);
    if (link->sll_halen != kIpoibBytes ||
        std::memcmp(link->sll_addr + 4, gid.raw, sizeof gid.raw) != 0) {
      continue;
    }
    netdev = i->ifa_name;
  }
  if (netdev.empty()) return "";
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET || netdev != i->ifa_name)
      continue;
    return text_of(AF_INET, &reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr);
  }
  return "";
}

std::string gid_attribute(const std::string& device, uint8_t port, const char* what, int index) {
  return first_line(
      fmt::format("{}/{}/ports/{}/gid_attrs/{}/{}", kSysfs, device, port, what, index));
}

// One GID as a candidate; nothing if it cannot be connected to, and then why.
std::optional<VerbsPort> candidate(ibv_context* context, uint8_t port, int index, bool infiniband,
                                   std::string& problem) {
  ibv_gid gid = {};
  const ibv_gid none = {};
  if (ibv_query_gid(context, port, index, &gid) != 0 || std::memcmp(&gid, &none, sizeof gid) == 0) {
    problem = fmt::format("GID {} is empty", index);
    return std::nullopt;
  }
  VerbsPort found;
  found.context = context;
  found.device = ibv_get_device_name(context->device);
  found.port = port;
  found.gid_index = index;
  found.gid = text_of(AF_INET6, gid.raw);
  if (infiniband) {
    found.link = "InfiniBand";
    found.address = ipoib_address(gid, found.netdev);
    if (found.address.empty()) {
      problem = "no IPoIB interface with an IPv4 address stands for it; give it one";
      return std::nullopt;
    }
    return found;
  }
  const std::string type = gid_attribute(found.device, port, "types", index);
  found.netdev = gid_attribute(found.device, port, "ndevs", index);
  if (type != "RoCE v2") {
    problem = fmt::format("GID {} is of type '{}', not RoCE v2", index, type);
    return std::nullopt;
  }
  found.link = type;
  const auto* address = reinterpret_cast<const in6_addr*>(gid.raw);
  if (IN6_IS_ADDR_V4MAPPED(address)) {
    found.address = text_of(AF_INET, gid.raw + 12);
  } else if (IN6_IS_ADDR_LINKLOCAL(address)) {
    problem = fmt::format("GID {} is link-local; give {} an IP address", index, found.netdev);
    return std::nullopt;
  } else {
    found.address = found.gid;
  }
  return found;
}

std::string_view name_of(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return "down";
    case IBV_PORT_INIT:
      return "initializing (InfiniBand: is a subnet manager running?)";
    case IBV_PORT_ARMED:
      return "armed";
    case IBV_PORT_ACTIVE:
      return "active";
    default:
      return "unknown";
  }
}

uint32_t mtu_bytes(ibv_mtu mtu) { return 128u << static_cast<uint32_t>(mtu); }

// The port with its best GID; nothing if it has none, and then why.
std::optional<VerbsPort> best_of(ibv_context* context, uint8_t port, std::optional<int> gid_index,
                                 std::span<const std::string> listen, std::string& problem) {
  ibv_port_attr attributes = {};
  if (const int error = ibv_query_port(context, port, &attributes); error != 0) {
    problem = fmt::format("ibv_query_port: {}", std::strerror(error));
    return std::nullopt;
  }
  if (attributes.state != IBV_PORT_ACTIVE) {
    problem = fmt::format("is {}", name_of(attributes.state));
    return std::nullopt;
  }
  const bool infiniband = attributes.link_layer == IBV_LINK_LAYER_INFINIBAND;
  if (gid_index && (*gid_index < 0 || *gid_index >= attributes.gid_tbl_len)) {
    problem =
        fmt::format("has no GID {}: its table has {} entries", *gid_index, attributes.gid_tbl_len);
    return std::nullopt;
  }
  std::optional<VerbsPort> best;
  int best_rank = -1;
  problem = "has no GID";
  const int end = std::min(attributes.gid_tbl_len, kMaxGids);
  for (int index = gid_index.value_or(0); index < (gid_index ? *gid_index + 1 : end); ++index) {
    std::string why_not;
    std::optional<VerbsPort> found = candidate(context, port, index, infiniband, why_not);
    if (!found) {
      if (why_not.find("is empty") == why_not.npos || gid_index) problem = why_not;
      continue;
    }
    const bool listened = std::find(listen.begin(), listen.end(), found->address) != listen.end();
    const bool v4 = found->address.find(':') == std::string::npos;
    const int rank = (listened ? 2 : 0) + (v4 ? 1 : 0);
    if (rank <= best_rank) continue;
    best_rank = rank;
    found->why = gid_index    ? "as given"
                 : listened   ? "the address that is listened on"
                 : infiniband ? "active, its IPoIB address"
                              : fmt::format("active, RoCE v2 over {}", v4 ? "IPv4" : "IPv6");
    best = std::move(found);
  }
  if (!best) return std::nullopt;
  best->mtu_bytes = mtu_bytes(attributes.active_mtu);
  best->os_node = numa_node_of(best->device);
  best->no_dma_buf = dma_buf_problem(context);
  return best;
}

// Every context of librdmacm, in the order of their names.
std::vector<ibv_context*> contexts() {
  static const std::vector<ibv_context*> all = [] {
    std::vector<ibv_context*> found;
    prepare_verbs();
    // Kept for the life of the process: without it librdmacm closes contexts that nobody uses.
    static int count = 0;
    static ibv_context** const list = rdma_get_devices(&count);
    if (list == nullptr) return found;
    found.assign(list, list + count);
    std::sort(found.begin(), found.end(), [](ibv_context* a, ibv_context* b) {
      return std::string_view(ibv_get_device_name(a->device)) <
             std::string_view(ibv_get_device_name(b->device));
    });
    return found;
  }();
  return all;
}

uint8_t ports_of(ibv_context* context) {
  ibv_device_attr attributes = {};
  return ibv_query_device(context, &attributes) == 0 ? attributes.phys_port_cnt : 0;
}

void add_choice(const VerbsChoice& choice, std::span<const std::string> listen,
                std::vector<VerbsPort>& ports) {
  std::vector<std::string_view> names;
  for (ibv_context* context : contexts()) {
    names.emplace_back(ibv_get_device_name(context->device));
    if (names.back() != choice.device) continue;
    const uint8_t count = ports_of(context);
    if (choice.port && (*choice.port == 0 || *choice.port > count)) {
      fail(ErrorCode::kInvalid, "RDMA device {} has no port {}: it has {}", choice.device,
           *choice.port, count);
    }
    bool any = false;
    std::string problem = "it has no ports";
    for (uint8_t port = choice.port.value_or(1); port <= choice.port.value_or(count); ++port) {
      std::string why_not;
      if (auto found = best_of(context, port, choice.gid_index, listen, why_not)) {
        if (!choice.gid_index) found->why = "as given; " + found->why;
        ports.push_back(*std::move(found));
        any = true;
      } else {
        problem = fmt::format("port {} {}", port, why_not);
      }
    }
    if (!any) fail(ErrorCode::kInvalid, "RDMA device {}: {}", choice.device, problem);
    return;
  }
  fail(ErrorCode::kInvalid, "there is no RDMA device '{}'; there {}", printable(choice.device),
       names.empty()
           ? std::string("are none (ibv_devices lists them)")
           : fmt::format("{} {}", names.size() == 1 ? "is" : "are", fmt::join(names, ", ")));
}

}  // namespace

std::vector<VerbsPort> choose_verbs_ports(std::span<const VerbsChoice> choices,
                                          std::span<const std::string> listen,
                                          std::vector<VerbsFinding>& passed_over) {
  std::vector<VerbsPort> ports;
  if (choices.empty() && !verbs_library_problem().empty()) return ports;
  for (const VerbsChoice& choice : choices) add_choice(choice, listen, ports);
  if (!choices.empty()) return ports;
  for (ibv_context* context : contexts()) {
    const std::string device = ibv_get_device_name(context->device);
    for (uint8_t port = 1; port <= ports_of(context); ++port) {
      std::string problem;
      if (auto found = best_of(context, port, std::nullopt, listen, problem)) {
        ports.push_back(*std::move(found));
      } else {
        passed_over.push_back({device, port, problem});
      }
    }
  }
  return ports;
}

}  // namespace phub

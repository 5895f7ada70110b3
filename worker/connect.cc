#include "worker/connect.h"

#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "transport/control_client.h"
#include "transport/error.h"
#include "transport/name_lookup.h"
#include "transport/shm_nic.h"
#include "transport/tcp_nic.h"
#include "transport/text.h"
#include "transport/verbs_nic.h"

namespace phub {
namespace {

bool same_host(const sockaddr_storage& a, const sockaddr& b) {
  if (a.ss_family != b.sa_family) return false;
  if (a.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return a.ss_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

// Whether one of the server's addresses is an interface of this host.
bool is_on_this_host(const std::string& server, uint32_t timeout_ms) {
  auto found = look_up(parse_host_port(server).host);
  if (found.wait_for(std::chrono::milliseconds(timeout_ms)) != std::future_status::ready) {
    fail(ErrorCode::kTimeout, "timeout while looking up the name of the phub server at {}", server);
  }
  const FoundAddresses addresses = found.get();
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return false;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> interfaces(list, freeifaddrs);
  for (const sockaddr_storage& address : addresses.addresses) {
    for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
      if (i->ifa_addr != nullptr && same_host(address, *i->ifa_addr)) return true;
    }
  }
  return false;
}

bool has_usable_rdma() {
  std::vector<VerbsFinding> passed_over;
  return !choose_verbs_ports({}, {}, passed_over).empty();
}

}  // namespace

std::string choose_transport(const std::string& word, const std::string& server,
                             uint32_t timeout_ms) {
  if (word != "auto") return word;
  timeout_ms = std::max(timeout_ms, 1u);  // 0 would be no limit
  if (is_on_this_host(server, timeout_ms)) return "shm";
  const ServerStatus status = ControlClient(server).status(timeout_ms);
  const auto offers = [&](const char* name) {
    return std::find(status.transports.begin(), status.transports.end(), name) !=
           status.transports.end();
  };
  return offers("verbs") && has_usable_rdma() ? "verbs" : "tcp";
}

std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout,
                                    uint32_t timeout_ms) {
  if (offer.transport == "shm") return connect_shm(offer, layout, timeout_ms);
  if (offer.transport == "tcp") return connect_tcp(offer, layout, timeout_ms);
  if (offer.transport == "verbs") return connect_verbs(offer, layout, timeout_ms);
  fail(ErrorCode::kInvalid, "transport '{}' is not in this library; there are shm, tcp, verbs",
       printable(offer.transport));
}

}  // namespace phub

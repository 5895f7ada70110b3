#include "worker/link/connect.h"

#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "transport/beside/transport.h"
#include "transport/control/control_client.h"
#include "transport/control/name_lookup.h"
#include "transport/control/server_address.h"
#include "transport/error.h"
#include "transport/network/connect.h"
#include "transport/paced/transport.h"
#include "transport/shm/transport.h"
#include "transport/tcp/transport.h"
#include "transport/text.h"
#include "worker/memory/memory_device.h"

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
  auto found = look_up(parse_server_address(server).host);
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

// For a token that may see its own job only.
std::string transport_of_job(ControlClient& client, const std::string& job, bool here,
                             uint32_t timeout_ms) {
  try {
    return client.job_status(job, timeout_ms).transport;
  } catch (const Error& error) {
    if (!here || error.code() != ErrorCode::kNotFound) throw;
    return "shm";  // it does not exist yet
  }
}

std::string choose_for_auto(const WorkerOptions& options, const std::string& server) {
  const uint32_t timeout_ms = std::max(options.connect_timeout_ms, 1u);  // 0 would be no limit
  const bool here = is_on_this_host(server, timeout_ms);
  ControlClient client(server, options.token, options.tls);
  ServerStatus status;
  try {
    status = client.status(timeout_ms);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnauthorized) throw;
    return transport_of_job(client, options.spec.name, here, timeout_ms);
  }
  const auto job = std::ranges::find(status.jobs, options.spec.name, &JobStatus::name);
  if (job != status.jobs.end() && (here || job->transport != "shm")) return job->transport;
  const bool serves_shm = std::ranges::count(status.transports, "shm") > 0;
  const bool may_share = options.memory_device == nullptr && status.shards.empty();
  if (here && may_share && serves_shm) return "shm";
  return choose_network(status.transports);
}

std::unique_ptr<WorkerLink> connect_unpaced(const WorkerOptions& options, const std::string& server,
                                            const std::string& reached, const Offer& offer,
                                            const LinkLayout& layout) {
  const uint32_t timeout_ms = options.connect_timeout_ms;
  if (options.memory_device) check_reaches(offer.transport, *options.memory_device);
  if (offer.transport == "shm") return connect_shm(offer, layout, timeout_ms);
  if (offer.transport == "tcp") {
    return connect_tcp(
        offer, layout, timeout_ms,
        {.host = parse_server_address(server).host, .tls = options.tls, .reached = reached},
        options.transport == "auto");
  }
  if (is_network(offer.transport)) {
    const auto network = [&](const Offer& part, const LinkLayout& of,
                             std::unique_ptr<LinkArrays> arrays) {
      return connect_network(part.transport, part, of, timeout_ms, std::move(arrays));
    };
    MemoryDevice* const device = options.memory_device;
    if (options.transport == "auto" && device == nullptr) {
      return connect_beside(offer, layout, timeout_ms, network);
    }
    return network(offer, layout, arrays_on(device, layout));
  }
  fail(ErrorCode::kInvalid, "transport '{}' is not in this library; there are shm, tcp, verbs, ofi",
       printable(offer.transport));
}

}  // namespace

std::string choose_transport(const WorkerOptions& options, const std::string& server) {
  if (options.transport != "auto") return options.transport;
  std::string chosen = choose_for_auto(options, server);
  if (options.memory_device) check_reaches(chosen, *options.memory_device);
  return chosen;
}

std::unique_ptr<WorkerLink> connect(const WorkerOptions& options, const std::string& server,
                                    const std::string& reached, const Offer& offer,
                                    const LinkLayout& layout) {
  auto link = connect_unpaced(options, server, reached, offer, layout);
  if (options.nic_budget.empty()) return link;
  if (offer.transport == "shm") {
    fmt::print(stderr, "phub: over shared memory nothing is sent: nic_budget {} has no effect\n",
               options.nic_budget);
    return link;
  }
  const auto queues = static_cast<uint32_t>(offer.queues.size());
  return make_paced(std::move(link), queues, {.bytes_per_s = parse_rate(options.nic_budget)});
}

}  // namespace phub

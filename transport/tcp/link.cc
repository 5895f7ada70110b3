// The worker's side: opens its connections, all at once, and shows its ticket on each.
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <set>

#include "transport/box_memory.h"
#include "transport/error.h"
#include "transport/fd.h"
#include "transport/tcp/dialing.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/format.h"
#include "transport/tcp/near.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/transport.h"
#include "transport/text.h"
#include "transport/tls/client.h"
#include "transport/worker_memory.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

uint32_t present_node() {
  unsigned cpu = 0, node = 0;
  return getcpu(&cpu, &node) == 0 ? node : 0;
}

// The interface that has this address, of which it may have several; if none has it, the address.
std::string interface_of(const TcpAddress& address) {
  std::string host = parse_host_port(to_string(address)).host;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return host;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr) continue;
    TcpAddress copy;
    if (at->ifa_addr->sa_family == AF_INET) copy.size = sizeof(sockaddr_in);
    if (at->ifa_addr->sa_family == AF_INET6) copy.size = sizeof(sockaddr_in6);
    if (copy.size == 0) continue;
    std::memcpy(&copy.storage, at->ifa_addr, copy.size);
    const std::string name = at->ifa_name;  // "eth0:1" is a label of eth0's
    if (parse_host_port(to_string(copy)).host == host) return name.substr(0, name.find(':'));
  }
  return host;
}

class TcpWorkerLink final : public WorkerLink {
 public:
  // `near`: a box on this host is to map the memory.
  TcpWorkerLink(const LinkLayout& layout, uint32_t timeout_ms, TcpTrust trust, bool near);
  ~TcpWorkerLink() override;

  std::span<std::byte> gradients() override {
    return near_ ? shared_gradients_.bytes() : gradients_.bytes();
  }
  std::span<const std::byte> results() override { return results_.readable(); }
  std::span<std::byte> writable_results() override { return results_.writable(); }
  InPlace* in_place() override { return &in_place_; }
  Endpoint& endpoint() override { return *endpoints_.front(); }
  Endpoint& endpoint_of(uint32_t thread) override {
    PHUB_CHECK(thread < endpoints_.size());
    return *endpoints_[thread];
  }
  bool connected() override;
  bool zero_copy() const override { return false; }
  bool needs_polling() const override { return true; }
  std::string describe() const override;
  std::string nic_of(uint32_t queue) const override;
  void reconnect(const Offer& offer) override;
  bool can_reconnect() const override { return true; }

 private:
  void disconnect();
  TcpEndpoint& endpoint_of_queue(uint32_t queue) { return *endpoints_[layout_.thread_of(queue)]; }
  TlsContext context_of(const Offer& offer);

  const LinkLayout layout_;
  const uint32_t timeout_ms_;
  const TcpTrust trust_;
  const bool near_;
  TlsContext context_;             // the latest; null: plain connections
  SealedMemory shared_gradients_;  // one of the two
  numa::Memory gradients_;
  ResultMemory results_;
  TcpPeerMemory peer_;               // of near connections
  std::set<std::string> unreached_;  // addresses of the box that this host did not reach
  InPlace in_place_;
  std::vector<std::unique_ptr<TcpEndpoint>> endpoints_;  // by thread
  std::vector<std::vector<Write>> rings_;                // by queue

  mutable std::mutex mutex_;  // guards what follows: connected() is called from any thread
  std::vector<TcpWelcomed> connections_;  // by queue; empty: not connected
  std::vector<ClosedOnFork> not_in_children_;
  std::vector<pollfd> ends_;  // the same, for poll()
};

TcpWorkerLink::TcpWorkerLink(const LinkLayout& layout, uint32_t timeout_ms, TcpTrust trust,
                             bool near)
    : layout_(layout),
      timeout_ms_(timeout_ms),
      trust_(std::move(trust)),
      near_(near),
      results_(layout.results_at_worker(), present_node(), near) {
  const uint64_t bytes = layout.gradients_at_worker();
  if (near) {
    shared_gradients_ =
        SealedMemory::create("phub-gradients", bytes, MemoryAccess::kReadWrite, false);
    numa::prefer_node(shared_gradients_.bytes(), present_node());
    peer_.shown = shared_gradients_.bytes();
  } else {
    gradients_ = allocate(bytes, present_node(), "memory for gradients");
  }
  const auto queues = static_cast<uint32_t>(layout.queue_chunks.size());
  for (uint32_t thread = 0; thread < layout.threads; ++thread) {
    endpoints_.push_back(std::make_unique<TcpEndpoint>(queues, 1, layout.threads));
  }
  for (const uint32_t chunks : layout.queue_chunks) rings_.emplace_back(tcp_ring_entries(chunks));
}

TcpWorkerLink::~TcpWorkerLink() {
  shared_gradients_.close_fd();  // what is buried is kept for long
  if (near_) bury(std::move(shared_gradients_));
  if (!near_) bury(std::move(gradients_));
  results_.bury();
}

// Files are read for each connection; those that are wrong do not replace the ones before: somebody
// may just be changing them.
TlsContext TcpWorkerLink::context_of(const Offer& offer) {
  if (!offer.tls) {
    if (!context_) return nullptr;
    fail(ErrorCode::kUnauthorized, "the server offers connections without TLS, and had TLS before");
  }
  if (trust_.host.empty()) {
    fail(ErrorCode::kInvalid, "the offer asks for TLS, and no name of a server was given");
  }
  try {
    TlsContext fresh = make_client_context(trust_.tls);
    prepare_for_data(fresh.get());
    context_ = std::move(fresh);
  } catch (const Error&) {
    if (!context_) throw;
  }
  return context_;
}

void TcpWorkerLink::reconnect(const Offer& offer) {
  disconnect();
  const std::array<int, TcpNearMemory::kDescriptors> memory = {shared_gradients_.fd().get(),
                                                               results_.fd().get()};
  std::vector<TcpWelcomed> connections =
      dial_tcp(offer, layout_,
               {.context = context_of(offer),
                .server = trust_.host,
                .memory = std::span(memory).first(near_ ? memory.size() : 0),
                .deadline = Clock::now() + std::chrono::milliseconds(timeout_ms_),
                .reached = trust_.reached,
                .unreached = &unreached_});
  for (uint32_t q = 0; q < connections.size(); ++q) {
    if (!connections[q].socket) continue;
    endpoint_of_queue(q).watch(connections[q].socket.get(), {q});
  }
  for (uint32_t q = 0; q < connections.size(); ++q) {
    if (!connections[q].socket) continue;
    TcpEndpoint& endpoint = endpoint_of_queue(q);
    endpoint.list({q});
    const int socket = connections[q].socket.get();
    endpoint.open({q},
                  {.stream = {socket, connections[q].tls.get(), is_near(socket) ? &peer_ : nullptr,
                              !is_near(socket) && is_local(socket)},
                   .ring = rings_[q],
                   .source = gradients(),
                   .target = results_.writable(),
                   .in_place = &in_place_});
  }
  const std::lock_guard lock(mutex_);
  connections_ = std::move(connections);
  for (const auto& [socket, tls] : connections_) {
    if (!socket) continue;
    ends_.push_back({socket.get(), POLLRDHUP, 0});
    not_in_children_.emplace_back(socket.get());
  }
}

void TcpWorkerLink::disconnect() {
  for (uint32_t q = 0; q < connections_.size(); ++q) {
    if (connections_[q].socket) endpoint_of_queue(q).close({q});
  }
  const std::lock_guard lock(mutex_);
  not_in_children_.clear();
  connections_.clear();
  ends_.clear();
}

std::string TcpWorkerLink::describe() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> ends;
  size_t near = 0;
  for (const auto& [socket, tls] : connections_) {
    if (!socket) continue;
    if (is_near(socket.get())) {
      ++near;
      continue;
    }
    std::string end = fmt::format("{} to {}", to_string(local_address(socket.get())),
                                  to_string(peer_address(socket.get())));
    ends.push_back(std::move(end));
  }
  const std::string over_memory =
      near == 0 ? "" : fmt::format("{} over memory of this host; ", near);
  return fmt::format("{}{} connections{}: {}", over_memory, ends.size(),
                     context_ ? " with TLS" : "", fmt::join(ends, ", "));
}

std::string TcpWorkerLink::nic_of(uint32_t queue) const {
  const std::lock_guard lock(mutex_);
  const bool has_none = connections_.empty() || !connections_[queue].socket ||
                        is_near(connections_[queue].socket.get());
  return has_none ? "" : interface_of(local_address(connections_[queue].socket.get()));
}

bool TcpWorkerLink::connected() {
  const std::lock_guard lock(mutex_);
  return !ends_.empty() && ::poll(ends_.data(), ends_.size(), 0) == 0;
}

}  // namespace

std::unique_ptr<WorkerLink> connect_tcp(const Offer& offer, const LinkLayout& layout,
                                        uint32_t timeout_ms, TcpTrust trust, bool near) {
  const bool reaches = near && std::ranges::any_of(offer.queues, [](const QueueOffer& queue) {
                         return static_cast<bool>(connect_near(queue.near));
                       });
  auto link = std::make_unique<TcpWorkerLink>(layout, timeout_ms, std::move(trust), reaches);
  link->reconnect(offer);
  return link;
}

}  // namespace phub

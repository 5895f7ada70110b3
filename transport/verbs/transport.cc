#include "transport/verbs/transport.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/text.h"
#include "transport/verbs/box.h"

namespace phub {
namespace {

constexpr int kBacklog = 1024;
constexpr int kEventsAtOnce = 256;  // a flood of requests holds up the control thread no longer

std::string describe_peer(rdma_cm_id* id) {
  const sockaddr* address = rdma_get_peer_addr(id);
  const bool v6 = address->sa_family == AF_INET6;
  std::array<char, NI_MAXHOST> host = {};
  if (getnameinfo(address, v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in), host.data(),
                  host.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "from an unknown address";
  }
  return fmt::format("from {}", host.data());
}

class VerbsTransport final : public Transport {
 public:
  explicit VerbsTransport(const VerbsOptions& options);
  ~VerbsTransport() override { PHUB_CHECK(registry_.admissions.links.empty()); }

  std::string_view name() const override { return "verbs"; }
  std::string describe() const override;
  std::vector<NicPort> ports() const override;
  Windows windows() const override { return Windows::kShared; }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    return open_job_in(std::make_shared<const BoxMemory>(layout, "verbs"), layout);
  }
  std::unique_ptr<BoxLink> open_job_in(std::shared_ptr<const BoxMemory> memory,
                                       const LinkLayout& layout) override {
    return std::make_unique<VerbsBoxLink>(registry_, std::move(memory), layout);
  }
  int event_fd() const override { return registry_.admissions.epoll.get(); }
  void handle_events(std::vector<TransportEvent>& out) override;

 private:
  void listen(const VerbsPort& port, uint16_t number);
  void forget_dead_devices();
  void handle(rdma_cm_event_type type, rdma_cm_id* id, std::vector<TransportEvent>& out);
  void device_removed(rdma_cm_id* id, std::vector<TransportEvent>& out);
  void answer(rdma_cm_id* id, std::span<const std::byte> private_data,
              std::vector<TransportEvent>& out);

  VerbsRegistry registry_;
  std::vector<ibv_context*> contexts_;
};

VerbsTransport::VerbsTransport(const VerbsOptions& options) {
  PHUB_CHECK(!options.ports.empty());
  registry_.most_cqe = options.most_cqe;
  prepare_verbs();
  registry_.events.reset(rdma_create_event_channel());
  if (registry_.events == nullptr) {
    fail(ErrorCode::kUnavailable,
         "rdma_create_event_channel: {}; is the module rdma_ucm loaded (/dev/infiniband/rdma_cm)?",
         std::strerror(errno));
  }
  make_nonblocking(registry_.events->fd);
  Admissions& admissions = registry_.admissions;
  admissions.epoll = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!admissions.epoll) fail_system("epoll_create1 of the verbs transport", errno);
  admissions.watch(registry_.events->fd, 0, EPOLLIN);
  registry_.listeners.reserve(options.ports.size());
  for (const VerbsPort& port : options.ports) {
    listen(port, options.port);
    if (std::find(contexts_.begin(), contexts_.end(), port.context) != contexts_.end()) continue;
    contexts_.push_back(port.context);
    make_nonblocking(port.context->async_fd);
    admissions.watch(port.context->async_fd, 0, EPOLLIN);
  }
}

void VerbsTransport::listen(const VerbsPort& port, uint16_t number) {
  const auto check = [&](int result, const char* call) {
    if (result == 0) return;
    fail(ErrorCode::kUnavailable, "{} of {} ({}) port {}: {}", call, port.name(), port.address,
         number, std::strerror(errno));
  };
  addrinfo hints = {};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error =
      getaddrinfo(port.address.c_str(), std::to_string(number).c_str(), &hints, &list);
  if (error != 0) {
    fail(ErrorCode::kInvalid, "{}: address {}: {}", port.name(), port.address, gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  rdma_cm_id* id = nullptr;
  check(rdma_create_id(registry_.events.get(), &id, nullptr, RDMA_PS_TCP), "rdma_create_id");
  VerbsListener listener;
  listener.port = port;
  listener.id.reset(id);
  check(rdma_bind_addr(id, list->ai_addr), "rdma_bind_addr");
  if (id->verbs != port.context) {
    fail(ErrorCode::kInvalid,
         "address {} leads to {}, not to {}: give every RDMA device an address of its own",
         port.address, id->verbs == nullptr ? "no RDMA device" : device_name(id->verbs),
         port.name());
  }
  check(rdma_listen(id, kBacklog), "rdma_listen");
  listener.address = format_host_port(port.address, ntohs(rdma_get_src_port(id)));
  registry_.listeners.push_back(std::move(listener));
}

std::string VerbsTransport::describe() const {
  std::string text = fmt::format("verbs: RDMA on {} port{}", registry_.listeners.size(),
                                 registry_.listeners.size() == 1 ? "" : "s");
  for (const VerbsListener& listener : registry_.listeners) {
    const VerbsPort& port = listener.port;
    text += fmt::format("\n  {} port {}: {}, {} ({}), GID {} {}, MTU {}, NUMA node {}; {}",
                        port.device, port.port, port.link, listener.address, port.netdev,
                        port.gid_index, port.gid, port.mtu_bytes, port.os_node, port.why);
    if (!listener.failure.empty()) text += "; " + listener.failure;
  }
  text += fork_problem();
  return text;
}

std::vector<NicPort> VerbsTransport::ports() const {
  std::vector<NicPort> ports;
  for (const VerbsListener& listener : registry_.listeners) {
    if (!listener.failure.empty()) continue;
    ports.push_back({listener.port.name(), listener.port.os_node});
  }
  return ports;
}

void VerbsTransport::handle_events(std::vector<TransportEvent>& out) {
  rdma_cm_event* event = nullptr;
  for (int i = 0; i < kEventsAtOnce && rdma_get_cm_event(registry_.events.get(), &event) == 0;
       ++i) {
    const rdma_cm_event_type type = event->event;
    rdma_cm_id* id = event->id;
    std::array<std::byte, sizeof(VerbsHello)> hello = {};
    const size_t bytes =
        type == RDMA_CM_EVENT_CONNECT_REQUEST && event->param.conn.private_data != nullptr
            ? std::min<size_t>(hello.size(), event->param.conn.private_data_len)
            : 0;
    if (bytes > 0) std::memcpy(hello.data(), event->param.conn.private_data, bytes);
    rdma_ack_cm_event(event);
    if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
      answer(id, std::span(hello).first(bytes), out);
    } else {
      handle(type, id, out);
    }
  }
  for (ibv_context* context : contexts_) handle_async_events(context, registry_, out);
  forget_dead_devices();
  for (VerbsBoxLink* link : links_of(registry_)) link->let_go();
}

// The descriptor of a device that was removed is readable for ever.
void VerbsTransport::forget_dead_devices() {
  for (const VerbsListener& listener : registry_.listeners) {
    if (listener.failure.empty() || std::erase(contexts_, listener.port.context) == 0) continue;
    epoll_ctl(registry_.admissions.epoll.get(), EPOLL_CTL_DEL, listener.port.context->async_fd,
              nullptr);
  }
}

void VerbsTransport::handle(rdma_cm_event_type type, rdma_cm_id* id,
                            std::vector<TransportEvent>& out) {
  auto* connection = static_cast<VerbsConnection*>(id->context);
  if (connection == nullptr || connection->id.get() != id) {  // a listener's
    if (type == RDMA_CM_EVENT_DEVICE_REMOVAL) device_removed(id, out);
    return;
  }
  switch (type) {
    case RDMA_CM_EVENT_ESTABLISHED:
      connection->pair.established.store(true, std::memory_order_release);
      return;
    case RDMA_CM_EVENT_DISCONNECTED:
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      connection->ended = true;
      if (type == RDMA_CM_EVENT_DISCONNECTED) rdma_disconnect(id);
      return connection->link->broken(*connection, out);
    default:
      return;
  }
}

// What listened on the device goes with it: until then it cannot be unplugged.
void VerbsTransport::device_removed(rdma_cm_id* id, std::vector<TransportEvent>& out) {
  for (VerbsListener& listener : registry_.listeners) {
    if (listener.id.get() != id) continue;
    device_failed(listener.port.context, "was removed", registry_, out);
    listener.id.reset();
  }
}

void VerbsTransport::answer(rdma_cm_id* id, std::span<const std::byte> private_data,
                            std::vector<TransportEvent>& out) {
  id->context = nullptr;
  try {
    const VerbsHello hello = parse_verbs_hello(private_data);
    Incarnation& incarnation = registry_.admissions.find_ticket(ticket_digits(hello.ticket));
    static_cast<VerbsBoxLink&>(*incarnation.link)
        .accept(static_cast<VerbsIncarnation&>(incarnation), hello, id);
  } catch (const Error& error) {
    out.push_back(refusal_event(name(), describe_peer(id), error.code(), error.what()));
    const std::string reason = refusal_text(error.code(), error.what(), kVerbsMaxRefusalBytes);
    rdma_reject(id, reason.data(), static_cast<uint8_t>(reason.size()));
    auto* connection = static_cast<VerbsConnection*>(id->context);
    if (connection == nullptr) {
      rdma_destroy_id(id);
    } else {  // its core has it already
      connection->link->broken(*connection, out);
    }
  }
}

}  // namespace

std::unique_ptr<Transport> make_verbs_transport(const VerbsOptions& options) {
  return std::make_unique<VerbsTransport>(options);
}

}  // namespace phub

// The listening side: a socket for each address of the box.
#include "transport/tcp/transport.h"

#include <fmt/ranges.h>
#include <sys/epoll.h>

#include <utility>

#include "transport/socket_transport.h"
#include "transport/tcp/box.h"
#include "transport/tcp/format.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tls_door.h"

namespace phub {
namespace {

class TcpTransport final : public SocketTransport {
 public:
  explicit TcpTransport(const TcpOptions& options);

  std::string_view name() const override { return "tcp"; }
  std::string describe() const override;
  std::vector<NicPort> ports() const override;
  Windows windows() const override { return Windows::kPlaces; }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    return open_job_in(std::make_shared<const BoxMemory>(layout, "tcp"), layout);
  }
  std::unique_ptr<BoxLink> open_job_in(std::shared_ptr<const BoxMemory> memory,
                                       const LinkLayout& layout) override {
    return std::make_unique<TcpBoxLink>(admissions_, nics_, near_, door_ != nullptr,
                                        std::move(memory), layout);
  }

 private:
  std::string describe_peer(int socket) const override {
    return is_near(socket) ? "on this host" : "from " + to_string(peer_address(socket));
  }
  size_t missing(std::span<const std::byte> so_far) const override {
    // A peer with a wrong header gets its answer now: it may wait for that before it sends the
    // rest.
    if (so_far.size() >= sizeof(TcpHeader)) parse_tcp_header(so_far, "hello");
    return sizeof(TcpHello) - so_far.size();
  }
  void welcome(std::span<const std::byte> hello, Fd& socket) override {
    welcome_with(hello, socket, {});
  }
  void welcome_with(std::span<const std::byte> hello, Fd& socket,
                    std::span<const Fd> descriptors) override {
    std::unique_ptr<TcpTls> plain;
    welcome(hello, socket, plain, descriptors);
  }
  void welcome(std::span<const std::byte> hello, Fd& socket, std::unique_ptr<TcpTls>& tls,
               std::span<const Fd> descriptors);
  void listen_for_this_host();
  void send_refusal(int socket, ErrorCode code, const std::string& reason) const override {
    send_greeting(socket, make_tcp_refusal(code, reason));
  }
  bool take_over(Fd& socket) override {
    if (door_ == nullptr || is_near(socket.get())) return false;
    std::string from = describe_peer(socket.get());
    door_->open(std::move(socket), std::move(from));
    return true;
  }
  void finish_others(std::vector<TransportEvent>& out) override;

  std::vector<TcpNic> nics_;          // with ports: "10.0.0.1:7718"
  std::string near_;                  // for workers on this host; empty: as for all others
  std::unique_ptr<TcpTlsDoor> door_;  // null: connections are plain
};

TcpTransport::TcpTransport(const TcpOptions& options)
    : SocketTransport(options.half_open_ms, options.max_half_open) {
  if (options.only_near) {
    near_ = new_near_name();
    listen(listen_near(near_), TcpNearMemory::kDescriptors);
    return;
  }
  for (const TcpNic& hosts : options.nics) {
    TcpNic nic;
    for (const std::string& host : hosts) {
      Fd listener = listen_on(tcp_address(host, options.port));
      nic.push_back(to_string(local_address(listener.get())));
      listen(std::move(listener));
    }
    if (!nic.empty()) nics_.push_back(std::move(nic));
  }
  if (nics_.empty()) {
    fail(ErrorCode::kInvalid, "the tcp transport needs an address to listen at");
  }
  listen_for_this_host();
  if (options.tls == nullptr) return;
  door_ = std::make_unique<TcpTlsDoor>(*options.tls, options.half_open_ms, options.max_half_open);
  watch_others(door_->event_fd());
}

// Where that is not allowed, workers on this host use TCP.
void TcpTransport::listen_for_this_host() {
  try {
    const std::string name = new_near_name();
    listen(listen_near(name), TcpNearMemory::kDescriptors);
    near_ = name;
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
  }
}

void TcpTransport::finish_others(std::vector<TransportEvent>& out) {
  for (TcpTlsDoor::Guest& guest : door_->take()) {
    if (!guest.refused.empty()) {
      out.push_back(refusal_event(name(), guest.from, ErrorCode::kUnauthorized, guest.refused));
      continue;
    }
    try {
      admissions_.watch(guest.socket.get(), admissions_.next_id++, EPOLLRDHUP);
      welcome(guest.hello, guest.socket, guest.tls, {});
    } catch (const Error& error) {
      out.push_back(refusal_event(name(), guest.from, error.code(), error.what()));
      send_greeting(*guest.tls, make_tcp_refusal(error.code(), error.what()));
      guest.tls.reset();
      end_gently(guest.socket.get());
    }
  }
}

// The kernel moves what they carry, so no core is nearer to one than another.
std::vector<NicPort> TcpTransport::ports() const {
  std::vector<NicPort> ports;
  if (nics_.size() < 2) return ports;  // nothing to choose from
  for (const TcpNic& nic : nics_) ports.push_back({nic.front(), NicPort::kEveryNode});
  return ports;
}

std::string TcpTransport::describe() const {
  const std::string control = default_congestion_control();
  const bool paces = control != "cubic" && control != "reno";
  std::vector<std::string> nics;
  for (const TcpNic& nic : nics_) nics.push_back(fmt::format("{}", fmt::join(nic, " or ")));
  return fmt::format("tcp: {}; {}congestion control {}{}", fmt::join(nics, ", "),
                     door_ ? "with TLS; " : "", control,
                     paces ? ", cubic to workers on this machine" : "");
}

void TcpTransport::welcome(std::span<const std::byte> message, Fd& socket,
                           std::unique_ptr<TcpTls>& tls, std::span<const Fd> descriptors) {
  const TcpHello hello = parse_tcp_hello(message);
  Incarnation& incarnation = admissions_.find_ticket({hello.ticket.data(), hello.ticket.size()});
  static_cast<TcpBoxLink&>(*incarnation.link)
      .welcome(static_cast<TcpIncarnation&>(incarnation), hello, socket, tls, descriptors);
}

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options) {
  return std::make_unique<TcpTransport>(options);
}

}  // namespace phub

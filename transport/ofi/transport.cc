// The listening side: a socket for each address of the box.
#include "transport/ofi/transport.h"

#include <fmt/ranges.h>
#include <sys/epoll.h>

#include <utility>

#include "transport/ofi/box.h"
#include "transport/ofi/format.h"
#include "transport/ofi/library.h"
#include "transport/ofi/providers.h"
#include "transport/socket_transport.h"
#include "transport/tcp/socket.h"

namespace phub {
namespace {

std::string choose_provider(const std::string& wanted) {
  const std::string& problem = ofi_library_problem();
  if (!problem.empty()) fail(ErrorCode::kUnavailable, "no libfabric in this process: {}", problem);
  if (!wanted.empty()) return wanted;
  for (const OfiProvider& provider : find_ofi_providers()) {
    if (!provider.this_host) return provider.name;
  }
  fail(ErrorCode::kUnavailable,
       "libfabric here has no provider with reliable datagrams and remote writes that other hosts "
       "reach: use the transport tcp, or name one");
}

class OfiTransport final : public SocketTransport {
 public:
  explicit OfiTransport(const OfiOptions& options);

  std::string_view name() const override { return "ofi"; }
  std::string describe() const override {
    return fmt::format("ofi: libfabric's provider {}; {}", places_.provider,
                       fmt::join(places_.addresses, ", "));
  }
  Windows windows() const override { return Windows::kShared; }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    return open_job_in(std::make_shared<const BoxMemory>(layout, "ofi"), layout);
  }
  std::unique_ptr<BoxLink> open_job_in(std::shared_ptr<const BoxMemory> memory,
                                       const LinkLayout& layout) override {
    return std::make_unique<OfiBoxLink>(admissions_, places_, std::move(memory), layout);
  }

 private:
  std::string describe_peer(int socket) const override {
    return "from " + to_string(peer_address(socket));
  }
  size_t missing(std::span<const std::byte> so_far) const override {
    // A peer with a wrong header gets its answer now: it may wait for that before it sends the
    // rest.
    if (so_far.size() >= sizeof(OfiHeader)) parse_ofi_header(so_far, "hello");
    return sizeof(OfiHello) - so_far.size();
  }
  void welcome(std::span<const std::byte> message, Fd& socket) override {
    const OfiHello hello = parse_ofi_hello(message);
    Incarnation& incarnation = admissions_.find_ticket({hello.ticket.data(), hello.ticket.size()});
    static_cast<OfiBoxLink&>(*incarnation.link)
        .welcome(static_cast<OfiIncarnation&>(incarnation), hello, socket);
  }
  void send_refusal(int socket, ErrorCode code, const std::string& reason) const override {
    send_greeting(socket, make_ofi_refusal(code, reason));
  }

  OfiPlaces places_;
};

OfiTransport::OfiTransport(const OfiOptions& options)
    : SocketTransport(options.half_open_ms, options.max_half_open) {
  if (options.addresses.empty()) {
    fail(ErrorCode::kInvalid, "the ofi transport needs an address to listen at");
  }
  places_.provider = choose_provider(options.provider);
  for (const std::string& host : options.addresses) {
    const OfiDomain tried(places_.provider, host);  // throws now, not when the first job comes
    Fd listener = listen_on(tcp_address(host, options.port));
    places_.hosts.push_back(host);
    places_.addresses.push_back(to_string(local_address(listener.get())));
    listen(std::move(listener));
  }
}

}  // namespace

std::unique_ptr<Transport> make_ofi_transport(const OfiOptions& options) {
  return std::make_unique<OfiTransport>(options);
}

}  // namespace phub

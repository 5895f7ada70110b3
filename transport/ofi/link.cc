// The worker's side: opens a connection for each queue, shows its ticket on it, and tells where it
// wants its results.
#include <fmt/ranges.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "transport/error.h"
#include "transport/link_arrays.h"
#include "transport/ofi/endpoint.h"
#include "transport/ofi/format.h"
#include "transport/ofi/pair.h"
#include "transport/ofi/transport.h"
#include "transport/tcp/socket.h"
#include "transport/text.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

uint32_t node_of_this_thread() {
  unsigned cpu = 0, node = 0;
  return getcpu(&cpu, &node) == 0 ? node : 0;
}

TcpAddress address_of(const std::string& text) {
  const HostPort where = parse_host_port(text);
  return tcp_address(where.host, where.port);
}

// The address of this host that the box is reached from; "": a connection will tell that it is not.
std::string host_towards(const std::string& address) {
  const TcpAddress source = source_towards(address_of(address));
  return source.size == 0 ? "" : parse_host_port(to_string(source)).host;
}

// One connection that is being made. Throws Error, as all that is below.
class OfiDialing {
 public:
  OfiDialing(std::string address, Clock::time_point deadline)
      : address_(std::move(address)), deadline_(deadline) {
    int error = 0;
    socket_ = begin_connect(address_of(address_), error);
    if (error != 0) fail_to_connect(error);
  }
  void reach();  // waits until the server is reached
  void say(const OfiHello& hello);
  OfiWelcome listen();
  Fd take() { return std::move(socket_); }

 private:
  [[noreturn]] void fail_to_connect(int error) const;
  void wait(short events) const;

  const std::string address_;
  const Clock::time_point deadline_;
  Fd socket_;
};

void OfiDialing::fail_to_connect(int error) const {
  fail(ErrorCode::kUnavailable,
       "no server at {} ({}); is it running, and is that address reachable from this machine?",
       address_, std::strerror(error));
}

void OfiDialing::wait(short events) const {
  pollfd wanted = {socket_.get(), events, 0};
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
    if (left <= 0) {
      fail(ErrorCode::kTimeout, "{}: the server does not answer; is that address reachable?",
           address_);
    }
    if (::poll(&wanted, 1, static_cast<int>(std::min<int64_t>(left, 1000))) > 0) return;
  }
}

void OfiDialing::reach() {
  wait(POLLOUT);
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) fail_to_connect(error);
}

void OfiDialing::say(const OfiHello& hello) {
  const int error = send_greeting(socket_.get(), std::as_bytes(std::span(&hello, 1)));
  // Refused already: the reason can still be received.
  if (error != 0 && error != EPIPE && error != ECONNRESET) {
    fail_system(fmt::format("sending to {}", address_), error);
  }
}

// Reads the answer, and no byte of what follows it.
OfiWelcome OfiDialing::listen() {
  std::vector<std::byte> answer;
  for (;;) {
    size_t wanted = sizeof(OfiHeader);
    if (answer.size() >= wanted) wanted += parse_ofi_header(answer, "welcome").bytes;
    const size_t have = answer.size();
    if (have >= sizeof(OfiHeader) && have == wanted) return parse_ofi_answer(answer);
    answer.resize(wanted);
    wait(POLLIN);
    const ssize_t got = recv(socket_.get(), answer.data() + have, wanted - have, MSG_DONTWAIT);
    answer.resize(have + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR))) continue;
    fail(ErrorCode::kUnavailable, "{}: the server closed the connection{}", address_,
         got < 0 ? fmt::format(" ({})", std::strerror(errno)) : "");
  }
}

// A queue pair that a box has welcomed.
struct WelcomedQueue {
  Fd socket;
  std::unique_ptr<OfiPair> pair;
};

class OfiWorkerLink final : public WorkerLink {
 public:
  OfiWorkerLink(const LinkLayout& layout, uint32_t timeout_ms, std::unique_ptr<LinkArrays> arrays);
  ~OfiWorkerLink() override;

  std::span<std::byte> gradients() override { return arrays_->gradients(); }
  std::span<const std::byte> results() override { return arrays_->results(); }
  std::span<std::byte> writable_results() override { return arrays_->writable_results(); }
  void write_gradients(uint64_t offset, std::span<const std::byte> bytes) override {
    arrays_->write_gradients(offset, bytes);
  }
  Endpoint& endpoint() override { return *endpoints_.front(); }
  Endpoint& endpoint_of(uint32_t thread) override { return *endpoints_.at(thread); }
  bool connected() override;
  bool zero_copy() const override { return false; }
  bool needs_polling() const override { return true; }
  std::string describe() const override;
  void reconnect(const Offer& offer) override;
  bool can_reconnect() const override { return true; }

 private:
  void disconnect();
  OfiEndpoint& endpoint_of_queue(uint32_t queue) { return *endpoints_[layout_.thread_of(queue)]; }
  std::vector<WelcomedQueue> connect_all(const Offer& offer);
  std::shared_ptr<const OfiDomain> domain(const std::string& provider, const std::string& source);

  const LinkLayout layout_;
  const uint32_t timeout_ms_;
  const std::unique_ptr<LinkArrays> arrays_;
  std::map<std::string, std::shared_ptr<const OfiDomain>> domains_;  // by provider and address
  std::vector<std::unique_ptr<OfiEndpoint>> endpoints_;              // by thread

  mutable std::mutex mutex_;  // guards what follows: connected() is called from any thread
  std::vector<WelcomedQueue> connections_;  // by queue; empty: not connected
  std::vector<ClosedOnFork> not_in_children_;
  std::vector<pollfd> ends_;  // the same, for poll()
};

OfiWorkerLink::OfiWorkerLink(const LinkLayout& layout, uint32_t timeout_ms,
                             std::unique_ptr<LinkArrays> arrays)
    : layout_(layout),
      timeout_ms_(timeout_ms),
      arrays_(arrays ? std::move(arrays) : arrays_in(node_of_this_thread(), layout)) {
  const auto queues = static_cast<uint32_t>(layout.queue_chunks.size());
  while (endpoints_.size() < layout.threads) {
    endpoints_.push_back(std::make_unique<OfiEndpoint>(queues, 1, layout.threads));
  }
}

OfiWorkerLink::~OfiWorkerLink() {
  disconnect();
  domains_.clear();  // what is registered there is not any more
}

std::shared_ptr<const OfiDomain> OfiWorkerLink::domain(const std::string& provider,
                                                       const std::string& source) {
  auto& found = domains_[provider + " " + source];
  if (found == nullptr) {
    found = std::make_shared<const OfiDomain>(provider, source, arrays_->cuda_ordinal());
  }
  return found;
}

// Endpoints come first: making them can take a provider longer than a connection may be half open.
std::vector<WelcomedQueue> OfiWorkerLink::connect_all(const Offer& offer) {
  check_offer(offer, "ofi", &layout_);
  if (!arrays_->are_anothers())
    check_addresses(offer);  // else there are queues of the other link's
  std::vector<WelcomedQueue> connections(offer.queues.size());
  for (uint32_t q = 0; q < connections.size(); ++q) {
    const QueueOffer& queue = offer.queues[q];
    if (queue.address.empty()) continue;
    connections[q].pair =
        std::make_unique<OfiPair>(domain(queue.provider, host_towards(queue.address)), gradients(),
                                  writable_results(), layout_.queue_chunks[q]);
  }
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms_);
  std::vector<std::optional<OfiDialing>> all(connections.size());
  for (uint32_t q = 0; q < all.size(); ++q) {
    if (connections[q].pair) all[q].emplace(offer.queues[q].address, deadline);
  }

  OfiHello hello;
  std::memcpy(hello.ticket.data(), offer.ticket.data(), hello.ticket.size());
  hello.queues = static_cast<uint32_t>(offer.queues.size());
  hello.gradient_bytes = layout_.gradients_at_worker();
  hello.result_bytes = layout_.results_at_worker();
  for (uint32_t q = 0; q < all.size(); ++q) {
    if (!all[q]) continue;
    all[q]->reach();
    hello.queue = q;
    hello.queue_chunks = layout_.queue_chunks[q];
    hello.results = connections[q].pair->here();
    all[q]->say(hello);
  }
  for (uint32_t q = 0; q < all.size(); ++q) {
    if (!all[q]) continue;
    connections[q].pair->connect(all[q]->listen().slots);
    connections[q].socket = all[q]->take();
  }
  return connections;
}

void OfiWorkerLink::reconnect(const Offer& offer) {
  disconnect();
  std::vector<WelcomedQueue> connections = connect_all(offer);
  for (uint32_t q = 0; q < connections.size(); ++q) {
    if (connections[q].pair) endpoint_of_queue(q).watch(connections[q].socket.get(), {q});
  }
  {
    const std::lock_guard lock(mutex_);
    connections_ = std::move(connections);
    for (const WelcomedQueue& connection : connections_) {
      if (!connection.pair) continue;
      ends_.push_back({connection.socket.get(), POLLRDHUP, 0});
      not_in_children_.emplace_back(connection.socket.get());
    }
  }
  for (uint32_t q = 0; q < connections_.size(); ++q) {
    if (connections_[q].pair) endpoint_of_queue(q).list({q});
  }
  for (uint32_t q = 0; q < connections_.size(); ++q) {
    if (!connections_[q].pair) continue;
    endpoint_of_queue(q).open({q}, {connections_[q].socket.get(), connections_[q].pair.get()});
  }
}

void OfiWorkerLink::disconnect() {
  for (uint32_t q = 0; q < connections_.size(); ++q) {
    if (connections_[q].pair) endpoint_of_queue(q).close({q});
  }
  const std::lock_guard lock(mutex_);
  not_in_children_.clear();
  connections_.clear();
  ends_.clear();
}

std::string OfiWorkerLink::describe() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> over;
  for (const auto& [name, domain] : domains_) {
    over.push_back(fmt::format("{} ({})", domain->provider(), domain->info().domain_attr->name));
  }
  return fmt::format("{} queue pairs over libfabric's {}; gradients in {} memory", ends_.size(),
                     fmt::join(over, ", "), arrays_->device() ? "the device's" : "host");
}

bool OfiWorkerLink::connected() {
  const std::lock_guard lock(mutex_);
  return !ends_.empty() && ::poll(ends_.data(), ends_.size(), 0) == 0;
}

}  // namespace

std::unique_ptr<WorkerLink> connect_ofi(const Offer& offer, const LinkLayout& layout,
                                        uint32_t timeout_ms, std::unique_ptr<LinkArrays> arrays) {
  auto link = std::make_unique<OfiWorkerLink>(layout, timeout_ms, std::move(arrays));
  link->reconnect(offer);
  return link;
}

}  // namespace phub

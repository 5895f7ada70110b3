// The worker's side: opens its connections, all at once, and shows its ticket on each.
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>

#include "transport/box_memory.h"
#include "transport/error.h"
#include "transport/fd.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/format.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/transport.h"
#include "transport/text.h"
#include "transport/tls/client.h"
#include "transport/worker_memory.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

// A connection that a box has welcomed.
struct Connection {
  Fd socket;                    // outlives what speaks over it
  std::unique_ptr<TcpTls> tls;  // null: plain
};

// One connection that is being made.
class Dialing {
 public:
  // Over TLS where there is a context, with the server of that name.
  Dialing(const std::string& address, const TcpHello& hello, const TlsContext& context,
          const std::string& server)
      : address_(address), hello_(hello) {
    const HostPort where = parse_host_port(address);
    int error = 0;
    socket_ = begin_connect(tcp_address(where.host, where.port), error);
    if (error != 0) fail_to_connect(error);
    if (context) begin_tls(context, server);
    advance();  // within one machine it is connected already
  }
  bool done() const { return stage_ == Stage::kDone; }
  pollfd wanted() const { return {done() ? -1 : socket_.get(), wanted_, 0}; }
  // Goes on as far as it can without blocking. Throws Error if the server is absent or refuses.
  void advance();
  Connection take() {
    return {std::move(socket_), tls_ ? std::make_unique<TcpTls>(std::move(tls_)) : nullptr};
  }
  const std::string& address() const { return address_; }

 private:
  enum class Stage { kConnecting, kShaking, kAsked, kDone };

  [[noreturn]] void fail_to_connect(int error) const;
  void begin_tls(const TlsContext& context, const std::string& server);
  bool check_tls(int result);
  void reach();
  void shake_hands();
  void ask();
  void listen();
  size_t receive(std::span<std::byte> room);

  const std::string address_;
  const TcpHello hello_;
  TlsServer server_;  // of TLS
  Fd socket_;
  Ssl tls_;  // null: plain
  Stage stage_ = Stage::kConnecting;
  short wanted_ = POLLOUT;
  std::vector<std::byte> answer_;
};

void Dialing::fail_to_connect(int error) const {
  if (error == ETIMEDOUT) fail(ErrorCode::kTimeout, "{}: the server does not answer", address_);
  fail(ErrorCode::kUnavailable,
       "no server at {} ({}); is it running, and is that address reachable from this machine?",
       address_, std::strerror(error));
}

void Dialing::advance() {
  if (stage_ == Stage::kConnecting) reach();
  if (stage_ == Stage::kShaking) shake_hands();
  if (stage_ == Stage::kAsked) listen();
}

void Dialing::begin_tls(const TlsContext& context, const std::string& server) {
  server_ = {server, address_};
  tls_.reset(SSL_new(context.get()));
  if (!tls_ || !attach_socket(tls_.get(), socket_.get())) {
    fail(ErrorCode::kFull, "{}: no memory for TLS", address_);
  }
  expect_server(tls_.get(), server_);
  SSL_set_connect_state(tls_.get());
}

// Whether the latest call of OpenSSL did what it should. False: it does so later. Throws Error.
bool Dialing::check_tls(int result) {
  if (result == 1) return true;
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      wanted_ = POLLIN;
      return false;
    case SSL_ERROR_WANT_WRITE:
      wanted_ = POLLOUT;
      return false;
    case SSL_ERROR_SSL:
      throw Error(tls_error(tls_.get(), server_, ERR_peek_last_error()));
    default:
      fail(ErrorCode::kUnavailable, "{}: the server closed the connection", address_);
  }
}

void Dialing::reach() {
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) fail_to_connect(error);
  pollfd there = {socket_.get(), POLLOUT, 0};
  if (::poll(&there, 1, 0) != 1) return;
  tls_ ? void(stage_ = Stage::kShaking) : ask();
}

void Dialing::shake_hands() {
  ERR_clear_error();
  if (check_tls(SSL_do_handshake(tls_.get()))) ask();
}

void Dialing::ask() {
  if (tls_) {
    size_t sent = 0;  // all of it: the socket is empty
    ERR_clear_error();
    if (!check_tls(SSL_write_ex(tls_.get(), &hello_, sizeof(hello_), &sent))) {
      fail(ErrorCode::kUnavailable, "{}: the server takes no hello", address_);
    }
    wanted_ = POLLIN;
    stage_ = Stage::kAsked;
    return;
  }
  const int error = send_greeting(socket_.get(), std::as_bytes(std::span(&hello_, 1)));
  // Refused already: the reason can still be received.
  if (error != 0 && error != EPIPE && error != ECONNRESET) {
    fail_system(fmt::format("sending to {}", address_), error);
  }
  wanted_ = POLLIN;
  stage_ = Stage::kAsked;
}

// How much has come; 0: nothing yet. Throws Error when the connection has ended.
size_t Dialing::receive(std::span<std::byte> room) {
  while (tls_) {
    size_t got = 0;
    ERR_clear_error();
    if (check_tls(SSL_read_ex(tls_.get(), room.data(), room.size(), &got))) return got;
    if (socket_of(tls_.get()).drained) return 0;
  }
  for (;;) {
    const ssize_t bytes = recv(socket_.get(), room.data(), room.size(), MSG_DONTWAIT);
    if (bytes > 0) return static_cast<size_t>(bytes);
    if (bytes < 0 && errno == EAGAIN) return 0;
    if (bytes < 0 && errno == EINTR) continue;
    fail(ErrorCode::kUnavailable, "{}: the server closed the connection{}", address_,
         bytes < 0 ? fmt::format(" ({})", std::strerror(errno)) : "");
  }
}

// Reads the answer, and no byte of the frames behind it.
void Dialing::listen() {
  for (;;) {
    size_t wanted = sizeof(TcpHeader);
    if (answer_.size() >= wanted) wanted += parse_tcp_header(answer_, "welcome").bytes;
    const size_t have = answer_.size();
    if (have >= sizeof(TcpHeader) && have == wanted) break;
    answer_.resize(wanted);
    const size_t got = receive(std::span(answer_).subspan(have));
    answer_.resize(have + got);
    if (got == 0) return;
  }
  parse_tcp_answer(answer_);
  stage_ = Stage::kDone;
}

std::vector<Connection> connect_all(const Offer& offer, const LinkLayout& layout,
                                    const TlsContext& context, const std::string& server,
                                    Clock::time_point deadline) {
  check_offer(offer, "tcp", &layout);
  TcpHello hello;
  std::memcpy(hello.ticket.data(), offer.ticket.data(), hello.ticket.size());
  hello.queues = static_cast<uint32_t>(offer.queues.size());
  hello.gradient_bytes = layout.gradients_at_worker();
  hello.result_bytes = layout.results_at_worker();
  std::vector<Dialing> all;
  all.reserve(offer.queues.size());
  for (hello.queue = 0; hello.queue < hello.queues; ++hello.queue) {
    hello.queue_chunks = layout.queue_chunks[hello.queue];
    all.emplace_back(offer.queues[hello.queue].address, hello, context, server);
  }

  std::vector<pollfd> wanted(all.size());
  const auto is_done = [](const Dialing& dialing) { return dialing.done(); };
  for (;;) {
    const auto slow = std::find_if_not(all.begin(), all.end(), is_done);
    if (slow == all.end()) break;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      fail(ErrorCode::kTimeout, "{}: the server does not answer; is that address reachable?",
           slow->address());
    }
    std::transform(all.begin(), all.end(), wanted.begin(),
                   [](const Dialing& dialing) { return dialing.wanted(); });
    ::poll(wanted.data(), wanted.size(), static_cast<int>(std::min<int64_t>(left, 1000)));
    for (size_t i = 0; i < all.size(); ++i) {
      if (wanted[i].revents != 0) all[i].advance();
    }
  }
  std::vector<Connection> connections;
  for (Dialing& dialing : all) connections.push_back(dialing.take());
  return connections;
}

uint32_t present_node() {
  unsigned cpu = 0, node = 0;
  return getcpu(&cpu, &node) == 0 ? node : 0;
}

// The interface that has this address, of which it may have several; if none has it, the address.
std::string interface_of(const TcpAddress& address) {
  const std::string host = parse_host_port(to_string(address)).host;
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

// How far a connection may be ahead of the others. They share the way to the box unevenly, and a
// chunk is summed when the last worker's is there: without a limit the workers' chunks would come
// in orders of their own, and most sums late.
constexpr uint64_t kLeadBytes = 2 << 20;

class TcpWorkerLink final : public WorkerLink {
 public:
  TcpWorkerLink(const LinkLayout& layout, uint32_t timeout_ms, TcpTrust trust);
  ~TcpWorkerLink() override;

  std::span<std::byte> gradients() override { return gradients_.bytes(); }
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
  TlsContext context_;  // the latest; null: plain connections
  numa::Memory gradients_;
  ResultMemory results_;
  InPlace in_place_;
  std::vector<std::unique_ptr<TcpEndpoint>> endpoints_;  // by thread
  std::vector<std::vector<TcpPosted>> rings_;            // by queue

  mutable std::mutex mutex_;  // guards what follows: connected() is called from any thread
  std::vector<Connection> connections_;  // by queue; empty: not connected
  std::vector<ClosedOnFork> not_in_children_;
  std::vector<pollfd> ends_;  // the same, for poll()
};

TcpWorkerLink::TcpWorkerLink(const LinkLayout& layout, uint32_t timeout_ms, TcpTrust trust)
    : layout_(layout),
      timeout_ms_(timeout_ms),
      trust_(std::move(trust)),
      gradients_(allocate(layout.gradients_at_worker(), present_node(), "memory for gradients")),
      results_(layout.results_at_worker(), present_node()) {
  const auto queues = static_cast<uint32_t>(layout.queue_chunks.size());
  for (uint32_t thread = 0; thread < layout.threads; ++thread) {
    endpoints_.push_back(std::make_unique<TcpEndpoint>(queues, 1));
    endpoints_.back()->limit_lead(kLeadBytes);
  }
  for (const uint32_t chunks : layout.queue_chunks) rings_.emplace_back(tcp_ring_entries(chunks));
}

TcpWorkerLink::~TcpWorkerLink() {
  bury(std::move(gradients_));
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
  std::vector<Connection> connections =
      connect_all(offer, layout_, context_of(offer), trust_.host,
                  Clock::now() + std::chrono::milliseconds(timeout_ms_));
  for (uint32_t q = 0; q < connections.size(); ++q) {
    endpoint_of_queue(q).watch(connections[q].socket.get(), {q});
  }
  for (uint32_t q = 0; q < connections.size(); ++q) {
    TcpEndpoint& endpoint = endpoint_of_queue(q);
    endpoint.list({q});
    endpoint.open({q}, {.stream = {connections[q].socket.get(), connections[q].tls.get()},
                        .ring = rings_[q],
                        .source = gradients_.bytes(),
                        .target = results_.writable(),
                        .in_place = &in_place_});
  }
  const std::lock_guard lock(mutex_);
  connections_ = std::move(connections);
  for (const auto& [socket, tls] : connections_) {
    ends_.push_back({socket.get(), POLLRDHUP, 0});
    not_in_children_.emplace_back(socket.get());
  }
}

void TcpWorkerLink::disconnect() {
  for (uint32_t q = 0; q < connections_.size(); ++q) endpoint_of_queue(q).close({q});
  const std::lock_guard lock(mutex_);
  not_in_children_.clear();
  connections_.clear();
  ends_.clear();
}

std::string TcpWorkerLink::describe() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> ends;
  for (const auto& [socket, tls] : connections_) {
    std::string end = fmt::format("{} to {}", to_string(local_address(socket.get())),
                                  to_string(peer_address(socket.get())));
    ends.push_back(std::move(end));
  }
  return fmt::format("{} connections{}: {}", ends.size(), context_ ? " with TLS" : "",
                     fmt::join(ends, ", "));
}

std::string TcpWorkerLink::nic_of(uint32_t queue) const {
  const std::lock_guard lock(mutex_);
  return connections_.empty() ? "" : interface_of(local_address(connections_[queue].socket.get()));
}

bool TcpWorkerLink::connected() {
  const std::lock_guard lock(mutex_);
  return !ends_.empty() && ::poll(ends_.data(), ends_.size(), 0) == 0;
}

}  // namespace

std::unique_ptr<WorkerLink> connect_tcp(const Offer& offer, const LinkLayout& layout,
                                        uint32_t timeout_ms, TcpTrust trust) {
  auto link = std::make_unique<TcpWorkerLink>(layout, timeout_ms, std::move(trust));
  link->reconnect(offer);
  return link;
}

}  // namespace phub

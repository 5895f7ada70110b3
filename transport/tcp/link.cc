// The worker's side: opens its connections, all at once, and shows its ticket on each.
#include <fmt/ranges.h>
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
#include "transport/worker_memory.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

// One connection that is being made.
class Dialing {
 public:
  Dialing(const std::string& address, const TcpHello& hello) : address_(address), hello_(hello) {
    const HostPort where = parse_host_port(address);
    int error = 0;
    socket_ = begin_connect(tcp_address(where.host, where.port), error);
    if (error != 0) fail_to_connect(error);
    advance();  // within one machine it is connected already
  }
  bool done() const { return stage_ == Stage::kDone; }
  pollfd wanted() const {
    const bool connecting = stage_ == Stage::kConnecting;
    return {done() ? -1 : socket_.get(), static_cast<short>(connecting ? POLLOUT : POLLIN), 0};
  }
  // Goes on as far as it can without blocking. Throws Error if the server is absent or refuses.
  void advance();
  Fd take_socket() { return std::move(socket_); }
  const std::string& address() const { return address_; }

 private:
  enum class Stage { kConnecting, kAsked, kDone };

  [[noreturn]] void fail_to_connect(int error) const;
  void ask();
  void listen();

  const std::string address_;
  const TcpHello hello_;
  Fd socket_;
  Stage stage_ = Stage::kConnecting;
  std::vector<std::byte> answer_;
};

void Dialing::fail_to_connect(int error) const {
  if (error == ETIMEDOUT) fail(ErrorCode::kTimeout, "{}: the server does not answer", address_);
  fail(ErrorCode::kUnavailable,
       "no server at {} ({}); is it running, and is that address reachable from this machine?",
       address_, std::strerror(error));
}

void Dialing::advance() {
  if (stage_ == Stage::kConnecting) ask();
  if (stage_ == Stage::kAsked) listen();
}

void Dialing::ask() {
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) fail_to_connect(error);
  error = send_greeting(socket_.get(), std::as_bytes(std::span(&hello_, 1)));
  if (error == EAGAIN || error == ENOTCONN) return;
  // Refused already: the reason can still be received.
  if (error != 0 && error != EPIPE && error != ECONNRESET) {
    fail_system(fmt::format("sending to {}", address_), error);
  }
  stage_ = Stage::kAsked;
}

// Reads the answer, and no byte of the frames behind it.
void Dialing::listen() {
  for (;;) {
    size_t wanted = sizeof(TcpHeader);
    if (answer_.size() >= wanted) wanted += parse_tcp_header(answer_, "welcome").bytes;
    const size_t have = answer_.size();
    if (have >= sizeof(TcpHeader) && have == wanted) break;
    answer_.resize(wanted);
    const ssize_t bytes = recv(socket_.get(), answer_.data() + have, wanted - have, MSG_DONTWAIT);
    const int error = errno;
    answer_.resize(have + (bytes > 0 ? static_cast<size_t>(bytes) : 0));
    if (bytes > 0 || (bytes < 0 && error == EINTR)) continue;
    if (bytes < 0 && error == EAGAIN) return;
    fail(ErrorCode::kUnavailable, "{}: the server closed the connection{}", address_,
         bytes < 0 ? fmt::format(" ({})", std::strerror(error)) : "");
  }
  parse_tcp_answer(answer_);
  stage_ = Stage::kDone;
}

std::vector<Fd> connect_all(const Offer& offer, const LinkLayout& layout,
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
    all.emplace_back(offer.queues[hello.queue].address, hello);
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
  std::vector<Fd> sockets;
  for (Dialing& dialing : all) sockets.push_back(dialing.take_socket());
  return sockets;
}

uint32_t present_node() {
  unsigned cpu = 0, node = 0;
  return getcpu(&cpu, &node) == 0 ? node : 0;
}

class TcpWorkerLink final : public WorkerLink {
 public:
  TcpWorkerLink(const LinkLayout& layout, uint32_t timeout_ms);
  ~TcpWorkerLink() override;

  std::span<std::byte> gradients() override { return gradients_.bytes(); }
  std::span<const std::byte> results() override { return results_.readable(); }
  InPlace* in_place() override { return &in_place_; }
  Endpoint& endpoint() override { return endpoint_; }
  bool connected() override;
  bool zero_copy() const override { return false; }
  bool needs_polling() const override { return true; }
  std::string describe() const override;
  void reconnect(const Offer& offer) override;
  bool can_reconnect() const override { return true; }

 private:
  void disconnect();

  const LinkLayout layout_;
  const uint32_t timeout_ms_;
  numa::Memory gradients_;
  ResultMemory results_;
  InPlace in_place_;
  TcpEndpoint endpoint_;
  std::vector<std::vector<Write>> rings_;  // by queue

  mutable std::mutex mutex_;  // guards what follows: connected() is called from any thread
  std::vector<Fd> sockets_;   // by queue; empty: not connected
  std::vector<ClosedOnFork> not_in_children_;
  std::vector<pollfd> ends_;  // the same, for poll()
};

TcpWorkerLink::TcpWorkerLink(const LinkLayout& layout, uint32_t timeout_ms)
    : layout_(layout),
      timeout_ms_(timeout_ms),
      gradients_(allocate(layout.gradients_at_worker(), present_node(), "memory for gradients")),
      results_(layout.results_at_worker(), present_node()),
      endpoint_(static_cast<uint32_t>(layout.queue_chunks.size()), 1) {
  for (const uint32_t chunks : layout.queue_chunks) rings_.emplace_back(tcp_ring_entries(chunks));
}

TcpWorkerLink::~TcpWorkerLink() {
  bury(std::move(gradients_));
  results_.bury();
}

void TcpWorkerLink::reconnect(const Offer& offer) {
  disconnect();
  std::vector<Fd> sockets =
      connect_all(offer, layout_, Clock::now() + std::chrono::milliseconds(timeout_ms_));
  for (uint32_t q = 0; q < sockets.size(); ++q) endpoint_.watch(sockets[q].get(), {q});
  for (uint32_t q = 0; q < sockets.size(); ++q) {
    endpoint_.list({q});
    endpoint_.open({q}, {.socket = sockets[q].get(),
                         .ring = rings_[q],
                         .source = gradients_.bytes(),
                         .target = results_.writable(),
                         .in_place = &in_place_});
  }
  const std::lock_guard lock(mutex_);
  sockets_ = std::move(sockets);
  for (const Fd& socket : sockets_) {
    ends_.push_back({socket.get(), POLLRDHUP, 0});
    not_in_children_.emplace_back(socket.get());
  }
}

void TcpWorkerLink::disconnect() {
  for (uint32_t q = 0; q < sockets_.size(); ++q) endpoint_.close({q});
  const std::lock_guard lock(mutex_);
  not_in_children_.clear();
  sockets_.clear();
  ends_.clear();
}

std::string TcpWorkerLink::describe() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> ends;
  for (const Fd& socket : sockets_) {
    std::string end = fmt::format("{} to {}", to_string(local_address(socket.get())),
                                  to_string(peer_address(socket.get())));
    ends.push_back(std::move(end));
  }
  return fmt::format("{} connections: {}", ends.size(), fmt::join(ends, ", "));
}

bool TcpWorkerLink::connected() {
  const std::lock_guard lock(mutex_);
  return !ends_.empty() && ::poll(ends_.data(), ends_.size(), 0) == 0;
}

}  // namespace

std::unique_ptr<WorkerLink> connect_tcp(const Offer& offer, const LinkLayout& layout,
                                        uint32_t timeout_ms) {
  auto link = std::make_unique<TcpWorkerLink>(layout, timeout_ms);
  link->reconnect(offer);
  return link;
}

}  // namespace phub

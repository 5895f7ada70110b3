// The listening side: who may connect, and what becomes of connections.
#include "transport/tcp_nic.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <deque>

#include "transport/error.h"
#include "transport/tcp_box.h"
#include "transport/tcp_format.h"
#include "transport/tcp_socket.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kTimerId = ~uint64_t{0};
constexpr size_t kEventsAtOnce = 64;
constexpr int kAcceptsAtOnce = 256;
constexpr uint32_t kEndEvents = EPOLLRDHUP | EPOLLHUP | EPOLLERR;

class TcpNic final : public Nic {
 public:
  explicit TcpNic(const TcpNicOptions& options);
  ~TcpNic() override { PHUB_CHECK(registry_.links.empty()); }

  std::string_view name() const override { return "tcp"; }
  std::string describe() const override;
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    return std::make_unique<TcpBoxLink>(registry_, layout);
  }
  int event_fd() const override { return registry_.epoll.get(); }
  void handle_events(std::vector<NicEvent>& out) override;

 private:
  // A connection that has not said its whole hello.
  struct HalfOpen {
    uint64_t id = 0;
    TcpFd socket;
    Clock::time_point deadline;
    std::array<std::byte, sizeof(TcpHello)> hello = {};
    size_t bytes = 0;  // of it
  };

  void watch(int fd, uint64_t id, uint32_t events);
  void accept_all(int listener, std::vector<NicEvent>& out);
  bool accept_one(int listener, std::vector<NicEvent>& out);
  void make_room(std::vector<NicEvent>& out);
  bool read_hello(HalfOpen& half_open, std::vector<NicEvent>& out);
  void greet(HalfOpen& half_open, std::vector<NicEvent>& out);
  void end_connection(uint64_t id, std::vector<NicEvent>& out);
  void expire(std::vector<NicEvent>& out);
  void set_timer();
  void refuse(TcpFd socket, ErrorCode code, const std::string& reason, std::vector<NicEvent>& out);

  const TcpNicOptions options_;
  TcpRegistry registry_;
  std::vector<TcpFd> listeners_;  // by address; the id of each is its index
  TcpFd timer_;
  TcpFd spare_;  // given up for a moment to refuse a connection when descriptors have run out
  std::deque<HalfOpen> half_open_;  // the oldest first
};

}  // namespace

// Tells the peer why, as far as it listens, and closes.
void TcpNic::refuse(TcpFd socket, ErrorCode code, const std::string& reason,
                    std::vector<NicEvent>& out) {
  out.push_back(
      {.kind = NicEvent::kRefused,
       .reason = fmt::format("tcp: a connection from {} was refused: {}: {}",
                             to_string(peer_address(socket.get())), name_of(code), reason)});
  send_greeting(socket.get(), make_tcp_refusal(code, reason));
  // Closing with something unread would reset the connection, and with it what was just sent.
  shutdown(socket.get(), SHUT_WR);
  std::array<std::byte, 4096> unread;
  for (int i = 0; i < 8 && recv(socket.get(), unread.data(), unread.size(), MSG_DONTWAIT) > 0;) ++i;
}

TcpNic::TcpNic(const TcpNicOptions& options) : options_(options) {
  raise_file_limit();
  if (options.addresses.empty()) {
    fail(ErrorCode::kInvalid, "the tcp transport needs an address to listen at");
  }
  registry_.epoll = TcpFd(epoll_create1(EPOLL_CLOEXEC));
  if (!registry_.epoll) fail_system("epoll_create1 of the tcp transport", errno);
  timer_ = TcpFd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!timer_) fail_system("timerfd_create of the tcp transport", errno);
  spare_ = TcpFd(fcntl(timer_.get(), F_DUPFD_CLOEXEC, 0));
  if (!spare_) fail_system("fcntl(F_DUPFD) of the tcp transport", errno);
  watch(timer_.get(), kTimerId, EPOLLIN);
  for (const std::string& host : options.addresses) {
    listeners_.push_back(listen_on(tcp_address(host, options.port)));
    watch(listeners_.back().get(), listeners_.size() - 1, EPOLLIN);
    registry_.addresses.push_back(to_string(local_address(listeners_.back().get())));
  }
  registry_.next_id = listeners_.size();
}

std::string TcpNic::describe() const {
  std::string where;
  for (const std::string& address : registry_.addresses) {
    where += (where.empty() ? "" : ", ") + address;
  }
  const std::string control = default_congestion_control();
  const bool paces = control != "cubic" && control != "reno";
  return fmt::format("tcp: {}; congestion control {}{}", where, control,
                     paces ? ", cubic to workers on this machine" : "");
}

void TcpNic::watch(int fd, uint64_t id, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(registry_.epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    fail_system("epoll_ctl of the tcp transport", errno);
  }
}

void TcpNic::handle_events(std::vector<NicEvent>& out) {
  std::array<epoll_event, kEventsAtOnce> events;
  const int count = epoll_wait(registry_.epoll.get(), events.data(), events.size(), 0);
  for (int i = 0; i < count; ++i) {
    const uint64_t id = events[i].data.u64;
    if (id < listeners_.size()) {
      accept_all(listeners_[id].get(), out);
      continue;
    }
    if (id == kTimerId) {
      uint64_t times = 0;
      [[maybe_unused]] const ssize_t bytes = read(timer_.get(), &times, sizeof(times));
      continue;
    }
    const auto it = std::find_if(half_open_.begin(), half_open_.end(),
                                 [id](const HalfOpen& half_open) { return half_open.id == id; });
    if (it == half_open_.end()) {
      // It may have said its hello a moment ago, in make_room(): that is what this event is about.
      if ((events[i].events & kEndEvents) != 0) end_connection(id, out);
    } else if (read_hello(*it, out)) {
      half_open_.erase(it);
    }
  }
  expire(out);
  set_timer();
}

void TcpNic::accept_all(int listener, std::vector<NicEvent>& out) {
  for (int i = 0; i < kAcceptsAtOnce && accept_one(listener, out); ++i) {
  }
}

bool TcpNic::accept_one(int listener, std::vector<NicEvent>& out) {
  HalfOpen accepted;
  accepted.socket = TcpFd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!accepted.socket && (errno == EMFILE || errno == ENFILE)) {
    // Leaving it in the backlog would wake this thread again at once, for ever.
    spare_.reset();
    TcpFd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const bool refused = static_cast<bool>(socket);
    if (refused) {
      refuse(std::move(socket), ErrorCode::kFull,
             "the server is out of descriptors; raise LimitNOFILE or ulimit -n there", out);
    }
    spare_ = TcpFd(fcntl(timer_.get(), F_DUPFD_CLOEXEC, 0));
    return refused;
  }
  if (!accepted.socket) return errno == EINTR || errno == ECONNABORTED;
  accepted.id = registry_.next_id++;
  accepted.deadline = Clock::now() + std::chrono::milliseconds(options_.half_open_ms);
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = accepted.id;
  if (epoll_ctl(registry_.epoll.get(), EPOLL_CTL_ADD, accepted.socket.get(), &event) != 0) {
    refuse(std::move(accepted.socket), ErrorCode::kFull, "the server is out of epoll watches", out);
    return true;
  }
  // An honest worker's hello comes with the connection: it is half open only in name.
  if (read_hello(accepted, out)) return true;
  make_room(out);
  half_open_.push_back(std::move(accepted));
  return true;
}

void TcpNic::make_room(std::vector<NicEvent>& out) {
  if (half_open_.size() < std::max(options_.max_half_open, 1u)) return;
  HalfOpen& oldest = half_open_.front();
  if (!read_hello(oldest, out)) {
    refuse(std::move(oldest.socket), ErrorCode::kTimeout,
           "too many connections that have shown no ticket; this was the oldest", out);
  }
  half_open_.pop_front();
}

// True: it is half open no more.
bool TcpNic::read_hello(HalfOpen& half_open, std::vector<NicEvent>& out) {
  // No byte behind the hello is read: it is a frame, and the core's.
  const std::span<std::byte> missing = std::span(half_open.hello).subspan(half_open.bytes);
  const ssize_t bytes = recv(half_open.socket.get(), missing.data(), missing.size(), MSG_DONTWAIT);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (bytes <= 0) return true;
  half_open.bytes += static_cast<size_t>(bytes);
  const auto so_far = std::span(half_open.hello).first(half_open.bytes);
  try {
    if (so_far.size() >= sizeof(TcpHeader)) parse_tcp_header(so_far, "hello");
  } catch (const Error& error) {  // whoever this is waits for an answer, not to say more
    refuse(std::move(half_open.socket), error.code(), error.what(), out);
    return true;
  }
  if (half_open.bytes < half_open.hello.size()) return false;
  greet(half_open, out);
  return true;
}

void TcpNic::greet(HalfOpen& half_open, std::vector<NicEvent>& out) {
  try {
    const TcpHello hello = parse_tcp_hello(half_open.hello);
    TcpBoxLink* link = nullptr;
    TcpIncarnation* found = nullptr;
    for (TcpBoxLink* candidate : registry_.links) {
      TcpIncarnation* match = candidate->find_ticket({hello.ticket.data(), hello.ticket.size()});
      if (match == nullptr) continue;
      link = candidate;
      found = match;
    }
    if (found == nullptr) {
      fail(ErrorCode::kUnauthorized,
           "no incarnation has this ticket (it was replaced, or its job is gone); join again");
    }
    link->welcome(*found, hello, half_open.id, half_open.socket);
    if (found->connected == found->connections.size()) {
      out.push_back({NicEvent::kConnected, link, found->rank, found->incarnation, {}});
    }
  } catch (const Error& error) {
    refuse(std::move(half_open.socket), error.code(), error.what(), out);
  }
}

// The socket stays open until revoke() or reconnect(), which the cores come before.
void TcpNic::end_connection(uint64_t id, std::vector<NicEvent>& out) {
  for (TcpBoxLink* link : registry_.links) {
    TcpIncarnation* found = link->find_connection(id);
    if (found == nullptr || found->ended) continue;
    found->ended = true;
    out.push_back({NicEvent::kDisconnected, link, found->rank, found->incarnation, {}});
  }
}

void TcpNic::expire(std::vector<NicEvent>& out) {
  const Clock::time_point now = Clock::now();
  while (!half_open_.empty() && half_open_.front().deadline <= now) {
    refuse(std::move(half_open_.front().socket), ErrorCode::kTimeout,
           fmt::format("no ticket within {} ms", options_.half_open_ms), out);
    half_open_.pop_front();
  }
}

// Wakes event_fd() when the oldest half-open connection has had its time.
void TcpNic::set_timer() {
  itimerspec when = {};
  if (!half_open_.empty()) {
    const auto left = half_open_.front().deadline - Clock::now();
    const int64_t ns =
        std::max<int64_t>(1, std::chrono::duration_cast<std::chrono::nanoseconds>(left).count());
    when.it_value.tv_sec = ns / 1'000'000'000;
    when.it_value.tv_nsec = ns % 1'000'000'000;
  }
  timerfd_settime(timer_.get(), 0, &when, nullptr);
}

std::unique_ptr<Nic> make_tcp_nic(const TcpNicOptions& options) {
  return std::make_unique<TcpNic>(options);
}

}  // namespace phub

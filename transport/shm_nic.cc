// The listening side: who may connect, and what becomes of connections.
#include "transport/shm_nic.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "transport/error.h"
#include "transport/shm_box.h"
#include "transport/shm_format.h"
#include "transport/shm_socket.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kListenerId = ~uint64_t{0};
constexpr uint64_t kTimerId = kListenerId - 1;
constexpr size_t kEventsAtOnce = 64;
constexpr int kAcceptsAtOnce = 64;

class ShmNic final : public Nic {
 public:
  explicit ShmNic(const ShmNicOptions& options);
  ~ShmNic() override;

  std::string_view name() const override { return "shm"; }
  std::string describe() const override;
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    return std::make_unique<ShmBoxLink>(registry_, layout);
  }
  bool shares_memory() const override { return true; }
  int event_fd() const override { return registry_.epoll.get(); }
  void handle_events(std::vector<NicEvent>& out) override;

 private:
  struct HalfOpen {
    uint64_t id = 0;
    ShmFd socket;
    Clock::time_point deadline;
  };

  void watch(int fd, uint64_t id, uint32_t events);
  void accept_all(std::vector<NicEvent>& out);
  bool accept_one(std::vector<NicEvent>& out);
  void expire(std::vector<NicEvent>& out);
  void set_timer();
  void make_room(std::vector<NicEvent>& out);
  bool read_hello(HalfOpen& half_open, std::vector<NicEvent>& out);
  void greet(ShmFd socket, std::span<const std::byte> message, std::vector<NicEvent>& out);
  void watch_process(ShmIncarnation& incarnation);
  void end_connection(uint64_t id, std::vector<NicEvent>& out);

  const ShmNicOptions options_;
  ShmRegistry registry_;
  ShmFd listener_;
  ShmFd timer_;
  ShmFd spare_;  // given up for a moment to refuse a connection when descriptors have run out
  std::deque<HalfOpen> half_open_;  // the oldest first
};

std::string new_socket_path(const std::string& dir) {
  uint64_t random = 0;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) {
    fail_system("getrandom of a socket name", errno);
  }
  return fmt::format("{}/phub-{}-{:016x}.sock", dir, getpid(), random);
}

// Tells the peer why, as far as it listens, and closes.
void refuse(ShmFd socket, ErrorCode code, const std::string& reason, std::vector<NicEvent>& out) {
  out.push_back({.kind = NicEvent::kRefused,
                 .reason = fmt::format("shm: a connection of process {} was refused: {}: {}",
                                       peer_of(socket.get()).pid, name_of(code), reason)});
  ShmHeader header;
  header.type = ShmMessage::kRefusal;
  const std::string text =
      fmt::format("{}: {}", name_of(code), reason).substr(0, kShmMaxRefusalBytes);
  std::vector<std::byte> message(sizeof(header) + text.size());
  std::memcpy(message.data(), &header, sizeof(header));
  std::memcpy(message.data() + sizeof(header), text.data(), text.size());
  send_message(socket.get(), message);
  // Closing with something unread would make the peer's next call fail before it sees the reason.
  std::array<std::byte, 64> unread;
  for (int i = 0; i < 8 && recv(socket.get(), unread.data(), unread.size(), MSG_DONTWAIT) > 0;) ++i;
}

}  // namespace

ShmNic::ShmNic(const ShmNicOptions& options) : options_(options) {
  raise_file_limit();
  const std::string dir = options.socket_dir.empty() ? default_socket_dir() : options.socket_dir;
  prepare_socket_dir(dir);
  remove_stale_sockets(dir);
  const std::string path = new_socket_path(dir);
  registry_.epoll = ShmFd(epoll_create1(EPOLL_CLOEXEC));
  if (!registry_.epoll) fail_system("epoll_create1 of the shm transport", errno);
  timer_ = ShmFd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!timer_) fail_system("timerfd_create of the shm transport", errno);
  spare_ = ShmFd(fcntl(timer_.get(), F_DUPFD_CLOEXEC, 0));
  if (!spare_) fail_system("fcntl(F_DUPFD) of the shm transport", errno);
  watch(timer_.get(), kTimerId, EPOLLIN);
  listener_ = listen_at(path);
  registry_.address = path;  // from here on the destructor's
  watch(listener_.get(), kListenerId, EPOLLIN);
}

ShmNic::~ShmNic() {
  PHUB_CHECK(registry_.links.empty());
  unlink(registry_.address.c_str());
}

std::string ShmNic::describe() const {
  return fmt::format("shm: {}, {}", registry_.address, describe_shm_pages());
}

void ShmNic::watch(int fd, uint64_t id, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(registry_.epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    fail_system("epoll_ctl of the shm transport", errno);
  }
}

void ShmNic::handle_events(std::vector<NicEvent>& out) {
  std::array<epoll_event, kEventsAtOnce> events;
  const int count = epoll_wait(registry_.epoll.get(), events.data(), events.size(), 0);
  for (int i = 0; i < count; ++i) {
    const uint64_t id = events[i].data.u64;
    if (id == kListenerId) {
      accept_all(out);
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
      end_connection(id, out);
    } else if (read_hello(*it, out)) {
      half_open_.erase(it);
    }
  }
  expire(out);
  set_timer();
}

void ShmNic::accept_all(std::vector<NicEvent>& out) {
  for (int i = 0; i < kAcceptsAtOnce && accept_one(out); ++i) {
  }
}

bool ShmNic::accept_one(std::vector<NicEvent>& out) {
  ShmFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket && (errno == EMFILE || errno == ENFILE)) {
    // Leaving it in the backlog would wake this thread again at once, for ever.
    spare_.reset();
    socket = ShmFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      refuse(std::move(socket), ErrorCode::kFull, "the server is out of descriptors", out);
    }
    spare_ = ShmFd(fcntl(timer_.get(), F_DUPFD_CLOEXEC, 0));
    return false;
  }
  if (!socket) return errno == EINTR || errno == ECONNABORTED;
  const uid_t uid = peer_of(socket.get()).uid;
  if (uid != geteuid() && uid != 0) {
    refuse(std::move(socket), ErrorCode::kUnauthorized,
           fmt::format("user {} may not use the server of user {}", uid, geteuid()), out);
    return true;
  }
  HalfOpen half_open;
  half_open.id = registry_.next_id++;
  half_open.deadline = Clock::now() + std::chrono::milliseconds(options_.half_open_ms);
  half_open.socket = std::move(socket);
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = half_open.id;
  if (epoll_ctl(registry_.epoll.get(), EPOLL_CTL_ADD, half_open.socket.get(), &event) != 0) {
    refuse(std::move(half_open.socket), ErrorCode::kFull, "the server is out of epoll watches",
           out);
    return true;
  }
  // An honest worker's hello comes with the connection: it is half open only in name.
  if (read_hello(half_open, out)) return true;
  make_room(out);
  half_open_.push_back(std::move(half_open));
  return true;
}

void ShmNic::make_room(std::vector<NicEvent>& out) {
  if (half_open_.size() < std::max(options_.max_half_open, 1u)) return;
  HalfOpen& oldest = half_open_.front();
  if (!read_hello(oldest, out)) {
    refuse(std::move(oldest.socket), ErrorCode::kTimeout,
           "too many connections that have shown no ticket; this was the oldest", out);
  }
  half_open_.pop_front();
}

void ShmNic::expire(std::vector<NicEvent>& out) {
  const Clock::time_point now = Clock::now();
  while (!half_open_.empty() && half_open_.front().deadline <= now) {
    refuse(std::move(half_open_.front().socket), ErrorCode::kTimeout,
           fmt::format("no ticket within {} ms", options_.half_open_ms), out);
    half_open_.pop_front();
  }
}

// Wakes event_fd() when the oldest half-open connection has had its time.
void ShmNic::set_timer() {
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

// True: it is half open no more.
bool ShmNic::read_hello(HalfOpen& half_open, std::vector<NicEvent>& out) {
  // Without room for control data the kernel drops descriptors that a peer sends along.
  std::array<std::byte, sizeof(ShmHello) + 1> message;
  const ssize_t bytes = recv(half_open.socket.get(), message.data(), message.size(), MSG_DONTWAIT);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (bytes > 0) {
    greet(std::move(half_open.socket), std::span(message).first(static_cast<size_t>(bytes)), out);
  }
  return true;
}

void ShmNic::greet(ShmFd socket, std::span<const std::byte> message, std::vector<NicEvent>& out) {
  try {
    const ShmHello hello = parse_shm_hello(message);
    ShmBoxLink* link = nullptr;
    ShmIncarnation* found = nullptr;
    for (ShmBoxLink* candidate : registry_.links) {
      ShmIncarnation* match = candidate->find_ticket({hello.ticket.data(), hello.ticket.size()});
      if (match == nullptr) continue;
      link = candidate;
      found = match;
    }
    if (found == nullptr) {
      fail(ErrorCode::kUnauthorized,
           "no incarnation has this ticket (it was replaced, or its job is gone); join again");
    }
    if (found->ticket_used) {
      fail(ErrorCode::kUnauthorized, "rank {}: this ticket was used already; join again",
           found->rank);
    }
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = found->id;
    if (epoll_ctl(registry_.epoll.get(), EPOLL_CTL_MOD, socket.get(), &event) != 0) {
      fail_system(fmt::format("epoll_ctl of rank {}", found->rank), errno);
    }
    link->welcome(*found, socket);
    watch_process(*found);
    out.push_back({NicEvent::kConnected, link, found->rank, found->incarnation, {}});
  } catch (const Error& error) {
    refuse(std::move(socket), error.code(), error.what(), out);
  }
}

// A child that the worker forked holds its socket open when it is dead: its process has an end of
// its own. Where the kernel does not tell of that, the socket has to do.
void ShmNic::watch_process(ShmIncarnation& incarnation) {
  incarnation.process = open_peer(incarnation.socket.get());
  if (!incarnation.process) return;
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = incarnation.id;
  if (epoll_ctl(registry_.epoll.get(), EPOLL_CTL_ADD, incarnation.process.get(), &event) != 0) {
    incarnation.process.reset();
  }
}

// A connected worker has nothing to say on its socket: whatever happens there is its end. The
// socket stays open until revoke(), which the cores come before.
void ShmNic::end_connection(uint64_t id, std::vector<NicEvent>& out) {
  for (ShmBoxLink* link : registry_.links) {
    ShmIncarnation* found = link->find_connection(id);
    if (found == nullptr || !found->socket) continue;
    epoll_ctl(registry_.epoll.get(), EPOLL_CTL_DEL, found->socket.get(), nullptr);
    found->process.reset();
    out.push_back({NicEvent::kDisconnected, link, found->rank, found->incarnation, {}});
  }
}

std::string default_socket_dir() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && runtime[0] == '/') return std::string(runtime) + "/phub";
  return fmt::format("/tmp/phub-{}", geteuid());
}

std::unique_ptr<Nic> make_shm_nic(const ShmNicOptions& options) {
  return std::make_unique<ShmNic>(options);
}

}  // namespace phub

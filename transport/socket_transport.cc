#include "transport/socket_transport.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "transport/unix_message.h"

namespace phub {
namespace {

constexpr uint64_t kTimerId = ~uint64_t{0};
constexpr uint64_t kOthersId = kTimerId - 1;
constexpr size_t kEventsAtOnce = 64;
constexpr int kAcceptsAtOnce = 256;

}  // namespace

SocketTransport::SocketTransport(uint32_t half_open_ms, uint32_t max_half_open)
    : half_open_time_(half_open_ms), max_half_open_(std::max(max_half_open, 1u)) {
  raise_file_limit();
  admissions_.epoll = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!admissions_.epoll) fail_system("epoll_create1 of a transport", errno);
  timer_ = Fd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!timer_) fail_system("timerfd_create of a transport", errno);
  spare_ = Fd(fcntl(timer_.get(), F_DUPFD_CLOEXEC, 0));
  if (!spare_) fail_system("fcntl(F_DUPFD) of a transport", errno);
  admissions_.watch(timer_.get(), kTimerId, EPOLLIN);
}

SocketTransport::~SocketTransport() { PHUB_CHECK(admissions_.links.empty()); }

void SocketTransport::listen(Fd listener, size_t most_descriptors) {
  const uint64_t id = admissions_.next_id++;
  admissions_.watch(listener.get(), id, EPOLLIN);
  listeners_.push_back({id, std::move(listener), most_descriptors});
}

void SocketTransport::watch_others(int fd) { admissions_.watch(fd, kOthersId, EPOLLIN); }

void SocketTransport::handle_events(std::vector<TransportEvent>& out) {
  std::array<epoll_event, kEventsAtOnce> events;
  const int count = epoll_wait(admissions_.epoll.get(), events.data(), events.size(), 0);
  for (int i = 0; i < count; ++i) {
    const uint64_t id = events[i].data.u64;
    const auto listener = std::ranges::find(listeners_, id, &Listener::id);
    if (listener != listeners_.end()) {
      for (int accepts = 0; accepts < kAcceptsAtOnce && accept_one(*listener, out); ++accepts) {
      }
      continue;
    }
    if (id == kTimerId) {
      uint64_t times = 0;
      [[maybe_unused]] const ssize_t bytes = read(timer_.get(), &times, sizeof(times));
      continue;
    }
    if (id == kOthersId) {
      finish_others(out);
      continue;
    }
    const auto it = std::find_if(half_open_.begin(), half_open_.end(),
                                 [id](const HalfOpen& half_open) { return half_open.id == id; });
    if (it == half_open_.end()) {
      admissions_.end_connection(id, out);
    } else if (read_hello(*it, out)) {
      half_open_.erase(it);
    }
  }
  expire(out);
  set_timer();
}

// False: there is nothing more to accept now.
bool SocketTransport::accept_one(const Listener& listener, std::vector<TransportEvent>& out) {
  HalfOpen accepted;
  accepted.most_descriptors = listener.most_descriptors;
  accepted.socket =
      Fd(accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!accepted.socket && (errno == EMFILE || errno == ENFILE)) {
    return refuse_for_want_of_descriptors(listener.socket.get(), out);
  }
  if (!accepted.socket) return errno == EINTR || errno == ECONNABORTED;
  accepted.id = admissions_.next_id++;
  accepted.deadline = Clock::now() + half_open_time_;
  try {
    check_peer(accepted.socket.get());
    if (take_over(accepted.socket)) return true;
    admissions_.watch(accepted.socket.get(), accepted.id, EPOLLIN | EPOLLRDHUP);
  } catch (const Error& error) {
    refuse(std::move(accepted.socket), error.code(), error.what(), out);
    return true;
  }
  // The hello of an honest worker has usually come with the connection.
  if (read_hello(accepted, out)) return true;
  make_room(out);
  half_open_.push_back(std::move(accepted));
  return true;
}

// A connection that stays in the backlog would wake this thread again at once, without end.
bool SocketTransport::refuse_for_want_of_descriptors(int listener,
                                                     std::vector<TransportEvent>& out) {
  spare_.reset();
  Fd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const bool accepted = static_cast<bool>(socket);
  if (accepted) {
    refuse(std::move(socket), ErrorCode::kFull,
           "the server is out of descriptors; raise LimitNOFILE or ulimit -n there", out);
  }
  spare_ = Fd(fcntl(timer_.get(), F_DUPFD_CLOEXEC, 0));
  return accepted;
}

void SocketTransport::make_room(std::vector<TransportEvent>& out) {
  if (half_open_.size() < max_half_open_) return;
  HalfOpen& oldest = half_open_.front();
  if (!read_hello(oldest, out)) {
    refuse(std::move(oldest.socket), ErrorCode::kTimeout,
           "too many connections that have shown no ticket; this was the oldest", out);
  }
  half_open_.pop_front();
}

// As recv(). Bytes behind the hello are for the core, and stay unread. Without room for control
// data the kernel drops descriptors that a peer sends along.
ssize_t SocketTransport::receive(HalfOpen& half_open, size_t most) {
  const auto room = std::span(half_open.hello).subspan(half_open.bytes, most);
  if (half_open.most_descriptors == 0) {
    return recv(half_open.socket.get(), room.data(), room.size(), MSG_DONTWAIT);
  }
  UnixMessage part = receive_message(half_open.socket.get(), most,
                                     half_open.most_descriptors - half_open.descriptors.size());
  std::ranges::move(part.fds, std::back_inserter(half_open.descriptors));
  std::ranges::copy(part.bytes, room.begin());
  errno = part.error;
  return part.error != 0 ? -1 : static_cast<ssize_t>(part.bytes.size());
}

// True: the connection is no longer half open.
bool SocketTransport::read_hello(HalfOpen& half_open, std::vector<TransportEvent>& out) {
  const auto so_far = [&half_open] { return std::span(half_open.hello).first(half_open.bytes); };
  const ssize_t bytes = receive(half_open, missing(so_far()));
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (bytes <= 0) return true;
  half_open.bytes += static_cast<size_t>(bytes);
  try {
    if (missing(so_far()) > 0) return false;
    if (half_open.most_descriptors > 0) {
      welcome_with(so_far(), half_open.socket, half_open.descriptors);
    } else {
      welcome(so_far(), half_open.socket);
    }
  } catch (const Error& error) {
    refuse(std::move(half_open.socket), error.code(), error.what(), out);
  }
  return true;
}

// Tells the peer why, if it still listens, and closes the connection.
void SocketTransport::refuse(Fd socket, ErrorCode code, const std::string& reason,
                             std::vector<TransportEvent>& out) const {
  out.push_back(refusal_event(name(), describe_peer(socket.get()), code, reason));
  send_refusal(socket.get(), code, reason);
  end_gently(socket.get());
}

void SocketTransport::end_gently(int socket) {
  // Closing with something unread would reset the connection, and with it what was just sent.
  shutdown(socket, SHUT_WR);
  std::array<std::byte, 4096> unread;
  for (int i = 0; i < 8 && recv(socket, unread.data(), unread.size(), MSG_DONTWAIT) > 0;) ++i;
}

void SocketTransport::expire(std::vector<TransportEvent>& out) {
  const Clock::time_point now = Clock::now();
  while (!half_open_.empty() && half_open_.front().deadline <= now) {
    refuse(std::move(half_open_.front().socket), ErrorCode::kTimeout,
           fmt::format("no ticket within {} ms", half_open_time_.count()), out);
    half_open_.pop_front();
  }
}

// Wakes event_fd() when the time of the oldest half-open connection is over.
void SocketTransport::set_timer() {
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

}  // namespace phub

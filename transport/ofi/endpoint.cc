#include "transport/ofi/endpoint.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "transport/error.h"

namespace phub {
namespace {

constexpr size_t kOfiEventsAtOnce = 64;
constexpr size_t kFetchAtOnce = 64;
constexpr uint32_t kPollsBetweenEvents = 64;  // a busy endpoint also looks for what has ended
constexpr int64_t kBlockedNs = 1'000'000;     // until a write that waits is tried again
constexpr uint32_t kOfiSocketEvents = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
constexpr uint32_t kOfiEndEvents = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
// What an event's number is of: a queue pair's socket, its completion queue, or the timer.
constexpr uint64_t kCompletions = uint64_t{1} << 32;
constexpr uint64_t kTimerNumber = ~uint64_t{0};

epoll_event numbered_event(uint64_t number, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = number;
  return event;
}

// Bytes that only wake. True: the peer has ended the connection.
bool drain_bytes(int socket) {
  std::array<std::byte, 4096> bytes;
  for (;;) {
    const ssize_t got = recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got == static_cast<ssize_t>(bytes.size())) continue;
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  }
}

}  // namespace

OfiEndpoint::OfiEndpoint(uint32_t queues, uint32_t ranks, uint32_t endpoints)
    : ranks_(ranks),
      pairs_(size_t{queues} * ranks),
      live_(pairs_.size()),
      in_flight_(kPathBytes, endpoints, queues, ranks),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  epoll_event event = numbered_event(kTimerNumber, EPOLLIN | EPOLLET);
  if (!epoll_ || !timer_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, timer_.get(), &event) != 0) {
    fail_system("epoll and timer of an endpoint", errno);
  }
  dirty_.reserve(pairs_.size());
}

size_t OfiEndpoint::poll(std::span<Arrival> out) {
  if (live_.empty()) return 0;
  const size_t taken =
      live_.poll(out, [this](uint32_t qp, std::span<Arrival> share) { return take(qp, share); });
  ++(taken > 0 ? counters_.polls : counters_.empty_polls);
  if (taken == 0 || ++polls_without_events_ >= kPollsBetweenEvents) take_events();
  return taken;
}

// Fills `landed`. False: nothing came.
bool OfiEndpoint::fetch(Pair& pair) {
  OfiPair& fabric = *pair.connected.pair;
  const uint64_t sent = fabric.sent(), held = fabric.held_bytes();
  pair.taken = 0;
  pair.landed.resize(kFetchAtOnce);
  size_t count = 0;
  const bool works = fabric.receive(pair.landed, count);
  pair.landed.resize(count);
  if (fabric.held_bytes() != held) in_flight_.gone(pair.name.rank, held - fabric.held_bytes());
  if (fabric.sent() != sent) ring(pair);
  if (!works || (pair.ending && count == 0)) break_off(pair);
  return count > 0;
}

size_t OfiEndpoint::take(uint32_t qp, std::span<Arrival> out) {
  Pair& pair = pairs_[qp];
  size_t count = 0;
  while (count < out.size()) {
    if (pair.taken == pair.landed.size() && (pair.status != Status::kLive || !fetch(pair))) break;
    out[count++] = {
        .queue = pair.name.queue, .rank = pair.name.rank, .imm = pair.landed[pair.taken++]};
    ++counters_.receives;
  }
  if (pair.status == Status::kBroken && count < out.size()) {
    pair.status = Status::kSilent;
    out[count++] = {.queue = pair.name.queue, .rank = pair.name.rank, .ok = false};
  }
  return count;
}

// Ending the connection tells the peer.
void OfiEndpoint::break_off(Pair& pair) {
  if (pair.status != Status::kLive) return;
  pair.status = Status::kBroken;
  shutdown(pair.connected.socket, SHUT_RDWR);
}

bool OfiEndpoint::post(QueuePair to, const Write& write) {
  const uint32_t qp = index_of(to);
  PHUB_CHECK(qp < pairs_.size());
  Pair& pair = pairs_[qp];
  if (pair.status != Status::kLive) return false;
  const auto push = [&] {
    OfiPair& fabric = *pair.connected.pair;
    return in_flight_.has_room(to.rank, fabric.held_bytes()) && fabric.push(write);
  };
  if (!push()) {
    if (pair.taken == pair.landed.size()) fetch(pair);  // sends may have completed
    if (pair.status != Status::kLive) return false;
    if (!push()) {
      in_flight_.refused();
      return false;
    }
  }
  in_flight_.posted(to.rank, write.bytes);
  if (!pair.dirty) dirty_.push_back(qp);
  pair.dirty = true;
  ++counters_.sends;
  return true;
}

void OfiEndpoint::flush() {
  bool blocked = false;
  for (const uint32_t qp : dirty_) {
    Pair& pair = pairs_[qp];
    pair.dirty = false;
    if (pair.status != Status::kLive) continue;
    pair.connected.pair->publish();
    pair.connected.pair->send();
    ++counters_.doorbells;
    ring(pair);
    blocked |= is_blocked(pair);
  }
  dirty_.clear();
  if (armed_ && blocked) set_timer();  // the owner sleeps, and another thread flushes for it
}

// Wakes a peer whose provider cannot. A full socket holds bytes that wake it already.
void OfiEndpoint::ring(const Pair& pair) {
  if (pair.connected.pair->wake_fd() >= 0) return;
  const std::byte one{1};
  static_cast<void>(send(pair.connected.socket, &one, 1, MSG_DONTWAIT | MSG_NOSIGNAL));
  ++counters_.system_calls;
  ++counters_.wakeups;
}

void OfiEndpoint::take_events() {
  polls_without_events_ = 0;
  std::array<epoll_event, kOfiEventsAtOnce> events;
  int count = 0;
  do {
    ++counters_.system_calls;
    count = epoll_wait(epoll_.get(), events.data(), events.size(), 0);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 < kCompletions) {
        take_event(static_cast<uint32_t>(events[i].data.u64), events[i].events);
      }
    }
  } while (count == static_cast<int>(kOfiEventsAtOnce));
}

void OfiEndpoint::take_event(uint32_t qp, uint32_t events) {
  Pair& pair = pairs_[qp];
  if (pair.status == Status::kListed) connection_announced(pair.name);
  if (pair.status != Status::kLive) return;
  if ((events & kOfiEndEvents) != 0) pair.ending = true;
  if ((events & EPOLLIN) != 0 && drain_bytes(pair.connected.socket)) pair.ending = true;
}

void OfiEndpoint::wake_for(int fd) {
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kCompletions;  // as of these, it only wakes
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    fail_system("epoll_ctl of an endpoint", errno);
  }
}

// Only trying again shows whether a write can go on: a provider need not wake who has half sent
// one.
bool OfiEndpoint::is_blocked(const Pair& pair) const {
  if (pair.status != Status::kLive) return false;
  const OfiPair& fabric = *pair.connected.pair;
  return fabric.waiting() || fabric.outstanding();
}

bool OfiEndpoint::arm(std::span<const uint32_t>) {
  take_events();
  bool idle = true, blocked = false;
  for (const uint32_t qp : live_) {
    Pair& pair = pairs_[qp];
    if (pair.status == Status::kLive) {
      const uint64_t sent = pair.connected.pair->sent();
      if (pair.taken == pair.landed.size()) fetch(pair);
      // There may be room where a post has found none.
      if (pair.connected.pair->sent() != sent) idle = false;
    }
    if (pair.status == Status::kBroken || pair.taken < pair.landed.size()) idle = false;
    if (pair.status == Status::kLive && !pair.connected.pair->may_sleep()) idle = false;
    if (is_blocked(pair)) {
      blocked = true;
      ring(pair);
    }
  }
  if (in_flight_.made_room()) idle = false;
  if (idle && blocked) set_timer();
  armed_ = idle;
  return idle;
}

void OfiEndpoint::set_timer() {
  itimerspec when = {};
  when.it_value.tv_nsec = kBlockedNs;
  timerfd_settime(timer_.get(), 0, &when, nullptr);
  ++counters_.system_calls;
}

void OfiEndpoint::watch(int socket, QueuePair pair) {
  epoll_event event = numbered_event(index_of(pair), EPOLLET);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) != 0) {
    fail_system("epoll_ctl of a connection", errno);
  }
}

// The owner may have found the connection by itself and closed it again: then it is no longer
// watched.
void OfiEndpoint::announce(int socket, QueuePair pair) {
  epoll_event event = numbered_event(index_of(pair), kOfiSocketEvents);
  const int error = epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket, &event) == 0 ? 0 : errno;
  PHUB_CHECK(error == 0 || error == ENOENT);
}

void OfiEndpoint::list(QueuePair pair) {
  const uint32_t qp = index_of(pair);
  PHUB_CHECK(qp < pairs_.size() && pairs_[qp].status == Status::kClosed);
  pairs_[qp].name = pair;
  pairs_[qp].status = Status::kListed;
  pairs_[qp].landed.reserve(kFetchAtOnce);
  live_.add(qp);
}

void OfiEndpoint::open(QueuePair name, const OfiConnected& connected) {
  const uint32_t qp = index_of(name);
  PHUB_CHECK(qp < pairs_.size() && pairs_[qp].status == Status::kListed);
  Pair& pair = pairs_[qp];
  pair.status = Status::kLive;
  pair.ending = false;
  pair.connected = connected;
  pair.landed.clear();
  pair.taken = 0;
  // Edges from before it was open are lost; this makes them come again.
  announce(connected.socket, name);
  const int completions = connected.pair->wake_fd();
  if (completions < 0) return;
  epoll_event event = numbered_event(kCompletions | qp, EPOLLIN | EPOLLET);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, completions, &event) != 0) {
    fail_system("epoll_ctl of a completion queue", errno);
  }
}

void OfiEndpoint::close(QueuePair name) {
  const uint32_t qp = index_of(name);
  PHUB_CHECK(qp < pairs_.size() && pairs_[qp].status != Status::kClosed);
  Pair& pair = pairs_[qp];
  if (pair.status != Status::kListed) {
    in_flight_.gone(name.rank, pair.connected.pair->held_bytes());
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, pair.connected.socket, nullptr);
    const int completions = pair.connected.pair->wake_fd();
    if (completions >= 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, completions, nullptr);
    pair.connected.pair->close();
  }
  pair.status = Status::kClosed;
  pair.connected = {};
  pair.landed.clear();
  pair.taken = 0;
  live_.remove(qp);
}

}  // namespace phub

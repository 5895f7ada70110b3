#include "transport/tcp/endpoint.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "transport/error.h"
#include "transport/wire.h"

namespace phub {
namespace {

// Bytes in a row from one peer: few enough that what all of them sent is still in the cache when it
// is summed.
constexpr uint64_t kVisitBytes = 128 << 10;
constexpr size_t kEventsAtOnce = 64;
constexpr uint32_t kAllEvents = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
constexpr uint32_t kEndEvents = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
constexpr uint32_t kTimer = ~uint32_t{0};  // in place of a queue pair

epoll_event event_of(uint32_t qp, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.u32 = qp;
  return event;
}

}  // namespace

TcpEndpoint::TcpEndpoint(uint32_t queues, uint32_t ranks, uint32_t endpoints)
    : ranks_(ranks),
      pairs_(size_t{queues} * ranks),
      live_(pairs_.size()),
      in_flight_(kRingBytes, endpoints, queues, ranks),
      queues_(queues),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) fail_system("epoll_create1 of an endpoint", errno);
  dirty_.reserve(pairs_.size());
}

void TcpEndpoint::keep_in_step(uint32_t lead_chunks, uint64_t (*now_ns)()) {
  now_ns_ = now_ns;
  timer_ = Fd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  epoll_event event = event_of(kTimer, EPOLLIN | EPOLLET);
  if (!timer_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, timer_.get(), &event) != 0) {
    fail_system("the timer of an endpoint", errno);
  }
  in_step_.emplace(queues_, ranks_, lead_chunks);
}

// Not while it is too far ahead of others; what a peer sent before it ended is read in any case.
bool TcpEndpoint::is_held(const Pair& pair) const {
  return in_step_ && !pair.ending && in_step_->holds(index_of(pair.name));
}

bool TcpEndpoint::is_read(const Pair& pair) const {
  return pair.readable && !is_held(pair) && !pair.receiver.waits_for_place();
}

// What a peer sent before it ended is read: it is no more than a socket holds.
void TcpEndpoint::make_place(const Pair& pair) {
  if (pair.ending && pair.receiver.waits_for_place()) pair.receiver.make_place();
}

bool TcpEndpoint::has_work(const Pair& pair) const {
  if (pair.status == Status::kBroken) return true;
  if (pair.status == Status::kLive) make_place(pair);
  return pair.status == Status::kLive && (is_read(pair) || pair.receiver.landed());
}

void TcpEndpoint::look_at_leads() {
  if (in_step_) in_step_->look(now_ns_(), live_);
}

size_t TcpEndpoint::poll(std::span<Arrival> out) {
  if (live_.empty() || is_idle()) return 0;
  look_at_leads();
  const auto busy_both_ways = [this](uint32_t qp) {
    const Pair& pair = pairs_[qp];
    return pair.status == Status::kLive && pair.readable && pair.writable &&
           !pair.receiver.waits_for_place();
  };
  if (!std::all_of(live_.begin(), live_.end(), busy_both_ways)) take_events();

  return live_.poll(out, [this](uint32_t qp, std::span<Arrival> share) { return take(qp, share); });
}

size_t TcpEndpoint::take(uint32_t qp, std::span<Arrival> out) {
  Pair& pair = pairs_[qp];
  if (!has_work(pair)) return 0;
  size_t taken = 0;
  uint64_t bytes = 0;
  while (pair.status == Status::kLive && taken < out.size()) {
    make_place(pair);
    if (pair.receiver.landed()) {
      const TcpFrame frame = pair.receiver.take();
      out[taken++] = {.queue = pair.name.queue,
                      .rank = pair.name.rank,
                      .imm = frame.imm,
                      .bytes = frame.bytes,
                      .offset = frame.remote_offset};
      ++counters_.chunks_received;
      const ImmKind kind = decode(frame.imm).kind;
      const bool is_gradient = kind == ImmKind::kData || kind == ImmKind::kNull;
      if (in_step_ && is_gradient) in_step_->took_gradient(qp);
    } else if (pair.receiver.violated()) {
      break_off(pair);
    } else if (is_read(pair) && bytes < kVisitBytes) {
      receive(pair, bytes);
    } else {
      break;
    }
  }
  if (pair.status == Status::kBroken && taken < out.size()) {
    pair.status = Status::kSilent;
    out[taken++] = {.queue = pair.name.queue,
                    .rank = pair.name.rank,
                    .ok = false,
                    .violation = pair.receiver.violated()};
  }
  return taken;
}

// New keys that the peer asked for cannot be sent: nothing is read until the socket takes more.
bool TcpEndpoint::waits_for_room(const Pair& pair) {
  return pair.stream.tls != nullptr && pair.stream.tls->waits_for_room();
}

void TcpEndpoint::receive(Pair& pair, uint64_t& bytes) {
  ++counters_.receives;
  const uint64_t before = bytes;
  const TcpReceiver::Result result = pair.receiver.receive(pair.stream, bytes);
  counters_.empty += bytes == before;
  if (in_step_ && bytes != before) in_step_->delivered(index_of(pair.name));
  switch (result) {
    case TcpReceiver::Result::kMore:
      break;
    case TcpReceiver::Result::kDrained:
      // The end of the stream is one edge, which may have come before the last bytes were read.
      if (!pair.ending || waits_for_room(pair)) pair.readable = false;
      break;
    case TcpReceiver::Result::kEnded:  // over TLS the peer may not know it yet
      break_off(pair);
      break;
  }
}

// The rest of the stream cannot be read any more. Ending it tells the peer.
void TcpEndpoint::break_off(Pair& pair) {
  pair.status = Status::kBroken;
  shutdown(pair.stream.socket, SHUT_RDWR);
}

bool TcpEndpoint::post(QueuePair to, const Write& write) {
  const uint32_t qp = index_of(to);
  PHUB_CHECK(qp < pairs_.size());
  Pair& pair = pairs_[qp];
  if (pair.status != Status::kLive) return false;
  // What goes through memory of both sides waits for no link.
  const uint64_t times = pair.stream.is_local ? kLocalTimes : 1;
  const bool has_room =
      pair.stream.peer != nullptr || in_flight_.has_room(to.rank, pair.sender.held_bytes(), times);
  if (!has_room || !pair.sender.push(write)) {
    in_flight_.refused();
    return false;
  }
  in_flight_.posted(to.rank, write.bytes);
  if (!pair.dirty) dirty_.push_back(qp);
  pair.dirty = true;
  ++counters_.posted;
  if (in_step_ && decode(write.imm).kind == ImmKind::kData) in_step_->answered(qp);
  return true;
}

void TcpEndpoint::flush() {
  for (const uint32_t qp : dirty_) {
    Pair& pair = pairs_[qp];
    pair.dirty = false;
    if (pair.status != Status::kLive) continue;
    pair.sender.publish();
    if (pair.writable) send(pair);
  }
  dirty_.clear();
}

void TcpEndpoint::send(Pair& pair) {
  const uint64_t held = pair.sender.held_bytes(), sent = counters_.chunks_sent;
  const TcpSender::Result result = pair.sender.send(pair.stream, counters_);
  if (counters_.chunks_sent != sent) {
    in_flight_.gone(pair.name.rank, held - pair.sender.held_bytes());
  }
  switch (result) {
    case TcpSender::Result::kSent:
      break;
    case TcpSender::Result::kFull:
      pair.writable = false;
      break;
    case TcpSender::Result::kEnded:
      pair.writable = false;
      pair.readable = pair.ending = true;
      break;
  }
}

// Whether there were events.
bool TcpEndpoint::take_events() {
  std::array<epoll_event, kEventsAtOnce> events;
  ++counters_.waits;
  if (announced_.load(std::memory_order_relaxed)) announced_.exchange(false);
  const int count = epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  for (int i = 0; i < count; ++i) take_event(events[i].data.u32, events[i].events);
  counters_.empty += count <= 0;
  return count > 0;
}

void TcpEndpoint::take_event(uint32_t qp, uint32_t events) {
  if (qp == kTimer) return;
  Pair& pair = pairs_[qp];
  if (pair.status == Status::kListed) connection_announced(pair.name);
  if (pair.status != Status::kLive) return;
  if ((events & (EPOLLIN | kEndEvents)) != 0) pair.readable = true;
  if ((events & kEndEvents) != 0) pair.ending = true;
  if ((events & EPOLLOUT) != 0 && waits_for_room(pair)) pair.readable = true;
  if ((events & EPOLLOUT) != 0 && !pair.writable && !pair.ending) {
    pair.writable = true;
    if (pair.sender.pending()) send(pair);
  }
}

bool TcpEndpoint::arm(std::span<const uint32_t>) {
  while (take_events()) {
  }
  if (in_flight_.made_room()) return false;
  look_at_leads();
  bool holds = false;
  for (const uint32_t qp : live_) {
    const Pair& pair = pairs_[qp];
    if (has_work(pair)) return false;
    holds |= pair.status == Status::kLive && pair.readable && is_held(pair);
  }
  if (holds) wake_in(in_step_->holds_for_ns());
  return true;
}

// What holds a rank up may end by the passing of time alone.
void TcpEndpoint::wake_in(uint64_t ns) {
  constexpr uint64_t kSecond = 1'000'000'000;
  itimerspec when = {};
  when.it_value = {.tv_sec = static_cast<time_t>(ns / kSecond),
                   .tv_nsec = static_cast<long>(ns % kSecond)};
  PHUB_CHECK(timerfd_settime(timer_.get(), 0, &when, nullptr) == 0);
}

EndpointCounters TcpEndpoint::counters() const {
  const uint64_t asked = counters_.receives + counters_.waits;
  return {.sends = counters_.posted,
          .receives = counters_.chunks_received,
          .doorbells = counters_.sends,
          .polls = asked - counters_.empty,
          .empty_polls = counters_.empty,
          .system_calls = asked + counters_.sends};
}

void TcpEndpoint::watch(int socket, QueuePair pair) {
  epoll_event event = event_of(index_of(pair), EPOLLET);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) != 0) {
    fail_system("epoll_ctl of a connection", errno);
  }
}

// The owner may have found the connection by itself and closed it again: then it is no longer
// watched.
void TcpEndpoint::announce(int socket, QueuePair pair) {
  epoll_event event = event_of(index_of(pair), kAllEvents);
  const int error = epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket, &event) == 0 ? 0 : errno;
  PHUB_CHECK(error == 0 || error == ENOENT);
  announced_.store(true, std::memory_order_release);
}

void TcpEndpoint::list(QueuePair pair) {
  const uint32_t qp = index_of(pair);
  PHUB_CHECK(qp < pairs_.size() && pairs_[qp].status == Status::kClosed);
  pairs_[qp].name = pair;
  pairs_[qp].status = Status::kListed;
  live_.add(qp);
}

void TcpEndpoint::open(QueuePair name, const TcpQueuePair& connected) {
  const uint32_t qp = index_of(name);
  PHUB_CHECK(qp < pairs_.size() && pairs_[qp].status == Status::kListed);
  Pair& pair = pairs_[qp];
  pair.status = Status::kLive;
  ++open_;
  pair.stream = connected.stream;
  pair.readable = pair.stream.tls != nullptr && pair.stream.tls->holds_more();
  pair.ending = false;
  const InPlace* in_place = connected.in_place;
  pair.receiver.start(connected.target, in_place ? &in_place->results : nullptr, pair.stream.peer,
                      {connected.window, name});
  pair.sender.start(connected.ring, connected.source, in_place ? &in_place->gradients : nullptr);
  pair.writable = true;
  if (in_step_) in_step_->begin(qp);
  // Edges from before it was open are lost; this makes them come again.
  announce(pair.stream.socket, name);
}

void TcpEndpoint::close(QueuePair name) {
  const uint32_t qp = index_of(name);
  PHUB_CHECK(qp < pairs_.size() && pairs_[qp].status != Status::kClosed);
  Pair& pair = pairs_[qp];
  if (pair.status != Status::kListed) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, pair.stream.socket, nullptr);
    --open_;
  }
  pair.status = Status::kClosed;
  in_flight_.gone(name.rank, pair.sender.held_bytes());
  pair.sender = {};
  pair.stream = {};
  live_.remove(qp);
}

}  // namespace phub

#include "transport/shm/endpoint.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "transport/error.h"

namespace phub {

ShmEndpoint::ShmEndpoint(uint32_t queues, uint32_t ranks)
    : ranks_(ranks),
      consumers_(size_t{queues} * ranks),
      states_(consumers_.size()),
      producers_(consumers_.size()),
      live_(states_.size()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) fail_system("epoll_create1 of an endpoint", errno);
  PHUB_CHECK(queues == 1 || ranks == 1);  // so that wake_after is by queue pair
  dirty_.reserve(states_.size());
}

size_t ShmEndpoint::poll(std::span<Arrival> out) {
  return live_.poll(out, [this](uint32_t qp, std::span<Arrival> share) { return take(qp, share); });
}

size_t ShmEndpoint::take(uint32_t qp, std::span<Arrival> out) {
  State& state = states_[qp];
  if (state.status == Status::kLive) {
    const size_t taken = consumers_[qp].take(state.pair, out);
    if (taken > 0 || !consumers_[qp].broken()) return taken;
    state.status = Status::kBroken;
  }
  if (state.status == Status::kSilent) return 0;
  state.status = Status::kSilent;
  out[0] = {.queue = state.pair.queue, .rank = state.pair.rank, .ok = false};
  return 1;
}

bool ShmEndpoint::post(QueuePair to, const Write& write) {
  const uint32_t qp = index_of(to);
  PHUB_CHECK(qp < states_.size());
  State& state = states_[qp];
  if (state.status != Status::kLive) return false;
  if (!producers_[qp].push(write.imm)) {
    if (producers_[qp].broken()) state.status = Status::kBroken;
    return false;
  }
  if (!state.dirty) dirty_.push_back(qp);
  state.dirty = true;
  return true;
}

void ShmEndpoint::flush() {
  for (const uint32_t qp : dirty_) {
    State& state = states_[qp];
    state.dirty = false;
    if (state.status != Status::kLive || !producers_[qp].publish()) continue;
    // A doorbell that is full has been rung; one whose peer is gone wakes nobody.
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(state.doorbell, &one, sizeof(one));
    ++wakeups_sent_;
  }
  dirty_.clear();
}

bool ShmEndpoint::arm(std::span<const uint32_t> wake_after) {
  PHUB_CHECK(wake_after.empty() || wake_after.size() >= states_.size());
  if (drain_fd_ >= 0) {
    std::array<std::byte, 4096> rung;
    [[maybe_unused]] const ssize_t drained = read(drain_fd_, rung.data(), rung.size());
  }
  armed_ = true;
  for (const uint32_t qp : live_) consumers_[qp].arm(wake_after.empty() ? 1 : wake_after[qp]);
  if (std::any_of(live_.begin(), live_.end(), [this](uint32_t qp) { return ready(qp); })) {
    disarm();
    return false;
  }
  return true;
}

bool ShmEndpoint::ready(uint32_t qp) {
  const Status status = states_[qp].status;
  return status == Status::kBroken || (status == Status::kLive && consumers_[qp].satisfied());
}

void ShmEndpoint::disarm() {
  if (!armed_) return;
  for (const uint32_t qp : live_) consumers_[qp].disarm();
  armed_ = false;
}

void ShmEndpoint::watch(int doorbell, uint32_t events) {
  epoll_event event = {};
  event.events = events | EPOLLET;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, doorbell, &event) != 0) {
    fail_system("epoll_ctl of a doorbell", errno);
  }
}

void ShmEndpoint::unwatch(int doorbell) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, doorbell, nullptr);
}

void ShmEndpoint::open(QueuePair pair, ShmConsumer in, ShmProducer out, int doorbell) {
  const uint32_t qp = index_of(pair);
  PHUB_CHECK(qp < states_.size() && states_[qp].status == Status::kClosed);
  consumers_[qp] = in;
  producers_[qp] = out;
  states_[qp].pair = pair;
  states_[qp].status = Status::kLive;
  states_[qp].doorbell = doorbell;
  live_.add(qp);
}

void ShmEndpoint::close(QueuePair pair) {
  const uint32_t qp = index_of(pair);
  PHUB_CHECK(qp < states_.size() && states_[qp].status != Status::kClosed);
  disarm();
  states_[qp].status = Status::kClosed;
  live_.remove(qp);
}

}  // namespace phub

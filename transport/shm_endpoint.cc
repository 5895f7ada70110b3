#include "transport/shm_endpoint.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "transport/error.h"

namespace phub {
namespace {

constexpr size_t kLeastShare = 16;  // arrivals in a row from one peer: entries of a cache line

}  // namespace

ShmEndpoint::ShmEndpoint(uint32_t qps)
    : consumers_(qps), states_(qps), producers_(qps), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) fail_system("epoll_create1 of an endpoint", errno);
  live_.reserve(qps);
  dirty_.reserve(qps);
}

size_t ShmEndpoint::poll(std::span<Arrival> out) {
  const size_t count = live_.size();
  if (count == 0) return 0;
  const size_t share = std::max(out.size() / count, kLeastShare);
  size_t taken = 0;
  for (size_t visited = 0; visited < count && taken < out.size(); ++visited) {
    const uint32_t qp = live_[next_];
    next_ = next_ + 1 == count ? 0 : next_ + 1;
    taken += take(qp, out.subspan(taken, std::min(share, out.size() - taken)));
  }
  return taken;
}

size_t ShmEndpoint::take(uint32_t qp, std::span<Arrival> out) {
  State& state = states_[qp];
  if (state.status == Status::kLive) {
    const size_t taken = consumers_[qp].take(qp, out);
    if (taken > 0 || !consumers_[qp].broken()) return taken;
    state.status = Status::kBroken;
  }
  if (state.status == Status::kSilent) return 0;
  state.status = Status::kSilent;
  out[0] = {qp, 0, false};
  return 1;
}

bool ShmEndpoint::post(uint32_t qp, const Write& write) {
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

void ShmEndpoint::attach(uint32_t, uint32_t) { PHUB_CHECK(!"attach() is the box's"); }
void ShmEndpoint::detach(uint32_t) { PHUB_CHECK(!"detach() is the box's"); }

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

void ShmEndpoint::open(uint32_t qp, ShmConsumer in, ShmProducer out, int doorbell) {
  PHUB_CHECK(qp < states_.size() && states_[qp].status == Status::kClosed);
  consumers_[qp] = in;
  producers_[qp] = out;
  states_[qp].status = Status::kLive;
  states_[qp].doorbell = doorbell;
  live_.push_back(qp);
}

void ShmEndpoint::close(uint32_t qp) {
  PHUB_CHECK(qp < states_.size() && states_[qp].status != Status::kClosed);
  disarm();
  states_[qp].status = Status::kClosed;
  std::erase(live_, qp);
  next_ = 0;
}

}  // namespace phub

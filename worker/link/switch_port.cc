#include "worker/link/switch_port.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <utility>

#include "transport/error.h"
#include "transport/fd.h"

namespace phub {
namespace {

class UdpSwitchPort final : public SwitchPort {
 public:
  UdpSwitchPort(const sockaddr_in& box, uint16_t port, int link_fd)
      : socket_(port),
        closed_on_fork_(socket_.fd()),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
    if (!epoll_ || !timer_) fail_system("descriptors for a switch", errno);
    socket_.take_from_side_of(box);
    watch(link_fd, EPOLLIN | EPOLLET);
    watch(socket_.fd(), EPOLLIN);
    watch(timer_.get(), EPOLLIN | EPOLLET);
  }

  Datagrams& datagrams() override { return socket_; }
  uint64_t now_ns() const override {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
  }
  // What has come so far is taken from the descriptor before the link is armed, which looks again.
  bool arm(uint64_t due_ns) override {
    if (listens_ && socket_.holds_some()) return false;
    std::array<epoll_event, 4> events;
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(), 0);
    for (int i = 0; i < count; ++i) {
      if (events[static_cast<size_t>(i)].data.fd == socket_.fd()) return false;
    }
    set_timer(due_ns);
    return true;
  }
  int wake_fd() const override { return epoll_.get(); }
  void listen(bool listens) override {
    if (listens == std::exchange(listens_, listens)) return;
    if (listens) return watch(socket_.fd(), EPOLLIN);
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket_.fd(), nullptr);
  }
  void give_up() override {
    listen(false);
    closed_on_fork_ = ClosedOnFork();
    socket_.close();
  }

 private:
  void watch(int fd, uint32_t what) {
    epoll_event event{.events = what, .data = {.fd = fd}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      fail_system("epoll_ctl for a switch", errno);
    }
  }

  void set_timer(uint64_t due) {
    constexpr uint64_t kSecond = 1'000'000'000, kNever = ~uint64_t{0};
    itimerspec at{};  // kNever: it is off
    if (due != kNever) {
      at.it_value.tv_sec = static_cast<time_t>(due / kSecond);
      at.it_value.tv_nsec = static_cast<long>(due % kSecond);
    }
    timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &at, nullptr);
  }

  SwitchSocket socket_;
  ClosedOnFork closed_on_fork_;
  const Fd epoll_, timer_;
  bool listens_ = true;
};

}  // namespace

std::unique_ptr<SwitchPort> open_switch_port(const sockaddr_in& box, uint16_t port, int link_fd) {
  return std::make_unique<UdpSwitchPort>(box, port, link_fd);
}

}  // namespace phub

#include "bench/zerocompute/measures.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>

#include "bench/zerocompute/shared.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

double quantile_of_sorted(std::span<const double> sorted, double q) {
  if (sorted.empty()) return std::numeric_limits<double>::quiet_NaN();
  const double place = std::clamp(q, 0.0, 1.0) * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], place - static_cast<double>(below));
}

constexpr std::string_view kCoreThreads = "phub-core-";  // phub/server.cc
constexpr int kWakeups = 200;

// An eventfd, and an epoll that waits for it alone.
class Bell {
 public:
  Bell() : event_(eventfd(0, EFD_CLOEXEC)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    epoll_event event{.events = EPOLLIN, .data = {}};
    PHUB_CHECK(event_ >= 0 && epoll_ >= 0);
    PHUB_CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, event_, &event) == 0);
  }
  ~Bell() {
    close(event_);
    close(epoll_);
  }
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  void ring() const { eventfd_write(event_, 1); }
  void wait() const {
    epoll_event event;
    while (epoll_wait(epoll_, &event, 1, -1) != 1) {
    }
    eventfd_t count;
    eventfd_read(event_, &count);
  }

 private:
  int event_, epoll_;
};

}  // namespace

double quantile(std::span<const double> values, double q) {
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  return quantile_of_sorted(sorted, q);
}

double median(std::span<const double> values) { return quantile(values, 0.5); }

double usual_mean(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  sorted.resize(sorted.size() - sorted.size() / 10);
  return std::accumulate(sorted.begin(), sorted.end(), 0.0) / static_cast<double>(sorted.size());
}

Summary summarize(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  return {.min = quantile_of_sorted(sorted, 0),
          .p50 = quantile_of_sorted(sorted, 0.5),
          .p99 = quantile_of_sorted(sorted, 0.99),
          .max = quantile_of_sorted(sorted, 1),
          .total = std::accumulate(sorted.begin(), sorted.end(), 0.0)};
}

std::vector<ThreadTimes> core_times(pid_t pid) {
  std::map<int, ThreadTimes> by_core;
  std::error_code error;
  const std::filesystem::path tasks = fmt::format("/proc/{}/task", pid);
  for (const auto& task : std::filesystem::directory_iterator(tasks, error)) {
    const std::string name = first_line((task.path() / "comm").string());
    if (!name.starts_with(kCoreThreads)) continue;
    int core = 0;
    std::from_chars(name.data() + kCoreThreads.size(), name.data() + name.size(), core);
    ThreadTimes& times = by_core[core];
    std::ifstream(task.path() / "schedstat") >> times.run_ns >> times.waited_ns;
  }
  std::vector<ThreadTimes> all;
  for (const auto& [number, times] : by_core) all.push_back(times);
  return all;
}

int64_t own_run_ns() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

// The first line of /proc/stat: user, nice, system, idle, waiting for a disk, interrupts, ….
MachineUse::Ticks MachineUse::now() {
  std::ifstream stat("/proc/stat");
  std::string cpu;
  std::array<uint64_t, 8> of{};
  stat >> cpu;
  for (uint64_t& ticks : of) stat >> ticks;
  return {.all = std::accumulate(of.begin(), of.end(), uint64_t{0}), .idle = of[3] + of[4]};
}

void MachineUse::stop() {
  const Ticks stopped = now();
  used_.all += stopped.all - started_.all;
  used_.idle += stopped.idle - started_.idle;
}

double MachineUse::busy() const {
  const auto all = static_cast<double>(used_.all);
  return all > 0 ? 1 - static_cast<double>(used_.idle) / all
                 : std::numeric_limits<double>::quiet_NaN();
}

double measure_wakeup_us() {
  const Bell there, back;
  std::array<int64_t, kWakeups> rung{}, woken{};
  std::thread sleeper([&] {
    for (int i = 0; i < kWakeups; ++i) {
      there.wait();
      woken[i] = monotonic_ns();
      back.ring();
    }
  });
  for (int i = 0; i < kWakeups; ++i) {
    // Long enough for the other thread to fall asleep.
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    rung[i] = monotonic_ns();
    there.ring();
    back.wait();
  }
  sleeper.join();
  std::vector<double> us;
  for (int i = 0; i < kWakeups; ++i) us.push_back(static_cast<double>(woken[i] - rung[i]) / 1e3);
  return median(us);
}

}  // namespace phub

#include "phub/core.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "transport/error.h"

namespace phub {
namespace {

void ring(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(fd, &one, sizeof one);
}

void watch(int epoll_fd, int fd) {
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {.fd = fd}};
  if (fd >= 0 && epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0 && errno != EEXIST) {
    fail(ErrorCode::kInternal, "epoll_ctl: {}", std::strerror(errno));
  }
}

// By the only thread that writes the counter: no locked instruction.
void add(std::atomic<uint64_t>& counter, uint64_t n) {
  counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}

int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Core::Core(uint32_t index) : index_(index) {
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  mailbox_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  report_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (epoll_fd_ < 0 || mailbox_fd_ < 0 || report_fd_ < 0) {
    fail(ErrorCode::kFull, "core {}: no file descriptor left ({}); raise ulimit -n", index,
         std::strerror(errno));
  }
  watch(epoll_fd_, mailbox_fd_);
  jobs_.reserve(kMaxJobs);
}

Core::~Core() {
  close(epoll_fd_);
  close(mailbox_fd_);
  close(report_fd_);
}

bool Core::send(const CoreMessage& message) {
  if (!mailbox_.push(message)) return false;
  if (asleep_.load(std::memory_order_seq_cst)) ring(mailbox_fd_);
  return true;
}

void Core::clear_report_fd() {
  uint64_t count = 0;
  [[maybe_unused]] ssize_t n = read(report_fd_, &count, sizeof count);
}

void Core::wake() { ring(mailbox_fd_); }

bool Core::step() {
  bool moved = read_mailbox();
  for (CoreJob* job : jobs_) moved |= job->step();
  moved |= forward_reports();
  if (std::exchange(reported_, false)) ring(report_fd_);
  add(moved ? usage_.busy_passes : usage_.idle_passes, 1);
  return moved;
}

bool Core::read_mailbox() {
  bool any = false;
  CoreMessage message;
  while (reports_.room() > 0 && mailbox_.pop(message)) {
    handle(message);
    any = true;
  }
  return any;
}

void Core::handle(const CoreMessage& message) {
  CoreJob& job = *message.job;
  CoreReport report;
  switch (message.type) {
    case CoreMessage::kAddJob:
      PHUB_CHECK(jobs_.size() < kMaxJobs);
      jobs_.push_back(&job);
      watch(epoll_fd_, job.wake_fd());
      report.type = CoreReport::kAdded;
      break;
    case CoreMessage::kRemoveJob:
      forward_reports();
      std::erase(jobs_, &job);
      job.detach_all();
      if (job.wake_fd() >= 0) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, job.wake_fd(), nullptr);
      report.type = CoreReport::kRemoved;
      break;
    case CoreMessage::kHold:
      report = job.hold();
      break;
    case CoreMessage::kCommit:
      job.commit(*message.boundary);
      report.type = CoreReport::kCommitted;
      break;
    case CoreMessage::kProbe:
      job.probe(*message.probe);
      report.type = CoreReport::kProbed;
      break;
    case CoreMessage::kDetach:
      job.detach(message.rank);
      report.type = CoreReport::kDetached;
      report.rank = message.rank;
      break;
    case CoreMessage::kAttach:
      job.reattach(message.rank, message.incarnation);
      report.type = CoreReport::kAttached;
      report.rank = message.rank;
      break;
  }
  report.core = index_;
  report.job = &job;
  PHUB_CHECK(reports_.push(report));
  reported_ = true;
}

bool Core::forward_reports() {
  bool any = false;
  CoreReport report;
  for (CoreJob* job : jobs_) {
    while (reports_.room() > 1 && job->next_report(report)) {
      reports_.push(report);
      reported_ = any = true;
    }
  }
  return any;
}

void Core::run(const std::stop_token& stop, int spin_us) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point idle_since = Clock::now();
  bool idle = false;
  while (!stop.stop_requested()) {
    if (step()) {
      idle = false;
      continue;
    }
    if (spin_us > 0) {
      if (!idle) {
        idle = true;
        idle_since = Clock::now();
      }
      if (Clock::now() - idle_since < std::chrono::microseconds(spin_us)) {
        __builtin_ia32_pause();
        continue;
      }
    }
    sleep();
    idle = false;
  }
}

bool Core::arm(int& timeout_ms) {
  asleep_.store(true, std::memory_order_seq_cst);
  bool nothing_to_do = mailbox_.empty();
  timeout_ms = -1;
  while (nothing_to_do && armed_ < jobs_.size()) {
    CoreJob& job = *jobs_[armed_++];
    nothing_to_do = job.arm();
    if (job.owes()) timeout_ms = 1;  // a full queue: nobody rings when it has room
  }
  return nothing_to_do;
}

void Core::disarm() {
  while (armed_ > 0) jobs_[--armed_]->disarm();
  asleep_.store(false, std::memory_order_relaxed);
}

void Core::sleep() {
  int timeout_ms = -1;
  if (arm(timeout_ms)) {
    const TraceSpan span(trace_, {.name = "sleep", .thread = static_cast<uint16_t>(index_)});
    std::array<epoll_event, 16> events;
    const int64_t awake = usage_.asleep.load(std::memory_order_relaxed);
    const int64_t since = now_ns();
    usage_.asleep.store(awake - 2 * since + 1, std::memory_order_relaxed);
    epoll_wait(epoll_fd_, events.data(), events.size(), timeout_ms);
    usage_.asleep.store(awake + 2 * (now_ns() - since), std::memory_order_relaxed);
    add(usage_.sleeps, 1);
  }
  disarm();
}

CoreUsage Core::usage() const {
  CoreUsage usage{.busy_passes = usage_.busy_passes.load(std::memory_order_relaxed),
                  .idle_passes = usage_.idle_passes.load(std::memory_order_relaxed),
                  .sleeps = usage_.sleeps.load(std::memory_order_relaxed)};
  const int64_t asleep = usage_.asleep.load(std::memory_order_relaxed);
  const bool now_asleep = (asleep & 1) != 0;
  usage.asleep_ns = static_cast<uint64_t>((asleep >> 1) + (now_asleep ? now_ns() : 0));
  return usage;
}

}  // namespace phub

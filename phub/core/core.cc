#include "phub/core/core.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "numa/relax.h"
#include "transport/error.h"

namespace phub {
namespace {

constexpr uint32_t kIdlePasses = 64;        // beside others that have work
constexpr uint32_t kPassesWithoutLook = 4;  // at the jobs that were put aside
constexpr uint64_t kTogetherFromMs = 1024;  // longer than the wait for any budget
constexpr uint64_t kTogetherMs = 500;

void ring(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(fd, &one, sizeof one);
}

// `job` is woken by it; null: the mailbox is.
void watch(int epoll_fd, int fd, CoreJob* job) {
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {.ptr = job}};
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

Core::Core(uint32_t index, const Clock& clock) : index_(index), clock_(clock) {
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  mailbox_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  report_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (epoll_fd_ < 0 || mailbox_fd_ < 0 || report_fd_ < 0) {
    fail(ErrorCode::kFull, "core {}: no file descriptor left ({}); raise ulimit -n", index,
         std::strerror(errno));
  }
  watch(epoll_fd_, mailbox_fd_, nullptr);
  jobs_.reserve(kMaxJobs);
  awake_.reserve(kMaxJobs);
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

template <typename Action>
bool Core::for_job(CoreJob& job, const Action& action) {
  try {
    return action();
  } catch (const std::exception& error) {
    job.fail(error.what());
  } catch (...) {
    job.fail("an exception of an unknown type");
  }
  return true;
}

bool Core::step() {
  bool moved = read_mailbox();
  moved |= serve_jobs();
  moved |= forward_reports();
  if (std::exchange(reported_, false)) ring(report_fd_);
  add(moved ? usage_.busy_passes : usage_.idle_passes, 1);
  return moved;
}

// Every job that is awake in turn.
bool Core::serve_jobs() {
  if (awake_.size() < jobs_.size() && ++passes_ >= kPassesWithoutLook) look_for_events(0);
  bool moved = false, waiting = false;
  for (CoreJob* job : awake_) {
    CoreJob::Turn& turn = job->turn;
    turn.bytes -= std::min(turn.bytes, CoreJob::kPassBytes);
    turn.moved = false;
    if (turn.bytes >= CoreJob::kPassBytes) {
      waiting = true;
      continue;
    }
    turn.moved = for_job(*job, [&] { return job->step(turn.bytes); });
    moved |= turn.moved;
  }
  if (!moved) {
    // No other job has work, so none waits for them.
    for (CoreJob* job : awake_) job->turn.bytes = 0;
    return waiting;
  }
  for (size_t i = awake_.size(); i-- > 0;) {
    CoreJob& job = *awake_[i];
    job.turn.idle_passes = job.turn.moved ? 0 : job.turn.idle_passes + 1;
    if (job.turn.idle_passes < kIdlePasses || job.wake_fd() < 0) continue;
    job.turn.idle_passes = 0;
    if (!for_job(job, [&job] { return !job.arm(); })) {
      find_retry(job);
      put_aside(i);
    } else {
      job.disarm();
    }
  }
  return true;
}

// The job is armed; the core leaves it alone until it is woken, or until its next retry.
void Core::put_aside(size_t index) {
  CoreJob& job = *awake_[index];
  job.turn.awake = false;
  note_retry(job);
  awake_[index] = awake_.back();
  awake_.pop_back();
}

// Sets the time at which the job retries owed results. Returns the milliseconds until then; -1: it
// owes none.
int Core::find_retry(CoreJob& job) const {
  uint64_t& at = job.turn.retry_ms;
  at = 0;
  if (!job.owes()) return -1;
  const uint64_t ms = job.retry_ms();
  const uint64_t now = clock_.now_ms();
  at = now + ms;
  // Jobs that have waited for long try again together: to wake up costs more than to try.
  if (ms >= kTogetherFromMs) at = (at / kTogetherMs + 1) * kTogetherMs;
  return static_cast<int>(at - now);
}

void Core::note_retry(const CoreJob& job) {
  const uint64_t at = job.turn.retry_ms;
  if (at != 0 && (next_retry_ms_ == 0 || at < next_retry_ms_)) next_retry_ms_ = at;
}

// Those that owe something and whose time has come.
void Core::wake_debtors() {
  if (next_retry_ms_ == 0) return;
  const uint64_t now = clock_.now_ms();
  if (now < next_retry_ms_) return;
  next_retry_ms_ = 0;
  for (CoreJob* job : jobs_) {
    CoreJob::Turn& turn = job->turn;
    if (turn.awake || turn.retry_ms == 0) continue;
    if (turn.retry_ms > now) {
      note_retry(*job);
      continue;
    }
    wake_up(*job);
    turn.idle_passes = kIdlePasses - 1;  // its first pass tells
  }
}

void Core::wake_up(CoreJob& job) {
  if (std::exchange(job.turn.awake, true)) return;
  job.disarm();
  awake_.push_back(&job);
}

void Core::look_for_events(int timeout_ms) {
  passes_ = 0;
  std::array<epoll_event, 64> events;
  for (int count = static_cast<int>(events.size()); count == static_cast<int>(events.size());) {
    count = epoll_wait(epoll_fd_, events.data(), events.size(), timeout_ms);
    for (int i = 0; i < count; ++i) {
      auto* job = static_cast<CoreJob*>(events[i].data.ptr);
      if (job == nullptr) continue;
      job->rung();
      wake_up(*job);
    }
    timeout_ms = 0;
  }
  wake_debtors();
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

// Every message is answered, whatever becomes of the job: the control thread counts the answers.
void Core::handle(const CoreMessage& message) {
  CoreReport report;
  for_job(*message.job, [&] {
    carry_out(message, report);
    return true;
  });
  report.core = index_;
  report.job = message.job;
  PHUB_CHECK(reports_.push(report));
  reported_ = true;
}

// The report names the message that it answers before the message is carried out.
void Core::carry_out(const CoreMessage& message, CoreReport& report) {
  CoreJob& job = *message.job;
  // A probe changes nothing, but may find arrivals for which the core was not woken.
  const bool probes = message.type == CoreMessage::kProbe;
  if (message.type != CoreMessage::kAddJob && (!probes || job.waits_for_one())) wake_up(job);
  if (!probes) job.rung();  // ranks with owed results may have new queues
  report.rank = message.rank;
  switch (message.type) {
    case CoreMessage::kAddJob:
      PHUB_CHECK(jobs_.size() < kMaxJobs);
      report.type = CoreReport::kAdded;
      jobs_.push_back(&job);
      awake_.push_back(&job);
      job.turn.awake = true;
      watch(epoll_fd_, job.wake_fd(), &job);
      for (const int fd : job.way_fds()) watch(epoll_fd_, fd, &job);
      watch(epoll_fd_, job.input_fd(), &job);
      break;
    case CoreMessage::kRemoveJob:
      report.type = CoreReport::kRemoved;
      forward_reports();
      std::erase(jobs_, &job);
      std::erase(awake_, &job);
      for (const int fd :
           {job.wake_fd(), job.way_fds().front(), job.way_fds().back(), job.input_fd()}) {
        if (fd >= 0) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
      }
      job.detach_all();
      break;
    case CoreMessage::kHold:
      report = job.hold();
      break;
    case CoreMessage::kCommit:
      report.type = CoreReport::kCommitted;
      report.min_round = job.commit(*message.boundary);
      break;
    case CoreMessage::kProbe:
      report.type = CoreReport::kProbed;
      job.probe(*message.probe);
      break;
    case CoreMessage::kDetach:
      report.type = CoreReport::kDetached;
      job.detach(message.rank);
      break;
    case CoreMessage::kAttach:
      report.type = CoreReport::kAttached;
      job.reattach(message.rank, message.incarnation);
      break;
  }
}

bool Core::forward_reports() {
  bool any = false;
  CoreReport report;
  for (CoreJob* job : awake_) {
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
        numa::relax();
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
  while (nothing_to_do && armed_ < awake_.size()) {
    CoreJob& job = *awake_[armed_++];
    nothing_to_do = !for_job(job, [&job] { return !job.arm(); });
  }
  timeout_ms = -1;
  if (!nothing_to_do) return false;
  const auto within = [&timeout_ms](int ms) {
    if (ms >= 0) timeout_ms = timeout_ms < 0 ? ms : std::min(timeout_ms, ms);
  };
  for (CoreJob* job : awake_) within(find_retry(*job));
  if (next_retry_ms_ != 0) {  // for a job that was put aside before
    const uint64_t now = clock_.now_ms();
    within(static_cast<int>(std::max(next_retry_ms_, now) - now));
  }
  return true;
}

bool Core::is_called() const {
  return !mailbox_.empty() || std::ranges::any_of(jobs_, &CoreJob::is_called);
}

void Core::disarm() {
  while (armed_ > 0) awake_[--armed_]->disarm();
  asleep_.store(false, std::memory_order_relaxed);
}

void Core::sleep() {
  int timeout_ms = -1;
  if (arm(timeout_ms)) {
    const TraceSpan span(trace_, {.name = "sleep", .thread = static_cast<uint16_t>(index_)});
    // Jobs that stay armed are put aside: an arrival for one of them wakes that one alone.
    for (size_t i = awake_.size(); i-- > 0;) {
      if (awake_[i]->wake_fd() >= 0) put_aside(i);
    }
    armed_ = awake_.size();
    const int64_t awake = usage_.asleep.load(std::memory_order_relaxed);
    const int64_t since = now_ns();
    usage_.asleep.store(awake - 2 * since + 1, std::memory_order_relaxed);
    look_for_events(timeout_ms);
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

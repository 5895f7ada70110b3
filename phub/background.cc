#include "phub/background.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

template <typename T>
bool take(std::deque<T>& from, T& out) {
  if (from.empty()) return false;
  out = std::move(from.front());
  from.pop_front();
  return true;
}

}  // namespace

Background::Background(const char* name, int nice)
    : name_(name), nice_(nice), event_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (event_fd_ < 0) {
    fail(ErrorCode::kFull, "eventfd: {}; raise ulimit -n", std::strerror(errno));
  }
}

Background::~Background() {
  stop();
  close(event_fd_);
}

void Background::start() {
  thread_ = std::jthread([this](const std::stop_token& stop) {
    pthread_setname_np(pthread_self(), name_);
    if (nice_ != 0) setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), nice_);
    work(stop);
  });
}

void Background::stop() {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  thread_.join();
}

void Background::run(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  given_.notify_one();
}

void Background::work(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (given_.wait(lock, stop, [this] { return !tasks_.empty(); }) && !stop.stop_requested()) {
    Task task;
    take(tasks_, task);
    lock.unlock();
    End end = task();
    task = nullptr;  // with what it holds, which may be large
    lock.lock();
    ends_.push_back(std::move(end));
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event_fd_, &one, sizeof one);
  }
}

bool Background::finish() {
  bool any = false;
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t bytes = read(event_fd_, &count, sizeof count);
  for (;;) {
    Task task;
    End end;
    {
      const std::lock_guard lock(mutex_);
      if (!take(ends_, end) && (thread_.joinable() || !take(tasks_, task))) return any;
    }
    any = true;
    if (task) end = task();
    if (end) end();
  }
}

void Background::drop() {
  stop();
  ends_.clear();
  tasks_.clear();
}

}  // namespace phub

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

const Error kOutOfMemory(ErrorCode::kFull, "the server is out of memory");

// The first one, in a list of its own; none: an empty list.
template <typename T>
std::list<T> take(std::list<T>& from) {
  std::list<T> first;
  if (!from.empty()) first.splice(first.begin(), from, from.begin());
  return first;
}

}  // namespace

const Error& out_of_memory() { return kOutOfMemory; }

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

void Background::run(Work work, End end) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back({.work = std::move(work), .end = std::move(end)});
  given_.notify_one();
}

void Background::carry_out(Task& task) {
  task.failed = error_of([&task] { task.work(); });
  task.work = nullptr;  // frees the captures, which may be large
}

void Background::work(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (given_.wait(lock, stop, [this] { return !tasks_.empty(); }) && !stop.stop_requested()) {
    std::list<Task> task = take(tasks_);
    lock.unlock();
    carry_out(task.front());
    lock.lock();
    ended_.splice(ended_.end(), task);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event_fd_, &one, sizeof one);
  }
}

bool Background::finish() {
  bool any = false;
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t bytes = read(event_fd_, &count, sizeof count);
  for (;;) {
    std::list<Task> task;
    {
      const std::lock_guard lock(mutex_);
      task = take(ended_);
      if (task.empty() && !thread_.joinable()) task = take(tasks_);
    }
    if (task.empty()) return any;
    any = true;
    Task& first = task.front();
    if (first.work) carry_out(first);
    if (first.end) first.end(first.failed);
  }
}

void Background::drop() {
  stop();
  ended_.clear();
  tasks_.clear();
}

}  // namespace phub

#include "transport/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace phub {
namespace {

// Of the process. Never destroyed: a fork may come at any time.
class Descriptors {
 public:
  static Descriptors& instance() {
    static auto* descriptors = new Descriptors;
    return *descriptors;
  }
  void add(int fd) {
    const std::lock_guard lock(mutex_);
    if (std::exchange(of_parent_, false)) fds_.clear();
    fds_.insert(fd);
  }
  void remove(int fd) {
    const std::lock_guard lock(mutex_);
    fds_.erase(fd);
  }

 private:
  Descriptors() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().close_all(); });
  }
  // In the child, where nothing but calls that are safe in a signal handler may be made.
  void close_all() {
    // In a child's child the numbers may be those of other things by now.
    if (!std::exchange(of_parent_, true)) {
      const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
      for (const int fd : fds_) {
        if (nothing < 0 || dup3(nothing, fd, O_CLOEXEC) < 0) close(fd);
      }
      if (nothing >= 0) close(nothing);
    }
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<int> fds_;
  bool of_parent_ = false;  // this is a child, and fds_ what was closed in it
};

}  // namespace

ClosedOnFork::ClosedOnFork(int fd) : fd_(fd) {
  if (fd_ >= 0) Descriptors::instance().add(fd_);
}

ClosedOnFork& ClosedOnFork::operator=(ClosedOnFork&& other) noexcept {
  if (this == &other) return *this;
  if (fd_ >= 0) Descriptors::instance().remove(fd_);
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

ClosedOnFork::~ClosedOnFork() {
  if (fd_ >= 0) Descriptors::instance().remove(fd_);
}

}  // namespace phub

#include "transport/fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <mutex>
#include <set>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

std::string limit_of(int resource) {
  rlimit limit = {};
  getrlimit(static_cast<__rlimit_resource>(resource), &limit);
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur);
}

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
    // In a child of that child the numbers may belong to other files by now.
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

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Fd::reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

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

void fail_system(std::string_view what, int error) {
  const std::string reason = std::strerror(error);
  switch (error) {
    case EMFILE:
    case ENFILE:
    case ETOOMANYREFS:
      fail(ErrorCode::kFull,
           "{}: {}; the limit of open files is {}, raise it with LimitNOFILE or ulimit -n", what,
           reason, limit_of(RLIMIT_NOFILE));
    case ENOMEM:
    case ENOSPC:
      fail(ErrorCode::kFull,
           "{}: {}; the address space limit is {} (ulimit -v), mappings are limited to {} "
           "(vm.max_map_count), epoll watches to {} (fs.epoll.max_user_watches); raise what is "
           "short, or give the job less memory",
           what, reason, limit_of(RLIMIT_AS), first_line("/proc/sys/vm/max_map_count"),
           first_line("/proc/sys/fs/epoll/max_user_watches"));
    case EFBIG:
      fail(ErrorCode::kFull,
           "{}: {}; the limit of a file's size, and of memory that processes share, is {} bytes, "
           "raise it with LimitFSIZE or ulimit -f",
           what, reason, limit_of(RLIMIT_FSIZE));
    default:
      fail(ErrorCode::kInternal, "{}: {}", what, reason);
  }
}

FileSizeErrors::FileSizeErrors() {
  sigset_t signals, before;
  sigemptyset(&signals);
  sigaddset(&signals, SIGXFSZ);
  blocked_ = pthread_sigmask(SIG_BLOCK, &signals, &before) == 0 &&
             sigismember(&before, SIGXFSZ) == 0;
}

FileSizeErrors::~FileSizeErrors() {
  if (!blocked_) return;
  const int error = errno;  // whoever reports it may do so after this
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGXFSZ);
  const timespec at_once = {};
  sigtimedwait(&signals, nullptr, &at_once);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  errno = error;
}

void raise_file_limit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace phub

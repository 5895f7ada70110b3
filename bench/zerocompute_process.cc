#include "bench/zerocompute_process.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

#include "transport/error.h"

namespace phub {

Child::Child(const std::function<int()>& body, int parent_died) {
  const pid_t parent = getpid();
  // What is in the buffers now would be printed twice.
  std::fflush(nullptr);
  pid_ = fork();
  if (pid_ < 0) fail(ErrorCode::kFull, "cannot start a process: {}", std::strerror(errno));
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, parent_died);
    if (getppid() != parent) _exit(1);  // it ended before the line above
    const int status = body();
    std::fflush(nullptr);
    _exit(status);
  }
  fd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  if (fd_ < 0) {
    const int error = errno;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    fail(ErrorCode::kFull, "pidfd_open: {}", std::strerror(error));
  }
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      fd_(std::exchange(other.fd_, -1)),
      how_(std::move(other.how_)) {}

Child::~Child() {
  if (fd_ < 0) return;
  if (!ended()) {
    send(SIGKILL);
    wait(-1);
  }
  close(fd_);
}

std::optional<std::string> Child::ended() {
  if (how_) return how_;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  if (WIFSIGNALED(status)) {
    how_ = fmt::format("killed by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  } else if (WEXITSTATUS(status) != 0) {
    how_ = fmt::format("exit status {}", WEXITSTATUS(status));
  } else {
    how_ = "";
  }
  return how_;
}

bool Child::wait(int limit_ms) {
  pollfd watched{.fd = fd_, .events = POLLIN, .revents = 0};
  while (!ended()) {
    const int ready = poll(&watched, 1, limit_ms);
    if (ready == 0) return ended().has_value();
    if (ready < 0 && errno != EINTR) return false;
  }
  return true;
}

void Child::send(int signal) {
  if (!how_) syscall(SYS_pidfd_send_signal, fd_, signal, nullptr, 0);
}

}  // namespace phub

#include "worker/examples/processes.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/error.h"

namespace phub {
namespace {

constexpr int kStartLimitMs = 10000;
constexpr int kStopLimitMs = 5000;

// In the child: becomes the server.
int become(std::vector<std::string> words, int output_fd) {
  dup2(output_fd, STDOUT_FILENO);
  dup2(output_fd, STDERR_FILENO);
  std::signal(SIGINT, SIG_IGN);  // its parent stops it
  std::signal(SIGTERM, SIG_DFL);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  std::fprintf(stderr, "%s: %s\n", argv[0], std::strerror(errno));
  return 127;
}

// The text after "listening on", once the line is complete; "" before.
std::string find_address(const std::string& text) {
  constexpr std::string_view kBefore = "listening on ";
  const size_t at = text.find(kBefore);
  const size_t end = at == std::string::npos ? at : text.find('\n', at);
  if (end == std::string::npos) return "";
  return text.substr(at + kBefore.size(), end - at - kBefore.size());
}

}  // namespace

Child::Child(const std::function<int()>& body, int parent_died) {
  const pid_t parent = getpid();
  // Buffered output would be printed twice.
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

OwnServer::OwnServer(const std::string& binary, const std::string& transport,
                     const std::vector<std::string>& arguments) {
  std::vector<std::string> words{binary, "serve", "--listen", "127.0.0.1:0"};
  if (transport == "tcp" || transport == "verbs" || transport == "ofi") {
    words.insert(words.end(), {"--transports", transport});
  }
  words.insert(words.end(), arguments.begin(), arguments.end());
  output_fd_ = memfd_create("server-output", MFD_CLOEXEC);
  if (output_fd_ < 0) fail(ErrorCode::kFull, "memfd_create: {}", std::strerror(errno));
  child_ = std::make_unique<Child>([&] { return become(words, output_fd_); }, SIGTERM);
  for (int waited_ms = 0; waited_ms < kStartLimitMs; waited_ms += 10) {
    const bool ended = child_->wait(10);
    address_ = find_address(output());
    if (ended) {
      fail(ErrorCode::kUnavailable, "the server '{}' ended at once ({}): {}", binary,
           *child_->ended(), output());
    }
    if (!address_.empty()) return;
  }
  fail(ErrorCode::kUnavailable, "the server '{}' did not say within {} s where it listens: {}",
       binary, kStartLimitMs / 1000, output());
}

OwnServer::~OwnServer() {
  if (child_) {
    child_->send(SIGTERM);
    child_->wait(kStopLimitMs);
  }
  child_.reset();
  if (output_fd_ >= 0) close(output_fd_);
}

std::string OwnServer::output() const {
  std::array<char, 16384> text;
  const ssize_t n = pread(output_fd_, text.data(), text.size(), 0);
  return {text.data(), n > 0 ? static_cast<size_t>(n) : 0};
}

std::string beside_this_program(const std::string& name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}

}  // namespace phub

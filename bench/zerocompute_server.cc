#include "bench/zerocompute_server.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string_view>
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
  std::signal(SIGINT, SIG_IGN);  // it stops when its owner says so
  std::signal(SIGTERM, SIG_DFL);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  std::fprintf(stderr, "%s: %s\n", argv[0], std::strerror(errno));
  return 127;
}

// What stands behind "listening on", once its line is complete; "" before.
std::string find_address(const std::string& text) {
  constexpr std::string_view kBefore = "listening on ";
  const size_t at = text.find(kBefore);
  const size_t end = at == std::string::npos ? at : text.find('\n', at);
  if (end == std::string::npos) return "";
  return text.substr(at + kBefore.size(), end - at - kBefore.size());
}

}  // namespace

OwnServer::OwnServer(const std::string& binary, const std::string& transport,
                     const std::string& arguments) {
  std::vector<std::string> words{binary, "serve", "--listen", "127.0.0.1:0"};
  if (transport == "tcp" || transport == "verbs") {
    words.insert(words.end(), {"--transports", transport});
  }
  std::istringstream more(arguments);
  for (std::string word; more >> word;) words.push_back(word);
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

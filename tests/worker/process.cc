#include "tests/worker/process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <thread>

namespace phub::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPause{2};

}  // namespace

Process::Process(const std::vector<std::string>& command, const std::string& output)
    : output_(output) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const int file = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) throw std::runtime_error(output + ": " + std::strerror(errno));
  pid_ = fork();
  if (pid_ < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  close(file);
}

Process::~Process() {
  if (status_) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void Process::send(int signal) {
  if (!status_) kill(pid_, signal);
}

std::optional<int> Process::wait(milliseconds limit) {
  const auto until = steady_clock::now() + limit;
  while (!status_) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    } else if (steady_clock::now() >= until) {
      break;
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
  return status_;
}

std::string Process::output() const {
  std::ifstream file(output_, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool Process::printed(const std::string& text, milliseconds limit) {
  const auto until = steady_clock::now() + limit;
  while (output().find(text) == std::string::npos) {
    if (wait(kPause) || steady_clock::now() >= until) {
      return output().find(text) != std::string::npos;
    }
  }
  return true;
}

std::string Process::listening_address(milliseconds limit) {
  const std::string before = "listening on ";
  const auto until = steady_clock::now() + limit;
  for (;;) {
    const bool over = wait(kPause) || steady_clock::now() >= until;
    const std::string text = output();
    const size_t begin = text.find(before);
    const size_t end = text.find('\n', begin);
    if (begin != text.npos && end != text.npos) {
      return text.substr(begin + before.size(), end - begin - before.size());
    }
    if (over) throw std::runtime_error("phub serve does not listen: " + text);
  }
}

}  // namespace phub::testing

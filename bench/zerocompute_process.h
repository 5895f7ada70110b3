// Child processes that never outlive their parent.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>

namespace phub {

class Child {
 public:
  // Forks and runs `body` in the child, whose return value is the exit status. The kernel sends the
  // child `parent_died` when this process ends in whatever way. Throws Error(kFull) if the kernel
  // refuses. REQUIRES: the calling process has one thread.
  Child(const std::function<int()>& body, int parent_died);
  ~Child();  // kills and reaps a child that is still there
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;

  // Readable (poll) when the child has ended.
  int fd() const { return fd_; }
  // How it ended ("exit status 1", "killed by signal 9"), "" if it succeeded; nothing while it
  // runs.
  std::optional<std::string> ended();
  // Waits for the end, up to `limit_ms`. False if it still runs.
  bool wait(int limit_ms);
  void send(int signal);
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int fd_ = -1;
  std::optional<std::string> how_;
};

}  // namespace phub

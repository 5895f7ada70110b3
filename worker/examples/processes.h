// Child processes: a forked child, and a phub server for the time of a measurement.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace phub {

// A forked child.
class Child {
 public:
  // Forks and runs `body` in the child; its return value is the exit status. When this process
  // ends, in whatever way, the kernel sends the child the signal `parent_died`. Throws Error(kFull)
  // if fork() fails. REQUIRES: the calling process has one thread.
  Child(const std::function<int()>& body, int parent_died);
  ~Child();  // kills a child that still runs, and reaps it
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;

  // Readable (poll) when the child has ended.
  int fd() const { return fd_; }
  // Returns its end: "exit status 1", "killed by signal 9", or "" for success. Returns nullopt if
  // it still runs.
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

// A phub server as a child process.
class OwnServer {
 public:
  // Runs `binary serve --listen 127.0.0.1:0 arguments` with shm and `transport`, and waits until it
  // prints its address. Throws Error(kUnavailable), with its output, if it does not within ten
  // seconds.
  OwnServer(const std::string& binary, const std::string& transport,
            const std::vector<std::string>& arguments);
  ~OwnServer();  // asks it to stop, waits, then kills it

  const std::string& address() const { return address_; }
  pid_t pid() const { return child_->pid(); }
  // Its output so far.
  std::string output() const;

 private:
  int output_fd_ = -1;  // a memfd: the server never waits for a reader
  std::unique_ptr<Child> child_;
  std::string address_;
};

// The file `name` in the folder of the running program.
std::string beside_this_program(const std::string& name);

}  // namespace phub

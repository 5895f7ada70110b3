// A program that a test starts. It is killed when the object goes, and with the test's own process.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace phub::testing {

class Process {
 public:
  // Standard output and errors go to the file `output`. Throws std::runtime_error.
  Process(const std::vector<std::string>& command, const std::string& output);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal);
  // Its exit status, minus the signal if one ended it, or nothing if it goes on.
  std::optional<int> wait(std::chrono::milliseconds limit);
  // What it has printed so far.
  std::string output() const;
  // Waits until it has printed `text`. False: it ended, or the limit is over.
  bool printed(const std::string& text, std::chrono::milliseconds limit);
  // Of phub serve: where it listens, once it does. Throws std::runtime_error with what it printed.
  std::string listening_address(std::chrono::milliseconds limit = std::chrono::minutes(1));

 private:
  pid_t pid_ = -1;
  std::optional<int> status_;
  std::string output_;
};

}  // namespace phub::testing

// bin/phub serve, with two cores if not said otherwise, in a process of its own that can be
// stopped.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/options.h"
#include "tests/worker/process.h"

namespace phub::testing {

class ServerProcess {
 public:
  // REQUIRES: `program` is the path of phub. `flags`: more of phub serve. `listen`: on a free port,
  // or where another one listened: for a moment that port may be somebody else's, so this tries
  // again. `topology`: of the box, in hwloc's synthetic form. `launcher`: the words before the
  // command, of a program that becomes it.
  explicit ServerProcess(const std::string& program, const std::vector<std::string>& flags = {},
                         const std::string& listen = "127.0.0.1:0",
                         const std::string& topology = "pack:1 core:2 pu:1",
                         const std::vector<std::string>& launcher = {})
      : folder_(std::filesystem::temp_directory_path() /
                ("phub-server-" + std::to_string(getpid()) + "-" + std::to_string(next_++))),
        made_(std::filesystem::create_directory(folder_)) {
    const auto words = command(launcher, program, flags, listen, topology);
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    for (;;) {
      process_.emplace(words, folder_ / "output");
      try {
        address_ = process_->listening_address();
        return;
      } catch (const std::runtime_error& error) {
        const bool taken = std::string(error.what()).find(" in use") != std::string::npos;
        if (!taken || std::chrono::steady_clock::now() > until) throw;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  ~ServerProcess() {
    if (!ended_) {
      EXPECT_EQ(end(SIGTERM), 0) << process_->output();
    }
    std::filesystem::remove_all(folder_);
  }

  // Its exit status, or minus the signal if that ended it.
  std::optional<int> end(int signal) {
    ended_ = true;
    process_->send(SIGCONT);
    process_->send(signal);
    return process_->wait(std::chrono::seconds(120));
  }
  std::string output() const { return process_->output(); }
  // It has printed this, or does so within a minute.
  bool printed(const std::string& text) {
    return process_->printed(text, std::chrono::seconds(60));
  }

  const std::string& address() const { return address_; }
  std::string port() const { return address_.substr(address_.rfind(':') + 1); }
  pid_t pid() const { return process_->pid(); }
  void stop() { process_->send(SIGSTOP); }  // neither answers nor ends
  void go_on() { process_->send(SIGCONT); }
  WorkerOptions options(JobSpec spec) const { return options_of(address_, std::move(spec)); }

 private:
  static std::vector<std::string> command(std::vector<std::string> command,
                                          const std::string& program,
                                          const std::vector<std::string>& flags,
                                          const std::string& listen, const std::string& topology) {
    command.insert(command.end(), {program, "serve", "--listen", listen, "--topology", topology,
                                   "--pin", "false"});
    command.insert(command.end(), flags.begin(), flags.end());
    // Its writer is nice, and yields to whatever else this machine does.
    const std::string limit = "--save-limit-ms";
    if (std::ranges::count(command, limit) == 0) command.insert(command.end(), {limit, "60000"});
    return command;
  }

  inline static std::atomic<int> next_ = 0;
  const std::filesystem::path folder_;
  const bool made_;
  std::optional<Process> process_;
  std::string address_;
  bool ended_ = false;
};

}  // namespace phub::testing

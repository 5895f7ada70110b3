// bin/phub serve with two cores, in a process of its own that can be stopped.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <string>

#include "tests/worker/options.h"
#include "tests/worker/process.h"

namespace phub::testing {

class ServerProcess {
 public:
  // REQUIRES: `program` is the path of phub.
  explicit ServerProcess(const std::string& program)
      : folder_(std::filesystem::temp_directory_path() /
                ("phub-server-" + std::to_string(getpid()) + "-" + std::to_string(next_++))),
        made_(std::filesystem::create_directory(folder_)),
        process_({program, "serve", "--listen", "127.0.0.1:0", "--topology", "pack:1 core:2 pu:1",
                  "--pin", "false"},
                 folder_ / "output") {
    EXPECT_TRUE(process_.printed("listening on", std::chrono::seconds(30))) << process_.output();
    const std::string output = process_.output();
    const size_t at = output.find("listening on ") + std::strlen("listening on ");
    address_ = output.substr(at, output.find('\n', at) - at);
  }
  ~ServerProcess() {
    process_.send(SIGCONT);
    process_.send(SIGTERM);
    EXPECT_EQ(process_.wait(std::chrono::seconds(30)), 0) << process_.output();
    std::filesystem::remove_all(folder_);
  }

  const std::string& address() const { return address_; }
  std::string port() const { return address_.substr(address_.rfind(':') + 1); }
  pid_t pid() const { return process_.pid(); }
  void stop() { process_.send(SIGSTOP); }  // neither answers nor ends
  void go_on() { process_.send(SIGCONT); }
  WorkerOptions options(JobSpec spec) const { return options_of(address_, std::move(spec)); }

 private:
  inline static std::atomic<int> next_ = 0;
  const std::filesystem::path folder_;
  const bool made_;
  Process process_;
  std::string address_;
};

}  // namespace phub::testing

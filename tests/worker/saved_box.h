// A server that saves its jobs, in a process that is killed, and ranks that live through it.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/options.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"
#include "transport/control/control_client.h"
#include "worker/link/join.h"
#include "worker/worker.h"

namespace phub::testing {

class SavedBoxTest : public ::testing::Test {
 public:
  // Trains until `train` returns, whatever happens to the server: after each rewind it is called
  // again, with a worker that joined again. `anew`: as that of a new process would. `below`: the
  // server is the parent of the box that the rank is at, which says that in its own words.
  static void through_rewinds(const WorkerOptions& options, bool anew,
                              const std::function<void(Worker& worker)>& train,
                              bool below = false) {
    std::unique_ptr<Worker> worker = join(options);
    for (;;) {
      try {
        return train(*worker);
      } catch (const Error& error) {
        const bool of_rack = below && may_rejoin_after(error);
        if (error.code() != ErrorCode::kRewound && !of_rack) {
          ADD_FAILURE() << "rank " << options.rank << ": " << error.what();
          return;
        }
      }
      if (anew) {
        worker.reset();
        worker = join(options);
      } else {
        worker = worker->rejoin();
      }
    }
  }

 protected:
  // `program`: the path of phub. `room_bytes`: of its checkpoints.
  explicit SavedBoxTest(std::string program, uint64_t room_bytes = uint64_t{256} << 20)
      : program_(std::move(program)), directory_(TemporaryDirectory::in_memory(room_bytes)) {}
  void serve(uint64_t every, const std::string& listen = "127.0.0.1:0") {
    std::vector<std::string> flags = {"--checkpoints", folder(), "--checkpoint-every",
                                      std::to_string(every)};
    flags.insert(flags.end(), more_flags_.begin(), more_flags_.end());
    server_.emplace(program_, flags, listen);
  }
  std::string folder() const { return directory_.path() + "/checkpoints"; }
  void die_and_come_back(uint64_t every) {
    const std::string address = server_->address();
    EXPECT_EQ(server_->end(SIGKILL), -SIGKILL);
    serve(every, address);
  }
  WorkerOptions options(const JobSpec& spec, int32_t rank) const {
    WorkerOptions options = options_of(server_->address(), spec);
    options.rank = rank;
    options.connect_timeout_ms = 60'000;
    return options;
  }
  JobStatus status(const std::string& job) const {
    for (JobStatus& status : ControlClient(server_->address()).status().jobs) {
      if (status.name == job) return status;
    }
    return {};
  }
  bool becomes_status(const std::string& job,
                      const std::function<bool(const JobStatus& status)>& condition) const {
    return becomes([&] { return condition(status(job)); }, std::chrono::seconds(120));
  }

  const std::string program_;
  std::vector<std::string> more_flags_;  // of phub serve
  const TemporaryDirectory directory_;
  std::optional<ServerProcess> server_;

 private:
  // The server may be dead, or have the rank's old incarnation.
  static std::unique_ptr<Worker> join(const WorkerOptions& options) {
    for (;;) {
      try {
        return std::make_unique<Worker>(options);
      } catch (const Error& error) {
        const ErrorCode code = error.code();
        const bool passes = code == ErrorCode::kUnavailable || code == ErrorCode::kTimeout ||
                            code == ErrorCode::kRewound || code == ErrorCode::kTaken ||
                            code == ErrorCode::kRankLost;
        if (!passes) throw;
      }
    }
  }
};

}  // namespace phub::testing

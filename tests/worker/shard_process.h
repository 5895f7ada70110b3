// `phub serve --join`, as a process.
#pragma once

#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <vector>

#include "tests/worker/process.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"
#include "transport/control/http_client.h"

namespace phub::testing {

// Of the servers of tests that kill shards: not for long, yet longer than a busy machine holds one
// up. A shard must live until its server has ended, or the server waits for it for so long.
inline const Flags kShortShardLease = {"--shard-lease-ms", "4000"};

class ShardProcess {
 public:
  // `flags`: more of phub serve.
  ShardProcess(const std::string& program, const std::string& server, const Flags& flags = {})
      : process_(command(program, server, flags), directory_.path() + "/output") {}
  void end(int signal) {
    process_.send(signal);
    EXPECT_TRUE(process_.wait(kLong).has_value()) << process_.output();
  }
  void stop() { process_.send(SIGSTOP); }
  void go_on() { process_.send(SIGCONT); }
  std::string output() const { return process_.output(); }
  // The status of GET `path` at its own control port.
  unsigned answers(const std::string& path) {
    return HttpClient(process_.listening_address()).request("GET", path, "", "", 30000).status;
  }

 private:
  static std::vector<std::string> command(const std::string& program, const std::string& server,
                                          const Flags& flags) {
    std::vector<std::string> words = {
        program,       "serve",        "--join", server,       "--listen",
        "127.0.0.1:0", "--transports", "tcp",    "--topology", "pack:1 core:2 pu:1",
        "--pin",       "false"};
    words.insert(words.end(), flags.begin(), flags.end());
    return words;
  }

  const TemporaryDirectory directory_;
  Process process_;
};

}  // namespace phub::testing

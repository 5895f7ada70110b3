// A phub server of one's own, for the time of a measurement.
#pragma once

#include <memory>
#include <string>

#include "bench/zerocompute_process.h"

namespace phub {

class OwnServer {
 public:
  // Runs `binary serve --listen 127.0.0.1:0 arguments`, for shm or also for another transport, and
  // waits until it says where it listens. Throws Error(kUnavailable) with what it printed when it
  // does not come up within ten seconds.
  OwnServer(const std::string& binary, const std::string& transport, const std::string& arguments);
  ~OwnServer();  // asks it to stop, waits, then kills it

  const std::string& address() const { return address_; }
  pid_t pid() const { return child_->pid(); }
  // What it has printed so far.
  std::string output() const;

 private:
  int output_fd_ = -1;  // a memfd: the server never waits for a reader
  std::unique_ptr<Child> child_;
  std::string address_;
};

// The file `name` in the folder of the running program.
std::string beside_this_program(const std::string& name);

}  // namespace phub

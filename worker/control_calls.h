// A worker's calls to the control port. Each has a connection of its own while it lasts, and all of
// them end with the worker: nothing waits for a server that is gone, or for other ranks after
// leave().
#pragma once

#include <list>
#include <mutex>
#include <string>

#include "transport/control_client.h"

namespace phub {

// Thread-safe.
class ControlCalls {
 public:
  explicit ControlCalls(std::string server) : server_(std::move(server)) {}

  // Returns body(client). Throws what that throws, and Error(kUnavailable) once cancel() was
  // called.
  template <typename Body>
  auto call(Body body) {
    const Running running(*this);
    return body(*running.client);
  }

  // Ends the calls that are under way and every later one.
  void cancel();

 private:
  using Clients = std::list<ControlClient>;
  struct Running {
    explicit Running(ControlCalls& calls);
    ~Running();
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ControlCalls& all;
    Clients::iterator client;
  };

  const std::string server_;
  std::mutex mutex_;
  Clients running_, idle_;  // guarded by mutex_; at most one is kept for the next call
  bool cancelled_ = false;  // guarded by mutex_
};

}  // namespace phub

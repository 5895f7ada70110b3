// A worker's calls to the control port. Each uses a connection of its own. cancel() ends all of
// them, so that after leave() nothing waits for other ranks or a server that is gone.
#pragma once

#include <list>
#include <mutex>
#include <string>

#include "transport/control/control_client.h"

namespace phub {

// Thread-safe.
class ControlCalls {
 public:
  ControlCalls(std::string server, std::string token, ClientTls tls)
      : server_(std::move(server)), token_(std::move(token)), tls_(std::move(tls)) {}

  // Returns body(client). Throws its exceptions, and Error(kUnavailable) after cancel().
  template <typename Body>
  auto call(Body body) {
    const Running running(*this);
    return body(*running.client);
  }

  // Ends the calls in progress and every later one.
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
  const std::string token_;
  const ClientTls tls_;
  std::mutex mutex_;
  Clients running_, idle_;  // guarded by mutex_; idle_ has at most one, for the next call
  bool cancelled_ = false;  // guarded by mutex_
};

}  // namespace phub

// The rank at the other end of a connection of the control port.
#pragma once

#include <optional>

#include "phub/control/http_shared.h"
#include "phub/control/router.h"

namespace phub {

// Who sends heartbeats over a connection, and who waits there in a barrier: the handler is told
// when the connection ends. An HttpSession owns it. Control thread only.
class ConnectedRank {
 public:
  // REQUIRES: both outlive this.
  ConnectedRank(HttpShared& shared, const HttpPeer& peer);
  ~ConnectedRank();
  ConnectedRank(const ConnectedRank&) = delete;
  ConnectedRank& operator=(const ConnectedRank&) = delete;

  void asked(Routed routed);  // a request was routed
  // The connection was closed, not reset or timed out: by the peer's process, or by its kernel when
  // that process ended. Tells the handler, unless its heartbeats come over another one, too.
  void closed();
  void waits_no_more();  // nobody needs the answer to the barrier call

 private:
  HttpShared& shared_;
  const HttpPeer& peer_;
  std::optional<Credential> beats_;
  std::optional<Credential> waits_;  // the sender of a barrier call in progress
};

}  // namespace phub

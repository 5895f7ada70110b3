// What all connections of the control port share, and what is known of the peer of each.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>

#include "phub/control/metrics.h"
#include "phub/control/port.h"
#include "phub/control/request_head.h"
#include "phub/notes.h"

namespace phub {

class ConnectedRank;
class HttpSession;

// Of a message; what such messages leave in the heap is given back to the system.
inline constexpr uint64_t kLargeMessageBytes = 1u << 20;

// Lives until the last connection of its server ends, after the server. Control thread only.
struct HttpShared {
  HttpOptions options;
  HostNames host_names;
  ControlHandler* handler = nullptr;  // null once stopped
  std::unordered_set<HttpSession*> sessions;
  std::unordered_set<const ConnectedRank*> ranks;
  uint64_t long_body_bytes = 0;  // received and not decoded yet
  uint64_t unread_bytes = 0;     // bytes of long answers that are being sent
  HttpCounters counters;
  std::function<void()> large_message_is_over = [] {};
  // Lines of the audit. Refused requests take no room from those that are done.
  std::optional<Notes> done, refused;
};

// The peer of a connection.
struct HttpPeer {
  std::string address;         // "-": it is gone
  bool over_loopback = false;  // the address that it asked for is a loopback address
  std::shared_ptr<const std::atomic<bool>> broken = nullptr;  // from TlsFront::open()
};

}  // namespace phub

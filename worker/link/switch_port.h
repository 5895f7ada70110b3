// The host, as a link through a switch sees it: datagrams, a clock, and a way to wake its thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "transport/switch/socket.h"

namespace phub {

// One thread.
class SwitchPort {
 public:
  virtual ~SwitchPort() = default;
  virtual Datagrams& datagrams() = 0;
  virtual uint64_t now_ns() const = 0;
  // Before the thread sleeps on wake_fd(): that becomes readable when something has come, at
  // `due_ns` (~0: never), and with the descriptor that the port was opened with. False: something
  // is there already.
  virtual bool arm(uint64_t due_ns) = 0;
  virtual int wake_fd() const = 0;  // -1: the thread is woken in another way
  // Whether datagrams that come from now on wake the thread.
  virtual void listen(bool listens) = 0;
  // Nothing comes any more: another may be opened in its place. (The descriptor stays.)
  virtual void give_up() = 0;
};

// With the datagrams that come to this UDP port from the side on which `box` lies; 0: to any free
// one. `link_fd`: as in SwitchPort::arm(). Throws Error(kUnavailable): the port is in use.
using OpenSwitchPort =
    std::function<std::unique_ptr<SwitchPort>(const sockaddr_in& box, uint16_t port, int link_fd)>;
std::unique_ptr<SwitchPort> open_switch_port(const sockaddr_in& box, uint16_t port, int link_fd);

}  // namespace phub

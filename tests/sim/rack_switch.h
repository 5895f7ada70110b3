// A switch that adds in a simulated rack, and what lies between it, the workers and the box. It
// runs the state machine that the program in the kernel is compiled from. Packets are lost, doubled
// and delayed on each of their two ways; it forgets, passes everything on as it is, or is silent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "phub/job/switched.h"
#include "tests/sim/rack_plan.h"
#include "tests/transport/adder.h"
#include "transport/sim/net.h"
#include "worker/link/switch_port.h"

namespace phub::sim {

class SimSwitch {
 public:
  SimSwitch(SimNet& net, const SwitchPlan& plan);

  // For the server: with datagrams of this network. Lives as long as the server.
  SwitchOptions of_box();

  // A worker's port, as the trainer sees it.
  struct Packet {
    std::vector<std::byte> bytes;
    sockaddr_in from;
  };
  struct Inbox {
    std::deque<Packet> packets;
    uint64_t timer_ns = 0;  // the port's thread is woken then
    bool is_box = false;
    bool closed = false;  // what comes wakes nobody
    uint64_t mute_until_ns = 0, deaf_until_ns = 0;
    bool wakes(uint64_t now_ns) const {
      return (!packets.empty() && !closed) || (timer_ns != 0 && now_ns >= timer_ns);
    }
  };
  // Of a worker on a host of its own. Throws Error(kUnavailable) now and then, as the plan says:
  // the port is in use.
  std::unique_ptr<SwitchPort> open_port(const std::shared_ptr<Inbox>& inbox);
  // That it has added something in.
  uint64_t generations() const { return generations_.size(); }
  // Something has come for a core of the box.
  bool wakes_box() const;

  void harm(const SwitchFault& fault);

 private:
  class Box;
  class Port;
  using Address = std::pair<uint32_t, uint16_t>;
  static Address address_of(const sockaddr_in& address);
  template <typename Action>
  void over_link(const Action& action);
  void send_from_box(std::span<const std::byte> bytes, const sockaddr_in& from,
                     const sockaddr_in& to);
  void send_from_worker(std::span<const std::byte> bytes, const sockaddr_in& from,
                        const sockaddr_in& to);
  void pass_on(const Packet& packet, const sockaddr_in& to);
  void take_part(Packet packet, const sockaddr_in& to);

  SimNet& net_;
  const SwitchPlan& plan_;
  test::PlainAdder adder_;
  std::map<Address, std::weak_ptr<Inbox>> inboxes_;
  std::set<uint64_t> generations_;
  uint16_t workers_ = 0;  // that there were
  uint64_t passes_until_ns_ = 0, silent_until_ns_ = 0;
};

}  // namespace phub::sim

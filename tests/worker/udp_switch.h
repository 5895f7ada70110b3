// A switch that adds, as a thread of the test between workers and a box of this host: it has UDP
// ports of its own, and what it runs is what the program in the kernel is compiled from. It loses,
// doubles and delays packets, both ways.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "phub/job/switched.h"
#include "tests/transport/adder.h"
#include "transport/switch/socket.h"

namespace phub::testing {

struct UdpSwitchOptions {
  uint64_t seed = 1;
  uint16_t slots = 64;
  uint32_t cores = 4;  // of the box, at most
  double loss = 0, twice = 0, late = 0;
};

class UdpSwitch {
 public:
  explicit UdpSwitch(const UdpSwitchOptions& options);
  ~UdpSwitch();
  UdpSwitch(const UdpSwitch&) = delete;
  UdpSwitch& operator=(const UdpSwitch&) = delete;

  const SwitchOptions& of_box() const { return of_box_; }

  enum class State { kAdds, kPasses, kSilent };
  void become(State state) { state_ = state; }
  void forget() { forgets_ = true; }
  uint64_t sums() const { return sums_; }  // that it has sent on, or sent again

 private:
  struct Held {
    size_t port = 0;
    std::vector<std::byte> bytes;
    sockaddr_in to{};
    uint32_t turns = 0;
  };
  void run();
  bool take(size_t port);
  void take_part(size_t port, SwitchPacket packet);
  void send(size_t port, std::span<const std::byte> bytes, const sockaddr_in& to);
  void send_late();
  bool chance(double share) { return std::uniform_real_distribution<>()(random_) < share; }

  const UdpSwitchOptions options_;
  SwitchOptions of_box_;
  std::mt19937_64 random_;
  test::PlainAdder adder_;
  std::vector<SwitchSocket> sockets_;  // by core of the box
  std::vector<sockaddr_in> box_;       // the same
  std::vector<sockaddr_in> workers_;   // that something has come from
  std::vector<Held> held_;
  std::atomic<State> state_{State::kAdds};
  std::atomic<bool> forgets_{false}, stops_{false};
  std::atomic<uint64_t> sums_{0};
  std::thread thread_;
};

}  // namespace phub::testing

// The network that kills_network makes: the box and each worker are hosts of their own, and this
// process forwards between their wires what it likes.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/transport/shm_rig.h"

namespace phub::testing {

inline constexpr const char* kBoxHost = "box";
inline constexpr const char* kBoxAddress = "10.78.0.1";

inline bool has_network() { return std::getenv("PHUB_KILLS_NETWORK") != nullptr; }

// Words that start a command on a host; none where there is no such network.
inline std::vector<std::string> on_host(const std::string& host) {
  if (!has_network()) return {};
  return {"nsenter", "--net=/run/netns/" + host};
}

// What does not come through.
struct Cut {
  std::string name;
  bool to_box, from_box;
  std::string which = "";  // in nftables' language; "": nothing comes through
};

// Cuts the wire of a host, the box's or a worker's, until it is healed. One at a time.
class CutWire {
 public:
  CutWire(const Cut& cut, const std::string& host) {
    // What comes in from the box's wire is from the box; what goes out to a worker's wire, too.
    const bool is_box = host == kBoxHost;
    std::string rules =
        "add table inet cut\n"
        "add chain inet cut wires { type filter hook forward priority 0; }\n";
    const auto drop = [&](const char* side) {
      rules +=
          fmt::format("add rule inet cut wires {} {} {} counter drop\n", side, host, cut.which);
    };
    if (cut.to_box) drop(is_box ? "oifname" : "iifname");
    if (cut.from_box) drop(is_box ? "iifname" : "oifname");
    std::ofstream(file()) << rules;
    run("nft -f " + file());
  }
  ~CutWire() { heal(); }
  CutWire(const CutWire&) = delete;
  CutWire& operator=(const CutWire&) = delete;

  void heal() {
    if (std::exchange(healed_, true)) return;
    run("nft delete table inet cut");
  }
  // REQUIRES: it is not healed.
  uint64_t dropped_packets() const {
    run("nft list table inet cut >" + file());
    std::ifstream list(file());
    uint64_t dropped = 0, packets = 0;
    for (std::string word; list >> word;) {
      if (word == "packets" && list >> packets) dropped += packets;
    }
    return dropped;
  }

 private:
  std::string file() const { return directory_.path() + "/rules"; }
  static void run(const std::string& command) {
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  }

  const TemporaryDirectory directory_;
  bool healed_ = false;
};

}  // namespace phub::testing

#include "phub/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/error.h"

namespace phub {
namespace machine_test {

using ::testing::ElementsAre;

// A transport with these ports, which is never used.
class Ports : public Transport {
 public:
  explicit Ports(std::vector<NicPort> ports) : ports_(std::move(ports)) {}
  std::string_view name() const override { return "ports"; }
  std::string describe() const override { return "ports"; }
  std::vector<NicPort> ports() const override { return ports_; }
  std::unique_ptr<BoxLink> open_job(const LinkLayout&) override {
    fail(ErrorCode::kUnavailable, "no job");
  }
  int event_fd() const override { return -1; }
  void handle_events(std::vector<TransportEvent>&) override {}

 private:
  const std::vector<NicPort> ports_;
};

std::vector<std::string> places(const numa::Topology& topology, const std::vector<NicPort>& ports) {
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(std::make_unique<Ports>(ports));
  const Machine machine({.topology = topology}, std::move(transports), kSteadyClock);
  std::vector<std::string> found;
  for (const numa::NicInfo& nic : machine.topology_for(*machine.transports()[0]).nics) {
    found.push_back(nic.name + "@" + std::to_string(nic.node));
  }
  return found;
}

// Nodes 0, 4 and 6 of the operating system. Node 4 has no memory: its core and its NIC are on
// node 6, next to it.
numa::Topology with_an_empty_node() {
  numa::Topology topology;
  topology.nodes = {{.os_node = 0}, {.os_node = 4}, {.os_node = 6}};
  topology.cores = {{0, 0}, {2, 2}, {2, 1}};
  topology.nics = {{0, "mlx5_0"}, {2, "mlx5_1"}, {2, "mlx5_2"}};
  topology.source = "a test";
  return topology;
}

TEST(Machine, PortsAreOnTheNodeWhoseCoresAreNextToThem) {
  EXPECT_THAT(places(with_an_empty_node(), {{"mlx5_0", 0}, {"mlx5_1:2", 4}, {"mlx5_2", 6}}),
              ElementsAre("mlx5_0@0", "mlx5_1:2@2", "mlx5_2@2"));
  // A node that the operating system does not list, as it has neither memory nor CPUs.
  EXPECT_THAT(places(with_an_empty_node(), {{"mlx5_1", 9}, {"other", 9}}),
              ElementsAre("other@0", "mlx5_1@2"));
}

TEST(Machine, PortsOfEveryNodeAreOnEach) {
  EXPECT_THAT(places(with_an_empty_node(), {{"10.0.0.1", NicPort::kEveryNode}}),
              ElementsAre("10.0.0.1@0", "10.0.0.1@1", "10.0.0.1@2"));
}

}  // namespace machine_test
}  // namespace phub

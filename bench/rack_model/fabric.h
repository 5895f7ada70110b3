// The hardware of a scene as links and CPUs: NICs, PCIe and memory of every host, uplinks of racks.
// Switches have no limit of their own.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "bench/rack_model/grid.h"
#include "bench/rack_model/scene.h"

namespace phub::rack_model {

// A rate that is not known limits nothing: it is no link.
class Fabric {
 public:
  Fabric(Grid& grid, const Scene& scene);

  // For flows that cross this NIC; to or from another rack if `far`.
  PortId nic_port(uint32_t host, uint32_t nic, bool far);
  // For traffic of a node's memory alone: a flow is from one of a node's two ports to the other.
  struct MemoryPorts {
    PortId from = 0, to = 0;
  };
  MemoryPorts memory_ports(uint32_t host, uint32_t node);
  // A CPU for a thread.
  CpuId new_cpu();

 private:
  struct Nic {
    std::optional<LinkId> out, in, pcie_out, pcie_in;
  };
  struct Node {
    std::optional<LinkId> memory, pcie;
    std::optional<MemoryPorts> ports;
  };
  struct HostParts {
    std::vector<Nic> nics;
    std::vector<Node> nodes;
  };
  struct Uplink {
    LinkId up = 0, down = 0;
  };

  std::optional<LinkId> link(const std::string& name, std::optional<double> bytes_per_s);
  void add_host(uint32_t host);

  Grid& grid_;
  const Scene& scene_;
  std::vector<HostParts> hosts_;
  std::map<uint32_t, Uplink> uplinks_;  // by rack
  std::map<std::tuple<uint32_t, uint32_t, bool>, PortId> nic_ports_;
  std::optional<CpuId> shared_cpu_;
};

}  // namespace phub::rack_model

#include "bench/rack_model/fabric.h"

#include <fmt/format.h>

#include <algorithm>

#include "transport/error.h"

namespace phub::rack_model {
namespace {

std::optional<double> bytes_of_gbit(std::optional<double> gbit_s) {
  return gbit_s ? std::optional(*gbit_s * 1e9 / 8) : std::nullopt;
}

std::optional<double> bytes_of_gb(std::optional<double> gb_s) {
  return gb_s ? std::optional(*gb_s * 1e9) : std::nullopt;
}

void append(std::vector<LinkId>& links, std::optional<LinkId> link) {
  if (link) links.push_back(*link);
}

}  // namespace

Fabric::Fabric(Grid& grid, const Scene& scene) : grid_(grid), scene_(scene) {
  if (scene.costs.shared_cores > 0) shared_cpu_ = grid.add_cpu(scene.costs.shared_cores);
  for (uint32_t host = 0; host < scene.hosts.size(); host++) add_host(host);
  if (!scene.uplink_gbit_s) return;
  const double rate = *bytes_of_gbit(scene.uplink_gbit_s);
  for (const SceneHost& host : scene.hosts) {
    if (!host.rack || uplinks_.contains(*host.rack)) continue;
    uplinks_[*host.rack] = {grid.add_link(fmt::format("rack {} uplink, up", *host.rack), rate),
                            grid.add_link(fmt::format("rack {} uplink, down", *host.rack), rate)};
  }
}

std::optional<LinkId> Fabric::link(const std::string& name, std::optional<double> bytes_per_s) {
  return bytes_per_s ? std::optional(grid_.add_link(name, *bytes_per_s)) : std::nullopt;
}

void Fabric::add_host(uint32_t host) {
  const HostKind& kind = scene_.kinds[scene_.hosts[host].kind];
  const LimitInputs& rates = kind.rates;
  const auto name = [&](const std::string& part) {
    return fmt::format("{} {} {}", kind.name, host, part);
  };
  HostParts parts;
  for (uint32_t n = 0; n < kind.topology.nodes.size(); n++) {
    parts.nodes.push_back(
        {link(name(fmt::format("node {} memory", n)), bytes_of_gb(rates.memory_gb_s)),
         link(name(fmt::format("node {} PCIe", n)), bytes_of_gb(rates.pcie_node_gb_s)),
         {}});
  }
  const std::optional<double> wire = bytes_of_gbit(rates.link_gbit_s);
  const std::optional<double> pcie = bytes_of_gb(rates.pcie_gb_s);
  for (const numa::NicInfo& nic : kind.topology.nics) {
    parts.nics.push_back({link(name(nic.name + ", out"), wire), link(name(nic.name + ", in"), wire),
                          link(name(nic.name + " PCIe, out"), pcie),
                          link(name(nic.name + " PCIe, in"), pcie)});
  }
  hosts_.push_back(std::move(parts));
}

PortId Fabric::nic_port(uint32_t host, uint32_t nic, bool far) {
  const std::optional<uint32_t> rack = scene_.hosts[host].rack;
  far = far && rack && scene_.uplink_gbit_s;
  const auto [at, is_new] = nic_ports_.try_emplace({host, nic, far}, 0);
  if (!is_new) return at->second;
  const numa::Topology& topology = scene_.kinds[scene_.hosts[host].kind].topology;
  const Nic& parts = hosts_[host].nics[nic];
  const Node& node = hosts_[host].nodes[topology.nics[nic].node];
  std::vector<LinkId> out, in;
  if (!scene_.ddio) append(out, node.memory), append(in, node.memory);
  append(out, node.pcie), append(in, node.pcie);
  append(out, parts.pcie_out), append(in, parts.pcie_in);
  append(out, parts.out), append(in, parts.in);
  if (far) out.push_back(uplinks_.at(*rack).up), in.push_back(uplinks_.at(*rack).down);
  return at->second = grid_.add_port(out, in);
}

Fabric::MemoryPorts Fabric::memory_ports(uint32_t host, uint32_t node) {
  Node& parts = hosts_[host].nodes[node];
  if (!parts.ports) {
    std::vector<LinkId> memory;
    append(memory, parts.memory);
    parts.ports = {grid_.add_port(memory, memory), grid_.add_port(memory, memory)};
  }
  return *parts.ports;
}

CpuId Fabric::new_cpu() { return shared_cpu_ ? *shared_cpu_ : grid_.add_cpu(1); }

}  // namespace phub::rack_model

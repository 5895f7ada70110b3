#include "phub/node_use.h"

#include <algorithm>
#include <string>
#include <utility>

namespace phub {

void NodeUse::sample(uint64_t now) {
  if (now < sampled_ms_ + kRateMs) return;
  const double ns = static_cast<double>(now - sampled_ms_) * 1e6;
  for (uint32_t i = 0; i < machine_.cores(); ++i) {
    CoreMeter& meter = host_.meters.cores[i];
    const uint64_t asleep_ns = machine_.core(i).usage().asleep_ns;
    const double asleep = static_cast<double>(asleep_ns - meter.asleep_ns) / ns;
    meter.awake = sampled_ms_ == 0 ? 0 : std::clamp(1 - asleep, 0.0, 1.0);
    meter.asleep_ns = asleep_ns;
  }
  sampled_ms_ = now;
}

std::vector<NodeStatus> NodeUse::status(const Jobs::ByName& present) const {
  BoxMeters meters = host_.meters;
  for (const auto& transport : machine_.transports()) {
    const numa::Topology topology = machine_.topology_for(*transport);
    for (const numa::NicInfo& nic : topology.nics) {
      meters.nics.try_emplace({std::string(transport->name()), nic.name},
                              NicMeter{topology.nodes[nic.node].os_node, {}});
    }
  }
  for (const auto& [name, job] : present) job->meter().add_rates(meters);
  std::vector<NodeStatus> nodes;
  for (uint32_t n = 0; n < machine_.topology().nodes.size(); ++n) {
    NodeStatus node{.node = machine_.topology().nodes[n].os_node,
                    .memory_bytes = machine_.topology().nodes[n].memory_bytes};
    for (uint32_t i = 0; i < machine_.cores(); ++i) {
      if (machine_.topology().cores[i].node != n) continue;
      const CoreUsage usage = machine_.core(i).usage();
      CoreStatus core{.core = i,
                      .cpu = machine_.cpu(i),
                      .busy_passes = usage.busy_passes,
                      .idle_passes = usage.idle_passes,
                      .sleeps = usage.sleeps,
                      .asleep_s = static_cast<double>(usage.asleep_ns) * 1e-9,
                      .awake = meters.cores[i].awake,
                      .flow = meters.cores[i].flow};
      node.cores.push_back(core);
    }
    for (const auto& [name, meter] : meters.nics) {
      if (meter.os_node != node.node) continue;
      node.nics.push_back(
          {.name = name.second,
           .transport = name.first,
           .budget_bytes_per_s = machine_.transport_named(name.first).nic_bytes_per_s(),
           .flow = meter.flow});
    }
    if (!node.cores.empty() || !node.nics.empty()) nodes.push_back(std::move(node));
  }
  return nodes;
}

}  // namespace phub

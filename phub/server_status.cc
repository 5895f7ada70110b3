// Server: its status.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/server.h"

namespace phub {

void Server::sample_cores(uint64_t now) {
  if (now < sampled_ms_ + kRateMs) return;
  const double ns = static_cast<double>(now - sampled_ms_) * 1e6;
  for (uint32_t i = 0; i < cores(); ++i) {
    CoreMeter& meter = host_.meters.cores[i];
    const uint64_t asleep_ns = machine_.core(i).usage().asleep_ns;
    const double asleep = static_cast<double>(asleep_ns - meter.asleep_ns) / ns;
    meter.awake = sampled_ms_ == 0 ? 0 : std::clamp(1 - asleep, 0.0, 1.0);
    meter.asleep_ns = asleep_ns;
  }
  sampled_ms_ = now;
}

ServerStatus Server::status() {
  ServerStatus status;
  status.topology = options_.topology.source;
  for (const auto& transport : machine_.transports()) {
    status.transports.emplace_back(transport->name());
    status.nics.push_back(transport->describe());
  }
  status.cores = cores();
  status.memory_bytes = host_.budget.used();
  status.memory_limit_bytes = host_.budget.limit();
  status.uptime_s = static_cast<double>(clock_.now_ms() - started_ms_) / 1000;
  for (const auto& [name, job] : jobs_) {
    if (!job->all_have_left()) status.jobs.push_back(job->status());  // else it is over
  }
  status.nodes = status_of_nodes();
  for (const ShardBox& shard : host_.shards.boxes()) {
    status.shards.push_back({shard.about.name, static_cast<uint32_t>(shard.about.cores.size())});
  }
  if (options_.parent) {
    status.parent = options_.parent->name();
    status.parent_budget_bytes_per_s = options_.parent->nic_bytes_per_s();
  }
  return status;
}

// The nodes that have a core or a NIC in use. Totals are of all jobs so far, rates of present jobs.
std::vector<NodeStatus> Server::status_of_nodes() const {
  BoxMeters meters = host_.meters;
  for (const auto& transport : machine_.transports()) {
    const numa::Topology topology = machine_.topology_for(*transport);
    for (const numa::NicInfo& nic : topology.nics) {
      meters.nics.try_emplace({std::string(transport->name()), nic.name},
                              NicMeter{topology.nodes[nic.node].os_node, {}});
    }
  }
  for (const auto& [name, job] : jobs_) job->meter().add_rates(meters);
  std::vector<NodeStatus> nodes;
  for (uint32_t n = 0; n < machine_.topology().nodes.size(); ++n) {
    NodeStatus node{.node = machine_.topology().nodes[n].os_node,
                    .memory_bytes = machine_.topology().nodes[n].memory_bytes};
    for (uint32_t i = 0; i < cores(); ++i) {
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

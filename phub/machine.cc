#include "phub/machine.h"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "numa/memory.h"
#include "phub/plan/plan.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {

// The cores of a plan depend on topology and options only, so any key table shows them. Few cores
// go to nodes with NICs first; a job over one transport may leave some out.
Machine::Machine(const MachineOptions& options, std::vector<std::unique_ptr<Transport>> transports,
                 const Clock& clock)
    : pin_(options.pin),
      spin_us_(options.spin_us),
      slot_window_(options.slot_window),
      found_(options.topology),
      topology_(options.topology),
      transports_(std::move(transports)) {
  numa::Topology topology = topology_;
  topology.nics.clear();
  for (const auto& transport : transports_) {
    for (const numa::NicInfo& port : ports_of(*transport)) topology.nics.push_back(port);
  }
  if (options.cores == 0) topology.nics.clear();
  const std::vector<KeySpec> any_key = {{.name = "key", .elements = 1}};
  const Plan plan = make_plan(topology, any_key, {.cores = options.cores});
  std::vector<numa::Core> used;
  for (const CorePlan& core : plan.cores) {
    cores_.push_back(std::make_unique<Core>(static_cast<uint32_t>(cores_.size()), clock));
    cpus_.push_back(core.os_cpu);
    used.push_back({core.node, core.os_cpu});
  }
  topology_.cores = std::move(used);
  topology_.nics.clear();
}

// A port on a node without memory of its own, or on one that is not there, has no cores by that
// number: the topology knows the node whose cores are next to it.
uint32_t Machine::node_of(const NicPort& port) const {
  const auto node = std::ranges::find(found_.nodes, port.os_node, &numa::Node::os_node);
  const auto index = static_cast<uint32_t>(node - found_.nodes.begin());
  const bool is_there = node != found_.nodes.end();
  if (is_there && std::ranges::count(found_.cores, index, &numa::Core::node) > 0) return index;
  const std::string device = port.name.substr(0, port.name.find(':'));
  const auto nic = std::ranges::find(found_.nics, device, &numa::NicInfo::name);
  if (nic != found_.nics.end()) return nic->node;
  return is_there ? index : 0;
}

// Each with its node, or once for each node.
std::vector<numa::NicInfo> Machine::ports_of(const Transport& transport) const {
  std::vector<numa::NicInfo> ports;
  for (const NicPort& port : transport.ports()) {
    if (port.os_node != NicPort::kEveryNode) {
      ports.push_back({node_of(port), port.name});
      continue;
    }
    for (uint32_t n = 0; n < topology_.nodes.size(); ++n) ports.push_back({n, port.name});
  }
  std::stable_sort(ports.begin(), ports.end(),
                   [](const auto& a, const auto& b) { return a.node < b.node; });
  return ports;
}

numa::Topology Machine::topology_for(const Transport& transport) const {
  numa::Topology topology = topology_;
  topology.nics = ports_of(transport);
  return topology;
}

Transport& Machine::transport_named(std::string_view name) const {
  std::string known;
  for (const auto& transport : transports_) {
    if (transport->name() == name) return *transport;
    known += (known.empty() ? "" : ", ") + std::string(transport->name());
  }
  fail(ErrorCode::kInvalid, "this server does not offer transport '{}'; it offers: {}",
       printable(name), known);
}

uint32_t Machine::core_at(uint32_t os_cpu) const {
  const auto at = std::ranges::find(cpus_, os_cpu);
  PHUB_CHECK(at != cpus_.end());
  return static_cast<uint32_t>(at - cpus_.begin());
}

void Machine::start_threads() {
  const auto cpus = static_cast<uint32_t>(sysconf(_SC_NPROCESSORS_ONLN));
  const int spin_us = spin_us_ >= 0 ? spin_us_ : cpus > cores() ? 20 : 0;
  for (uint32_t i = 0; i < cores(); ++i) {
    threads_.emplace_back([this, i, spin_us](const std::stop_token& stop) {
      pthread_setname_np(pthread_self(), fmt::format("phub-core-{}", i % 1000).c_str());
      if (pin_) numa::pin_thread(cpus_[i]);
      cores_[i]->run(stop, spin_us);
    });
  }
}

void Machine::stop_threads() {
  for (std::jthread& thread : threads_) thread.request_stop();
  for (auto& core : cores_) core->wake();
  threads_.clear();
}

std::vector<int> Machine::event_fds() const {
  std::vector<int> fds;
  for (const auto& core : cores_) fds.push_back(core->report_fd());
  for (const auto& transport : transports_) {
    if (transport->event_fd() >= 0) fds.push_back(transport->event_fd());
  }
  return fds;
}

std::string Machine::describe() const {
  std::string text = fmt::format("{} cores", cores());
  for (const auto& transport : transports_) text.append("\n").append(transport->describe());
  return text;
}

}  // namespace phub

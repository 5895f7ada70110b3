// The machine that a server runs on: its cores with their threads, and its transports.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "numa/topology.h"
#include "phub/clock.h"
#include "phub/core/core.h"
#include "transport/transport.h"

namespace phub {

struct MachineOptions {
  numa::Topology topology;
  uint32_t cores = 0;  // 0: all of the topology
  bool pin = true;
  int32_t spin_us = -1;  // how long an idle core spins; -1: 20 if more CPUs than cores are there
  // Bytes for the gradients of each rank of a job, where the transport can do with less than slots
  // of everything (transport/slot_window.h); 0: slots of everything.
  uint64_t slot_window = 0;
};

class Machine {
 public:
  Machine(const MachineOptions& options, std::vector<std::unique_ptr<Transport>> transports,
          const Clock& clock);

  // A thread for each core, pinned. Without them the caller steps the cores.
  void start_threads();
  void stop_threads();

  uint32_t cores() const { return static_cast<uint32_t>(cores_.size()); }
  Core& core(uint32_t i) { return *cores_[i]; }
  const Core& core(uint32_t i) const { return *cores_[i]; }
  const std::vector<std::unique_ptr<Core>>& all_cores() const { return cores_; }
  uint32_t cpu(uint32_t core) const { return cpus_[core]; }
  uint32_t core_at(uint32_t os_cpu) const;  // REQUIRES: a core runs on it
  const std::vector<std::unique_ptr<Transport>>& transports() const { return transports_; }
  // Throws Error(kInvalid) that names the transports that are there.
  Transport& transport_named(std::string_view name) const;
  // PlanOptions::slot_window of the jobs over a transport.
  uint64_t slot_window(const Transport& transport) const {
    return transport.windows() != Windows::kNone ? slot_window_ : 0;
  }

  // The topology with the cores in use only, and the NICs over which a plan may send with this
  // transport.
  numa::Topology topology_for(const Transport& transport) const;
  const numa::Topology& topology() const { return topology_; }  // without NICs

  std::vector<int> event_fds() const;  // those of cores and transports; edge-triggered or eventfds
  std::string describe() const;

 private:
  std::vector<numa::NicInfo> ports_of(const Transport& transport) const;
  uint32_t node_of(const NicPort& port) const;

  const bool pin_;
  const int32_t spin_us_;
  const uint64_t slot_window_;
  const numa::Topology found_;  // as it was given, with all cores and NICs
  numa::Topology topology_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<Core>> cores_;
  std::vector<uint32_t> cpus_;
  std::vector<std::jthread> threads_;
};

}  // namespace phub

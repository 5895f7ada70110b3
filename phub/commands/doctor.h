// Checks whether a host lacks anything for phub. Facts are gathered as plain data; judge() is a
// pure function of them, so that every finding can be tested on any machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "numa/topology.h"
#include "phub/commands/container_memory.h"
#include "transport/ofi/providers.h"
#include "transport/verbs/devices.h"

namespace phub {

// A network interface other than the loopback.
struct NicFacts {
  std::string name;
  bool hardware = false;  // backed by a device (PCI, virtio); false: made by software
  bool bridge = false;    // a software switch
  bool arp = false;       // Ethernet or IPoIB: uses ARP
  bool up = false;        // configured up, and there is a link
  bool has_address = false;
  std::vector<std::string> subnets;  // IPv4: "10.77.0.0/24"
  uint32_t mtu = 0;
  std::optional<uint32_t> os_node;  // nothing: unknown
  // Effective values: the larger of its own setting and that of "all".
  int arp_ignore = 0, arp_announce = 0, rp_filter = 0;

  // Whether `phub serve` would send data over it.
  bool usable() const { return up && has_address && !bridge; }
};

// An RDMA port that phub can use.
struct RdmaPortFacts {
  std::string name;  // "mlx5_0"
  std::string link;  // "RoCE v2", "InfiniBand"
  std::string netdev;
  std::string address;
  std::string gid;
  int gid_index = 0;
  uint32_t mtu_bytes = 0;
  bool software = false;   // soft-RoCE
  std::string no_dma_buf;  // the reason why it reads no memory of GPUs; "": it may
  std::optional<uint32_t> os_node;
};

struct NodeFacts {
  uint32_t os_node = 0;
  std::vector<uint32_t> cpus;  // all of the node's, allowed or not
};

struct HostFacts {
  std::vector<NicFacts> nics;
  std::vector<std::string> rdma_devices;  // known to the kernel
  std::vector<RdmaPortFacts> rdma_ports;
  std::vector<VerbsFinding> rdma_problems;
  bool rdma_cm = false;                // /dev/infiniband/rdma_cm
  std::vector<OfiProvider> providers;  // libfabric's providers
  std::string no_libfabric;            // the reason, and what to do; "": it is there
  std::vector<NodeFacts> nodes;
  std::vector<numa::Note> topology_notes;
  std::vector<uint32_t> allowed_cpus;     // the CPUs of this process
  std::optional<uint64_t> locked_memory;  // limit in bytes; nothing: none
  uint64_t open_files = 0;                // the hard limit; phub raises its soft limit to it
  bool may_lock = false;                  // CAP_IPC_LOCK: the limit does not apply
  bool may_set_network = false;           // CAP_NET_ADMIN
  uint64_t memory_bytes = 0;
  ContainerMemory container;
  std::string huge_pages, shared_huge_pages;  // "always", "madvise", "never", …; "": no such file
  uint64_t reserved_huge_pages = 0;
  std::string congestion_control;
  std::vector<std::string> congestion_available, congestion_allowed;
};

// The sources of the facts, but for system calls about this process. Tests make a tree of files
// under `root`, and choose the rest.
struct InterfaceAddress {
  std::string name, address;
  uint32_t prefix_bits = 0;
};
struct FactSources {
  std::string root;  // before /sys, /proc and /dev
  std::vector<InterfaceAddress> addresses;
  std::vector<VerbsPort> ports;
  std::vector<VerbsFinding> passed_over;
  std::vector<OfiProvider> providers;
  std::string no_libfabric;
  std::optional<uint64_t> locked_memory;
  uint64_t open_files = 0;
  std::vector<numa::Note> topology_notes;
};
FactSources this_host();
// Facts that cannot be read keep their defaults.
HostFacts gather_facts(const FactSources& sources);

enum class Severity {
  kOk,
  kNote,   // not a problem, or cannot be checked
  kWarn,   // works, but slower than possible, or not for large jobs
  kError,  // does not work
};
struct Finding {
  std::string group;  // "RDMA", "libfabric", "network", "memory and limits", "processors"
  Severity severity = Severity::kOk;
  std::string what;
  std::string todo;  // "" if nothing
};
std::string_view name_of(Severity severity);

std::vector<Finding> judge(const HostFacts& facts);  // by group
// Its parts.
void judge_rdma(const HostFacts& facts, std::vector<Finding>& findings);
void judge_libfabric(const HostFacts& facts, std::vector<Finding>& findings);
void judge_network(const HostFacts& facts, std::vector<Finding>& findings);
void judge_memory(const HostFacts& facts, std::vector<Finding>& findings);
void judge_processors(const HostFacts& facts, std::vector<Finding>& findings);

std::string describe(const std::vector<Finding>& findings);
std::string to_json(const std::vector<Finding>& findings);

}  // namespace phub

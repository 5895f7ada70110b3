// `phub doctor`: the checks of RDMA ports and of the network.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "phub/commands/doctor.h"

namespace phub {
namespace {

constexpr uint32_t kLargestMtu = 4096;        // of RDMA
constexpr uint32_t kNetdevForLargest = 4200;  // 4096 and the headers of RoCE v2

const NicFacts* find_nic(const HostFacts& facts, const std::string& name) {
  for (const NicFacts& nic : facts.nics) {
    if (nic.name == name) return &nic;
  }
  return nullptr;
}

std::string names_of(const std::vector<const NicFacts*>& nics) {
  std::vector<std::string> names;
  for (const NicFacts* nic : nics) names.push_back(nic->name);
  return fmt::format("{}", fmt::join(names, ", "));
}

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

Finding judge_mtu(const HostFacts& facts, const RdmaPortFacts& port) {
  Finding finding{"RDMA", Severity::kOk, fmt::format("{}: MTU {}", port.name, port.mtu_bytes), ""};
  if (port.mtu_bytes >= kLargestMtu) return finding;
  finding.severity = Severity::kWarn;
  if (port.link == "InfiniBand") {
    finding.what += fmt::format(", {} is possible", kLargestMtu);
    finding.todo = "raise the partition's MTU at the subnet manager (mtu=5 in partitions.conf)";
    return finding;
  }
  const NicFacts* nic = find_nic(facts, port.netdev);
  if (nic != nullptr && nic->mtu >= kNetdevForLargest) {
    finding.what += fmt::format(" although {} has {}", port.netdev, nic->mtu);
    finding.todo = "the device or its driver limits it: see active_mtu and max_mtu of ibv_devinfo";
    return finding;
  }
  finding.what += nic == nullptr ? fmt::format(", {} is possible", kLargestMtu)
                                 : fmt::format(": {} has {}", port.netdev, nic->mtu);
  finding.todo = fmt::format(
      "ip link set dev {} mtu {} here, on the switch and on the workers: then RDMA has {}",
      port.netdev, kNetdevForLargest, kLargestMtu);
  return finding;
}

// Linux has no common interface for the packets that a NIC drops or marks, only its vendor's tools.
Finding lossless_note(const std::vector<std::string>& netdevs) {
  return {
      "RDMA", Severity::kNote,
      "RoCE: flow control (PFC) and congestion control (DCQCN) cannot be checked by phub",
      fmt::format("for each of {}: 'mlnx_qos -i NETDEV' shows PFC, which must be on for the same "
                  "priority as on the switch; 'ethtool -S NETDEV' shows drops and pauses",
                  fmt::join(netdevs, ", "))};
}

// Of memory_device (worker.h). Whether it reaches a GPU, only registering memory of that one tells.
Finding judge_gpu_memory(const RdmaPortFacts& port) {
  if (port.no_dma_buf.empty()) {
    return {"RDMA", Severity::kOk,
            fmt::format("{}: reads and writes memory of GPUs itself, by DMA buffers", port.name),
            ""};
  }
  return {"RDMA", Severity::kNote,
          fmt::format("{}: cannot read or write memory of GPUs itself", port.name),
          port.no_dma_buf};
}

void judge_ports(const HostFacts& facts, std::vector<Finding>& findings) {
  std::vector<std::string> lossy;
  for (const RdmaPortFacts& port : facts.rdma_ports) {
    findings.push_back({"RDMA", Severity::kOk,
                        fmt::format("{}: active, {} on {}, GID {} {} ({})", port.name, port.link,
                                    port.netdev, port.gid_index, port.gid, port.address),
                        ""});
    findings.push_back(judge_mtu(facts, port));
    findings.push_back(judge_gpu_memory(port));
    if (port.software) {
      findings.push_back({"RDMA", Severity::kNote,
                          fmt::format("{}: soft-RoCE, RDMA emulated by the kernel", port.name),
                          "use it for tests only: it is slow, since the CPU does all the work"});
    } else if (port.link != "InfiniBand") {
      lossy.push_back(port.netdev);
    }
  }
  if (!lossy.empty()) findings.push_back(lossless_note(lossy));
}

// NICs that share an IPv4 subnet: Linux sends by the first route, whatever the source address.
void judge_subnets(const std::vector<const NicFacts*>& nics, std::vector<Finding>& findings) {
  std::map<std::string, std::vector<const NicFacts*>> by_subnet;
  for (const NicFacts* nic : nics) {
    for (const std::string& subnet : nic->subnets) {
      auto& sharers = by_subnet[subnet];
      if (std::find(sharers.begin(), sharers.end(), nic) == sharers.end()) sharers.push_back(nic);
    }
  }
  for (const auto& [subnet, sharers] : by_subnet) {
    if (sharers.size() < 2) continue;
    findings.push_back(
        {"network", Severity::kWarn,
         fmt::format("{} are in one subnet, {}: all packets to it leave by one of them",
                     names_of(sharers), subnet),
         "give each NIC a subnet of its own, or a routing table with an 'ip rule' for its "
         "address"});
  }
}

// Whether NICs share an Ethernet segment cannot be seen from here. Separate subnets do not help.
void judge_arp(const std::vector<const NicFacts*>& nics, std::vector<Finding>& findings) {
  std::vector<const NicFacts*> loose, strict;
  for (const NicFacts* nic : nics) {
    if (nic->arp_ignore < 1 || nic->arp_announce < 2) loose.push_back(nic);
    if (nic->rp_filter == 1) strict.push_back(nic);
  }
  if (!loose.empty()) {
    findings.push_back(
        {"network", Severity::kWarn,
         fmt::format("{}: where NICs share an Ethernet segment (a switch), any of them answers ARP "
                     "for all addresses, so that all traffic may go over one",
                     names_of(loose)),
         "sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2, and the same "
         "in /etc/sysctl.d"});
  } else {
    findings.push_back(
        {"network", Severity::kOk, "ARP: each NIC answers only for its own addresses", ""});
  }
  if (!strict.empty()) {
    findings.push_back(
        {"network", Severity::kWarn,
         fmt::format("{}: strict reverse path filter (rp_filter 1) with several NICs drops packets "
                     "whose answers would take another NIC",
                     names_of(strict)),
         "sysctl -w net.ipv4.conf.all.rp_filter=2, and the same in /etc/sysctl.d"});
  }
}

void judge_congestion(const HostFacts& facts, std::vector<Finding>& findings) {
  const std::string& control = facts.congestion_control;
  if (control.empty()) return;
  Finding finding{"network", Severity::kOk, fmt::format("TCP congestion control {}", control), ""};
  if (control != "cubic" && control != "reno") {
    // Administrators may choose any available algorithm, others only the allowed ones.
    const auto& choice =
        facts.may_set_network ? facts.congestion_available : facts.congestion_allowed;
    const char* other = contains(choice, "cubic")  ? "cubic"
                        : contains(choice, "reno") ? "reno"
                                                   : "";
    if (*other != 0) {
      finding.what += fmt::format("; phub uses {} to workers on this machine", other);
    } else {
      finding.severity = Severity::kWarn;
      finding.what +=
          " paces packets even within this machine, and neither cubic nor reno may be "
          "chosen instead";
      finding.todo = "modprobe tcp_cubic; sysctl -w net.ipv4.tcp_allowed_congestion_control='" +
                     control + " cubic reno'";
    }
  }
  findings.push_back(finding);
}

}  // namespace

void judge_rdma(const HostFacts& facts, std::vector<Finding>& findings) {
  if (facts.rdma_devices.empty() && facts.rdma_ports.empty()) {
    findings.push_back({"RDMA", Severity::kNote, "no RDMA device: phub uses shared memory and tcp",
                        "if the host has one, load its driver (lspci, dmesg; rdma link)"});
    return;
  }
  if (!facts.rdma_cm) {
    findings.push_back({"RDMA", Severity::kError,
                        "/dev/infiniband/rdma_cm is missing: RDMA connections are impossible",
                        "modprobe rdma_ucm; in a container, pass /dev/infiniband through"});
  }
  for (const std::string& device : facts.rdma_devices) {
    const auto is_of = [&](const std::string& name) {
      return name == device || name.starts_with(device + ":");
    };
    const bool usable = std::any_of(facts.rdma_ports.begin(), facts.rdma_ports.end(),
                                    [&](const RdmaPortFacts& port) { return is_of(port.name); });
    const bool known = std::any_of(facts.rdma_problems.begin(), facts.rdma_problems.end(),
                                   [&](const VerbsFinding& f) { return f.device == device; });
    if (usable || known) continue;
    findings.push_back({"RDMA", Severity::kError,
                        fmt::format("{}: the kernel has it, but phub cannot open it", device),
                        "install ibverbs-providers and librdmacm1, modprobe ib_uverbs, allow "
                        "access to /dev/infiniband/uverbs*, and build phub with libibverbs-dev "
                        "and librdmacm-dev"});
  }
  judge_ports(facts, findings);
  for (const VerbsFinding& problem : facts.rdma_problems) {
    findings.push_back({"RDMA", Severity::kWarn,
                        fmt::format("{}{}: {}", problem.device,
                                    problem.port == 0 ? "" : fmt::format(" port {}", problem.port),
                                    problem.problem),
                        "not used until it is active and has a RoCE v2 GID with an IP address "
                        "(rdma link; ip link set … up; ip address add …)"});
  }
}

// Nobody has to have it: without one that writes past the kernel, tcp does the same with less.
void judge_libfabric(const HostFacts& facts, std::vector<Finding>& findings) {
  if (!facts.no_libfabric.empty()) {
    findings.push_back({"libfabric", Severity::kNote,
                        "not here, so there is no transport ofi: " + facts.no_libfabric, ""});
    return;
  }
  if (facts.providers.empty()) {
    findings.push_back(
        {"libfabric", Severity::kNote,
         "no provider with reliable datagrams and remote writes: no transport ofi",
         "if the host has a NIC of one, install that provider (fi_info lists them)"});
  }
  for (const OfiProvider& provider : facts.providers) {
    findings.push_back(
        {"libfabric", Severity::kOk,
         fmt::format("{}: {}", provider.name,
                     provider.this_host        ? "within this host, used only if it is named"
                     : provider.domain.empty() ? "at the addresses of --listen"
                                               : provider.domain),
         ""});
  }
}

void judge_network(const HostFacts& facts, std::vector<Finding>& findings) {
  std::vector<const NicFacts*> usable, with_arp;
  for (const NicFacts& nic : facts.nics) {
    if (nic.usable()) usable.push_back(&nic);
    if (nic.usable() && nic.arp && !nic.subnets.empty()) with_arp.push_back(&nic);
    if (nic.usable()) {
      findings.push_back(
          {"network", Severity::kOk,
           fmt::format(
               "{}: up, MTU {}{}", nic.name, nic.mtu,
               nic.subnets.empty() ? "" : fmt::format(", {}", fmt::join(nic.subnets, ", "))),
           ""});
    } else if (nic.hardware) {
      findings.push_back(
          {"network", Severity::kNote,
           fmt::format("{}: not used, it {}", nic.name, nic.up ? "has no IP address" : "is down"),
           nic.up ? fmt::format("ip address add ADDRESS/BITS dev {}", nic.name)
                  : fmt::format("ip link set dev {} up; is there a cable?", nic.name)});
    }
  }
  if (usable.empty()) {
    findings.push_back({"network", Severity::kWarn,
                        "no NIC is up with an IP address: only workers on this machine can connect",
                        "ip link; ip address"});
  }
  judge_subnets(usable, findings);
  if (with_arp.size() > 1) judge_arp(with_arp, findings);
  judge_congestion(facts, findings);
}

}  // namespace phub

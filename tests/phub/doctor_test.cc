#include "phub/commands/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace phub {
namespace doctor_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kGiB = 1ull << 30;

NicFacts nic(const std::string& name, uint32_t node, const std::string& subnet) {
  NicFacts facts;
  facts.name = name;
  facts.hardware = facts.arp = facts.up = facts.has_address = true;
  facts.subnets = {subnet};
  facts.mtu = 4200;
  facts.os_node = node;
  facts.arp_ignore = 1;
  facts.arp_announce = 2;
  return facts;
}

RdmaPortFacts port(const std::string& name, uint32_t node, const std::string& netdev) {
  return {.name = name,
          .link = "RoCE v2",
          .netdev = netdev,
          .address = "10.0.0.1",
          .gid = "::ffff:10.0.0.1",
          .gid_index = 3,
          .mtu_bytes = 4096,
          .os_node = node};
}

// Two nodes with two CPUs, a RoCE NIC and its Ethernet device each: nothing to complain about.
HostFacts good_host() {
  HostFacts facts;
  facts.nics = {nic("eth0", 0, "10.0.0.0/24"), nic("eth1", 1, "10.0.1.0/24")};
  facts.rdma_devices = {"mlx5_0", "mlx5_1"};
  facts.rdma_ports = {port("mlx5_0", 0, "eth0"), port("mlx5_1", 1, "eth1")};
  facts.rdma_cm = true;
  facts.nodes = {{0, {0, 1}}, {1, {2, 3}}};
  facts.allowed_cpus = {0, 1, 2, 3};
  facts.open_files = 65536;
  facts.memory_bytes = 64 * kGiB;
  facts.huge_pages = "madvise";
  facts.shared_huge_pages = "advise";
  facts.congestion_control = "cubic";
  facts.congestion_available = facts.congestion_allowed = {"reno", "cubic"};
  return facts;
}

using Change = std::function<void(HostFacts&)>;

HostFacts changed(const Change& change) {
  HostFacts facts = good_host();
  change(facts);
  return facts;
}

std::vector<Finding> worse_than_ok(const HostFacts& facts) {
  std::vector<Finding> found = judge(facts);
  std::erase_if(found, [](const Finding& f) { return f.severity < Severity::kWarn; });
  return found;
}

bool has(const HostFacts& facts, Severity severity, const std::string& what) {
  return std::ranges::any_of(judge(facts), [&](const Finding& f) {
    return f.severity == severity && f.what.find(what) != std::string::npos;
  });
}

TEST(Doctor, FindsNothingOnAGoodHost) {
  const HostFacts facts = good_host();
  EXPECT_THAT(worse_than_ok(facts), IsEmpty()) << describe(judge(facts));
  EXPECT_TRUE(has(facts, Severity::kOk,
                  "mlx5_0: active, RoCE v2 on eth0, GID 3 ::ffff:10.0.0.1 (10.0.0.1)"));
  EXPECT_TRUE(has(facts, Severity::kOk, "NICs on NUMA nodes 0, 1"));
}

void remove_rdma(HostFacts& f) {
  f.rdma_devices.clear();
  f.rdma_ports.clear();
  f.rdma_cm = false;
}
void have_small_mtu(HostFacts& f, uint32_t ethernet) {
  f.nics[0].mtu = ethernet;
  f.rdma_ports[0].mtu_bytes = 1024;
}
void have_bbr(HostFacts& f, std::vector<std::string> allowed) {
  f.congestion_control = "bbr";
  f.congestion_available = {"reno", "cubic", "bbr"};
  f.congestion_allowed = std::move(allowed);
}

// Each of these changes of a good host is all that is worse than it.
TEST(Doctor, SaysWhatIsWrongAndWhatToDo) {
  const auto kWarn = Severity::kWarn, kError = Severity::kError;
  const struct {
    Change change;
    Severity severity;
    std::string what, todo;
  } kCases[] = {
      {[](auto& f) { f.rdma_cm = false; }, kError, "rdma_cm is missing", "modprobe rdma_ucm"},
      // A name that begins as another's.
      {[](auto& f) { f.rdma_devices.emplace_back("mlx5_10"); }, kError,
       "mlx5_10: the kernel has it", "ibverbs-providers"},
      {[](auto& f) {
         f.rdma_devices.emplace_back("mlx5_2");
         f.rdma_problems = {{"mlx5_2", 1, "is down"}};
       },
       kWarn, "mlx5_2 port 1: is down", "ip link set"},
      {[](auto& f) { have_small_mtu(f, 1500); }, kWarn, "mlx5_0: MTU 1024: eth0 has 1500",
       "ip link set dev eth0 mtu 4200"},
      {[](auto& f) { have_small_mtu(f, 9000); }, kWarn, "MTU 1024 although eth0 has 9000",
       "ibv_devinfo"},
      {[](auto& f) { have_small_mtu(f, 9000), f.rdma_ports[0].link = "InfiniBand"; }, kWarn,
       "4096 is possible", "subnet manager"},
      {[](auto& f) {
         f.topology_notes = {{"left out: eth9", ""}, {"no memory", "add memory"}};
       },
       kWarn, "no memory", "add memory"},
      {[](auto& f) { f.container = {.limit = 8 * kGiB, .available = kGiB / 2, .file = "/max"}; },
       kWarn, "has 512.00 MiB left", "MemoryMax"},
      {[](auto& f) { f.container = {.unknown = "/group: Permission denied"}; }, kWarn,
       "/group: Permission denied", "give --memory-limit"},
      {[](auto& f) { f.locked_memory = 8 << 20; }, kError, "locked memory: at most 8.00 MiB",
       "LimitMEMLOCK=infinity"},
      {[](auto& f) { f.locked_memory = 16 * kGiB; }, kWarn, "16.00 GiB", "LimitMEMLOCK=infinity"},
      {[](auto& f) { f.huge_pages = "never"; }, kWarn, "the box's own memory: never",
       "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"},
      {[](auto& f) { f.shared_huge_pages = "never"; }, kWarn, "shared with workers",
       "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"},
      {[](auto& f) { f.shared_huge_pages = "deny"; }, kWarn, "shared with workers",
       "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"},
      {[](auto& f) { f.open_files = 1024; }, kWarn, "up to 1024", "LimitNOFILE"},
      {[](auto& f) { f.nics[0].arp_ignore = 0; }, kWarn, "eth0: where NICs share",
       "net.ipv4.conf.all.arp_ignore=1"},
      {[](auto& f) { f.nics[0].arp_ignore = 2, f.nics[1].arp_announce = 1; }, kWarn,
       "eth1: where NICs share", "arp_announce=2"},
      {[](auto& f) { f.nics[1].rp_filter = 1; }, kWarn, "eth1: strict reverse path", "rp_filter=2"},
      {[](auto& f) { f.nics[1].subnets.emplace_back("10.0.0.0/24"); }, kWarn,
       "eth0, eth1 are in one subnet, 10.0.0.0/24", "ip rule"},
      {[](auto& f) { f.nics[0].up = f.nics[1].has_address = f.nics[1].hardware = false; }, kWarn,
       "no NIC is up", "ip link"},
      {[](auto& f) { have_bbr(f, {"bbr"}); }, kWarn, "bbr paces",
       "tcp_allowed_congestion_control='bbr cubic reno'"},
      {[](auto& f) {
         f.allowed_cpus = {0, 1};
       },
       kWarn, "mlx5_1: none of the CPUs of its NUMA node 1", "taskset"},
      {[](auto& f) { f.rdma_ports[1].os_node = 0; }, kWarn, "all NICs are on NUMA node 0",
       "other processors"},
      {[](auto& f) { f.rdma_ports[1].os_node = std::nullopt; }, kWarn,
       "mlx5_1: its NUMA node is not known", "BIOS"},
      // Without RDMA the Ethernet devices are what is placed.
      {[](auto& f) { remove_rdma(f), f.nics[0].os_node = 1; }, kWarn, "all NICs are on NUMA node 1",
       "slots"},
      {[](auto& f) {
         f.nodes = {{0, {0}}}, f.allowed_cpus = {0};
       },
       kWarn, "fewer than the 2 NICs", "fewer NICs"},
  };
  for (const auto& [change, severity, what, todo] : kCases) {
    SCOPED_TRACE(what);
    const std::vector<Finding> found = worse_than_ok(changed(change));
    ASSERT_THAT(found, ::testing::SizeIs(1)) << describe(found);
    EXPECT_EQ(found[0].severity, severity);
    EXPECT_THAT(found[0].what, HasSubstr(what));
    EXPECT_THAT(found[0].todo, HasSubstr(todo));
  }
}

// These are no worse. What is said of them all the same: "": nothing.
TEST(Doctor, WhatIsNoFault) {
  const auto kOk = Severity::kOk, kNote = Severity::kNote;
  const struct {
    Change change;
    Severity severity = kOk;
    std::string said;
  } kCases[] = {
      {[](auto& f) { remove_rdma(f), f.locked_memory = 8 << 20; }, kNote, "no RDMA device"},
      {[](auto& f) { remove_rdma(f), f.locked_memory = 8 << 20; }, kOk,
       "locked memory: at most 8.00 MiB (only RDMA needs it)"},
      {[](auto& f) { f.rdma_ports[1].no_dma_buf = "the driver takes none"; }, kOk,
       "mlx5_0: reads and writes memory of GPUs itself"},
      {[](auto& f) { f.rdma_ports[1].no_dma_buf = "the driver takes none"; }, kNote,
       "mlx5_1: cannot read or write memory of GPUs"},
      {[](auto& f) {  // its second port can be used
        f.rdma_devices.emplace_back("mlx5_10");
        f.rdma_ports.push_back(port("mlx5_10:2", 1, "eth1"));
      }},
      {[](auto& f) { f.nics[0].mtu = 9000, f.rdma_ports[0].link = "InfiniBand"; }},
      {[](auto& f) {
         for (RdmaPortFacts& each : f.rdma_ports) each.software = true;
       },
       kNote, "mlx5_0: soft-RoCE"},
      {[](auto& f) {  // a NIC on a node without CPUs is served by another
        f.nodes.push_back({2, {}});
        f.nics.push_back(nic("eth2", 2, "10.0.2.0/24"));
        f.rdma_ports.push_back(port("mlx5_2", 2, "eth2"));
        f.rdma_devices.emplace_back("mlx5_2");
      }},
      {[](auto& f) {
         f.topology_notes = {{"left out: eth9", ""}};
       },
       kNote, "left out: eth9"},
      {[](auto&) {}, kOk, "memory: 64.00 GiB, no limit"},
      {[](auto& f) {
         f.container = {.limit = 8 * kGiB, .available = 6 * kGiB, .file = "/group/memory.max"};
       },
       kOk, "may use 8.00 GiB and has 6.00 GiB left (/group/memory.max)"},
      {[](auto& f) { f.locked_memory = 16 * kGiB, f.may_lock = true; }},
      {[](auto& f) { f.locked_memory = 64 * kGiB; }},
      {[](auto& f) { f.huge_pages = "always", f.shared_huge_pages = "always"; }},
      {[](auto& f) { f.shared_huge_pages = "within_size"; }},
      {[](auto& f) { f.shared_huge_pages = "force"; }},
      {[](auto& f) { f.shared_huge_pages = ""; }, kNote, "this kernel has no"},
      {[](auto& f) { f.reserved_huge_pages = 512; }, kNote, "512 huge pages are reserved"},
      {[](auto& f) { f.open_files = 4096; }},
      // One NIC that is left may answer for all; docker0; a tunnel.
      {[](auto& f) { f.nics[0].up = false, f.nics[1].arp_announce = 1; }},
      {[](auto& f) { f.nics[0].bridge = true, f.nics[1].arp_announce = 1; }},
      {[](auto& f) { f.nics[0].arp = false, f.nics[1].arp_announce = 1; }},
      {[](auto& f) { f.nics[1].rp_filter = 2; }},
      // Two addresses of one NIC.
      {[](auto& f) {
        f.nics[0].subnets = {"10.0.2.0/24", "10.0.2.0/24"};
      }},
      {[](auto& f) { f.nics[1].up = false; }, kNote, "eth1: not used, it is down"},
      {[](auto& f) { f.nics[1].has_address = false; }, kNote,
       "eth1: not used, it has no IP address"},
      {[](auto& f) { have_bbr(f, {"bbr"}), f.may_set_network = true; }, kOk,
       "phub uses cubic to workers on this machine"},
      {[](auto& f) {
         have_bbr(f, {"bbr", "reno"});
       },
       kOk, "phub uses reno"},
      {[](auto& f) {
        f.allowed_cpus = {0, 3};
      }},
      {[](auto& f) {  // one node: nothing to place
        f.nodes = {{0, {0, 1, 2, 3}}};
        f.rdma_ports[1].os_node = std::nullopt;
      }},
  };
  for (const auto& [change, severity, said] : kCases) {
    SCOPED_TRACE(said);
    const HostFacts facts = changed(change);
    EXPECT_THAT(worse_than_ok(facts), IsEmpty()) << describe(judge(facts));
    EXPECT_TRUE(said.empty() || has(facts, severity, said)) << describe(judge(facts));
  }
}

TEST(Doctor, NotesOnlyWhatConcernsTheHost) {
  const auto noted = [](const char* what, const Change& change) {
    return has(changed(change), Severity::kNote, what);
  };
  const auto all_ports = [](const auto& change) {
    return [change](HostFacts& f) { std::ranges::for_each(f.rdma_ports, change); };
  };
  EXPECT_TRUE(noted("flow control (PFC)", [](auto&) {}));
  EXPECT_FALSE(noted("PFC", all_ports([](auto& port) { port.software = true; })));
  EXPECT_FALSE(noted("PFC", all_ports([](auto& port) { port.link = "InfiniBand"; })));
  EXPECT_FALSE(noted("soft-RoCE", [](auto&) {}));
  EXPECT_FALSE(noted("nr_hugepages", [](auto& f) { f.shared_huge_pages = ""; }));
  // Software's interfaces are nobody's cable.
  EXPECT_FALSE(noted("eth1", [](auto& f) { f.nics[1].hardware = f.nics[1].up = false; }));
}

TEST(Doctor, TellsPeopleAndPrograms) {
  const std::vector<Finding> findings =
      judge(changed([](auto& f) { f.rdma_cm = false, f.open_files = 100; }));
  const std::string text = describe(findings);
  EXPECT_THAT(text, HasSubstr("RDMA\n  error  /dev/infiniband/rdma_cm is missing"));
  EXPECT_THAT(text, HasSubstr("\n         -> modprobe rdma_ucm"));
  EXPECT_THAT(text, HasSubstr("\nnetwork\n"));
  EXPECT_THAT(text, HasSubstr("\n1 error, 1 warning\n"));
  const auto json = nlohmann::json::parse(to_json(findings)).at("findings");
  ASSERT_EQ(json.size(), findings.size());
  EXPECT_EQ(json[0].at("group"), "RDMA");
  EXPECT_EQ(json[0].at("severity"), "error");
  EXPECT_EQ(json[0].at("what"), findings[0].what);
  EXPECT_EQ(json[0].at("todo"), findings[0].todo);
}

}  // namespace doctor_test
}  // namespace phub

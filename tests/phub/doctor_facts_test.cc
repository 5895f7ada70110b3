// What `phub doctor` reads of a made-up host, and the command on this one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "phub/commands/commands.h"
#include "phub/commands/doctor.h"
#include "tests/phub/tree.h"
#include "transport/error.h"

namespace phub {
namespace doctor_facts_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::Tree;

// A host with a NIC on PCI, one on virtio with soft-RoCE on it, a bridge, and one that is down.
void fill(const Tree& tree) {
  const std::string net = "/sys/class/net/", conf = "/proc/sys/net/ipv4/conf/";
  tree.put(net + "bonding_masters", "");
  for (const char* name : {"lo", "eth0", "eth1", "docker0", "eth9"}) {
    tree.put(net + name + "/mtu", "1500");
    tree.put(net + name + "/type", std::string(name) == "lo" ? "772" : "1");
    if (std::string(name) != "eth9") tree.put(net + name + "/carrier", "1");
  }
  tree.put(net + "eth0/device/numa_node", "1");
  tree.put("/sys/devices/pci/numa_node", "0");
  tree.put("/sys/devices/pci/virtio0/uevent", "");
  tree.link(net + "eth1/device", "../../../devices/pci/virtio0");
  tree.put(net + "docker0/bridge/stp_state", "0");
  tree.put(net + "eth9/device/numa_node", "-1");
  tree.put(conf + "all/arp_ignore", "0");
  tree.put(conf + "all/arp_announce", "2");
  tree.put(conf + "all/rp_filter", "0");
  tree.put(conf + "eth0/arp_ignore", "1");
  tree.put(conf + "eth1/rp_filter", "1");
  tree.put("/sys/class/infiniband/rxe0/parent", "eth1");
  tree.put("/dev/infiniband/rdma_cm", "");
  tree.put("/sys/devices/system/node/node0/cpulist", "0-2,8");
  tree.put("/sys/devices/system/node/node10/cpulist", "");
  tree.put("/sys/devices/system/node/node1/cpulist", "4");
  tree.put("/sys/devices/system/node/possible", "0-1");
  // CAP_NET_ADMIN is bit 12, CAP_IPC_LOCK bit 14.
  tree.put("/proc/self/status",
           "Name:\tphub\nCapEff:\t0000000000004000\nCpus_allowed_list:\t1-2,4");
  tree.put("/proc/meminfo", "MemTotal:       1048576 kB\nMemFree:  5 kB");
  tree.put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
  tree.put("/sys/kernel/mm/transparent_hugepage/shmem_enabled",
           "always within_size advise [never] deny force");
  tree.put("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "3");
  tree.put("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "2");
  tree.put("/proc/sys/net/ipv4/tcp_congestion_control", "bbr");
  tree.put("/proc/sys/net/ipv4/tcp_available_congestion_control", "reno bbr cubic");
  tree.put("/proc/sys/net/ipv4/tcp_allowed_congestion_control", "reno bbr");
}

const NicFacts& nic_named(const HostFacts& facts, const std::string& name) {
  for (const NicFacts& nic : facts.nics) {
    if (nic.name == name) return nic;
  }
  throw std::runtime_error("no NIC " + name);
}

TEST(DoctorFacts, ReadsAHost) {
  const Tree tree;
  fill(tree);
  FactSources sources;
  sources.root = tree.root();
  sources.addresses = {{"eth0", "10.1.2.200", 25},
                       {"eth1", "10.9.8.7", 16},
                       {"eth1", "2001:db8::1", 0},
                       {"docker0", "172.17.0.1", 16}};
  VerbsPort rxe;
  rxe.device = "rxe0";
  rxe.link = "RoCE v2";
  rxe.netdev = "eth1";
  rxe.mtu_bytes = 1024;
  rxe.gid_index = 1;
  rxe.no_dma_buf = "soft-RoCE does not";
  sources.ports = {rxe};
  sources.passed_over = {{"rxe1", 1, "is down"}};
  sources.locked_memory = 65536;
  sources.open_files = 1234;
  const HostFacts facts = gather_facts(sources);

  ASSERT_EQ(facts.nics.size(), 4u) << "without lo and bonding_masters";
  const NicFacts& eth0 = nic_named(facts, "eth0");
  EXPECT_TRUE(eth0.hardware && eth0.up && eth0.arp && eth0.has_address && eth0.usable());
  EXPECT_THAT(eth0.subnets, ElementsAre("10.1.2.128/25"));
  EXPECT_EQ(eth0.mtu, 1500u);
  EXPECT_EQ(eth0.os_node, 1u);
  EXPECT_EQ(eth0.arp_ignore, 1) << "its own is larger";
  EXPECT_EQ(eth0.arp_announce, 2) << "that of all is larger";
  EXPECT_EQ(eth0.rp_filter, 0);
  const NicFacts& eth1 = nic_named(facts, "eth1");
  EXPECT_THAT(eth1.subnets, ElementsAre("10.9.0.0/16"));
  EXPECT_EQ(eth1.os_node, 0u) << "of the PCI device above virtio";
  EXPECT_EQ(eth1.arp_ignore, 0);
  EXPECT_EQ(eth1.rp_filter, 1);
  EXPECT_TRUE(nic_named(facts, "docker0").bridge);
  EXPECT_FALSE(nic_named(facts, "docker0").usable());
  const NicFacts& eth9 = nic_named(facts, "eth9");
  EXPECT_TRUE(eth9.hardware);
  EXPECT_FALSE(eth9.up || eth9.has_address);
  EXPECT_EQ(eth9.os_node, std::nullopt);

  EXPECT_THAT(facts.rdma_devices, ElementsAre("rxe0"));
  ASSERT_EQ(facts.rdma_ports.size(), 1u);
  EXPECT_EQ(facts.rdma_ports[0].name, "rxe0");
  EXPECT_EQ(facts.rdma_ports[0].mtu_bytes, 1024u);
  EXPECT_TRUE(facts.rdma_ports[0].software);
  EXPECT_EQ(facts.rdma_ports[0].no_dma_buf, "soft-RoCE does not");
  EXPECT_EQ(facts.rdma_ports[0].os_node, 0u) << "of the NIC below";
  EXPECT_EQ(facts.rdma_problems.size(), 1u);
  EXPECT_TRUE(facts.rdma_cm);

  ASSERT_EQ(facts.nodes.size(), 3u);
  EXPECT_THAT(facts.nodes[0].cpus, ElementsAre(0, 1, 2, 8));
  EXPECT_EQ(facts.nodes[2].os_node, 10u);
  EXPECT_THAT(facts.nodes[2].cpus, IsEmpty());
  EXPECT_THAT(facts.allowed_cpus, ElementsAre(1, 2, 4));
  EXPECT_TRUE(facts.may_lock);
  EXPECT_FALSE(facts.may_set_network);
  EXPECT_EQ(facts.memory_bytes, 1u << 30);
  EXPECT_EQ(facts.locked_memory, 65536u);
  EXPECT_EQ(facts.open_files, 1234u);
  EXPECT_EQ(facts.huge_pages, "madvise");
  EXPECT_EQ(facts.shared_huge_pages, "never");
  EXPECT_EQ(facts.reserved_huge_pages, 5u);
  EXPECT_EQ(facts.congestion_control, "bbr");
  EXPECT_THAT(facts.congestion_available, ElementsAre("reno", "bbr", "cubic"));
  EXPECT_THAT(facts.congestion_allowed, ElementsAre("reno", "bbr"));
  for (const Finding& f : judge(facts)) {
    EXPECT_TRUE(f.severity < Severity::kWarn || !f.todo.empty()) << f.what;
  }
}

// Nothing at all, and files that hold nonsense: still an answer.
TEST(DoctorFacts, SurvivesWhatIsNotThere) {
  const Tree tree;
  FactSources sources;
  sources.root = tree.root();
  HostFacts facts = gather_facts(sources);
  EXPECT_THAT(facts.nics, IsEmpty());
  EXPECT_NE(describe(judge(facts)), "");
  for (const char* path :
       {"/sys/class/net/eth0/mtu", "/sys/class/net/eth0/carrier",
        "/proc/sys/net/ipv4/conf/all/arp_ignore", "/proc/self/status", "/proc/meminfo",
        "/sys/devices/system/node/node0/cpulist", "/sys/devices/system/node/nodex/cpulist",
        "/sys/kernel/mm/transparent_hugepage/enabled"}) {
    tree.put(path, "\xff,-,9-,[,99999999999999999999");
  }
  tree.put("/proc/self/status", "CapEff:\nCpus_allowed_list:");
  tree.put("/proc/meminfo", "MemTotal: x");
  facts = gather_facts(sources);
  EXPECT_EQ(facts.nics.size(), 1u);
  EXPECT_NE(describe(judge(facts)), "");
  EXPECT_NO_THROW(std::ignore = nlohmann::json::parse(to_json(judge(facts))));
}

// On this host, whatever it is: the command says what the functions say.
TEST(DoctorCommand, ChecksThisHost) {
  const std::vector<Finding> findings = judge(gather_facts(this_host()));
  const auto errors = std::count_if(findings.begin(), findings.end(), [](const Finding& f) {
    return f.severity == Severity::kError;
  });
  CLI::App app;
  add_doctor_command(app);
  std::string problem;
  ::testing::internal::CaptureStdout();
  try {
    app.parse(std::vector<std::string>{"--json", "doctor"});  // last first, as CLI11 wants them
  } catch (const Error& error) {
    problem = error.what();
  }
  const auto json = nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  EXPECT_EQ(json, nlohmann::json::parse(to_json(findings)));
  EXPECT_EQ(problem.empty(), errors == 0) << problem;
  EXPECT_FALSE(gather_facts(this_host()).allowed_cpus.empty());
  EXPECT_EQ(gather_facts(this_host()).topology_notes.size(), numa::this_machine().notes.size());
}

}  // namespace doctor_facts_test
}  // namespace phub

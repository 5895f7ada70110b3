#include "phub/commands/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace phub {
namespace doctor_test {

using ::testing::ElementsAre;
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

std::vector<Finding> worse_than_ok(const HostFacts& facts, Severity least = Severity::kWarn) {
  std::vector<Finding> found = judge(facts);
  std::erase_if(found, [least](const Finding& f) { return f.severity < least; });
  return found;
}

::testing::Matcher<Finding> is(Severity severity, const std::string& what,
                               const std::string& todo) {
  return ::testing::AllOf(::testing::Field("severity", &Finding::severity, severity),
                          ::testing::Field("what", &Finding::what, HasSubstr(what)),
                          ::testing::Field("todo", &Finding::todo, HasSubstr(todo)));
}
::testing::Matcher<Finding> warns(const std::string& what, const std::string& todo) {
  return is(Severity::kWarn, what, todo);
}
::testing::Matcher<Finding> errs(const std::string& what, const std::string& todo) {
  return is(Severity::kError, what, todo);
}

bool has(const HostFacts& facts, Severity severity, const std::string& what) {
  const std::vector<Finding> all = judge(facts);
  return std::any_of(all.begin(), all.end(), [&](const Finding& f) {
    return f.severity == severity && f.what.find(what) != std::string::npos;
  });
}

TEST(Doctor, FindsNothingOnAGoodHost) {
  const HostFacts facts = good_host();
  EXPECT_THAT(worse_than_ok(facts), IsEmpty()) << describe(judge(facts));
  EXPECT_TRUE(has(facts, Severity::kOk,
                  "mlx5_0: active, RoCE v2 on eth0, GID 3 ::ffff:10.0.0.1 (10.0.0.1)"));
  EXPECT_TRUE(has(facts, Severity::kOk, "NICs on NUMA nodes 0, 1"));
  EXPECT_TRUE(has(facts, Severity::kNote, "flow control (PFC)"));
}

// Every finding says what to do, unless all is well.
void expect_advice(const HostFacts& facts) {
  for (const Finding& f : worse_than_ok(facts)) EXPECT_NE(f.todo, "") << f.what;
}

TEST(Doctor, NoRdmaIsNoFault) {
  HostFacts facts = good_host();
  facts.rdma_devices.clear();
  facts.rdma_ports.clear();
  facts.rdma_cm = false;
  facts.locked_memory = 8 << 20;
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
  EXPECT_TRUE(has(facts, Severity::kNote, "no RDMA device"));
  EXPECT_TRUE(has(facts, Severity::kOk, "locked memory: at most 8.00 MiB (only RDMA needs it)"));
}

TEST(Doctor, RdmaNeedsItsConnectionManager) {
  HostFacts facts = good_host();
  facts.rdma_cm = false;
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(errs("rdma_cm is missing", "modprobe rdma_ucm")));
}

TEST(Doctor, WhetherNicsReachMemoryOfGpus) {
  HostFacts facts = good_host();
  facts.rdma_ports[1].no_dma_buf = "the driver takes none";
  EXPECT_TRUE(has(facts, Severity::kOk, "mlx5_0: reads and writes memory of GPUs itself"));
  EXPECT_TRUE(has(facts, Severity::kNote, "mlx5_1: cannot read or write memory of GPUs"));
  EXPECT_THAT(worse_than_ok(facts), IsEmpty()) << "it works without";
}

TEST(Doctor, DevicesThatCannotBeOpened) {
  HostFacts facts = good_host();
  facts.rdma_devices.emplace_back("mlx5_10");  // a name that begins as another's
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(errs("mlx5_10: the kernel has it", "ibverbs-providers")));
  facts.rdma_ports.push_back(port("mlx5_10:2", 1, "eth1"));  // its second port can be used
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
}

TEST(Doctor, PortsThatAreNotUsed) {
  HostFacts facts = good_host();
  facts.rdma_devices.emplace_back("mlx5_2");
  facts.rdma_problems = {{"mlx5_2", 1, "is down"}};
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("mlx5_2 port 1: is down", "ip link set")));
}

TEST(Doctor, RdmaMtu) {
  HostFacts facts = good_host();
  facts.nics[0].mtu = 1500;
  facts.rdma_ports[0].mtu_bytes = 1024;
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("mlx5_0: MTU 1024: eth0 has 1500",
                                                      "ip link set dev eth0 mtu 4200")));
  facts.nics[0].mtu = 9000;
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(warns("MTU 1024 although eth0 has 9000", "ibv_devinfo")));
  facts.rdma_ports[0].link = "InfiniBand";
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("4096 is possible", "subnet manager")));
  facts.rdma_ports[0].mtu_bytes = 4096;
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
}

TEST(Doctor, LosslessNetworksAreToBeChecked) {
  HostFacts facts = good_host();
  const auto noted = [&](const char* what) { return has(facts, Severity::kNote, what); };
  EXPECT_TRUE(noted("PFC"));
  EXPECT_FALSE(noted("soft-RoCE"));
  facts.rdma_ports[0].software = facts.rdma_ports[1].software = true;
  EXPECT_FALSE(noted("PFC"));
  EXPECT_TRUE(noted("mlx5_0: soft-RoCE"));
  facts = good_host();
  facts.rdma_ports[0].link = facts.rdma_ports[1].link = "InfiniBand";
  EXPECT_FALSE(noted("PFC"));
}

TEST(Doctor, ANicOnANodeWithoutCpusIsServedByAnother) {
  HostFacts facts = good_host();
  facts.nodes.push_back({2, {}});
  facts.nics.push_back(nic("eth2", 2, "10.0.2.0/24"));
  facts.rdma_ports.push_back(port("mlx5_2", 2, "eth2"));
  facts.rdma_devices.emplace_back("mlx5_2");
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
}

TEST(Doctor, SaysWhatTheTopologyNotes) {
  HostFacts facts = good_host();
  facts.topology_notes = {{"left out: eth9", ""}, {"cores without memory", "add memory"}};
  EXPECT_TRUE(has(facts, Severity::kNote, "left out: eth9"));
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("cores without memory", "add memory")));
}

TEST(Doctor, MemoryOfAContainer) {
  HostFacts facts = good_host();
  EXPECT_TRUE(has(facts, Severity::kOk, "memory: 64.00 GiB, no limit"));
  facts.container = {.limit = 8 * kGiB, .available = 6 * kGiB, .file = "/group/memory.max"};
  EXPECT_TRUE(
      has(facts, Severity::kOk, "may use 8.00 GiB and has 6.00 GiB left (/group/memory.max)"));
  facts.container.available = kGiB / 2;
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("has 512.00 MiB left", "MemoryMax")));
  facts.container = {.unknown = "/group: Permission denied"};
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(warns("/group: Permission denied", "give --memory-limit")));
}

TEST(Doctor, LockedMemory) {
  HostFacts facts = good_host();
  facts.locked_memory = 8 << 20;
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(errs("locked memory: at most 8.00 MiB", "LimitMEMLOCK=infinity")));
  facts.locked_memory = 16 * kGiB;
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("16.00 GiB", "LimitMEMLOCK=infinity")));
  facts.may_lock = true;
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
  facts.may_lock = false;
  facts.locked_memory = 64 * kGiB;
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
}

TEST(Doctor, HugePages) {
  HostFacts facts = good_host();
  facts.huge_pages = "never";
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(warns("the box's own memory: never",
                                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")));
  facts.huge_pages = "always";
  for (const char* off : {"never", "deny"}) {
    facts.shared_huge_pages = off;
    EXPECT_THAT(worse_than_ok(facts),
                ElementsAre(warns("shared with workers",
                                  "echo advise > "
                                  "/sys/kernel/mm/transparent_hugepage/shmem_enabled")));
  }
  for (const char* on : {"always", "within_size", "force"}) {
    facts.shared_huge_pages = on;
    EXPECT_THAT(worse_than_ok(facts), IsEmpty()) << on;
  }
  facts.shared_huge_pages = "";
  EXPECT_TRUE(has(facts, Severity::kNote, "this kernel has no"));
  EXPECT_FALSE(has(facts, Severity::kNote, "nr_hugepages"));
  facts.reserved_huge_pages = 512;
  EXPECT_TRUE(has(facts, Severity::kNote, "512 huge pages are reserved"));
}

TEST(Doctor, OpenFiles) {
  HostFacts facts = good_host();
  facts.open_files = 1024;
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("up to 1024", "LimitNOFILE")));
  facts.open_files = 4096;
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
}

TEST(Doctor, ArpOnSharedSegments) {
  HostFacts facts = good_host();
  facts.nics[0].arp_ignore = 0;
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(warns("eth0: where NICs share", "net.ipv4.conf.all.arp_ignore=1")));
  facts.nics[0].arp_ignore = 2;
  facts.nics[1].arp_announce = 1;
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("eth1: where NICs share", "arp_announce=2")));
  facts.nics[0].up = false;  // one NIC that is left may answer for all
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
  facts.nics[0].up = true;
  facts.nics[0].bridge = true;  // docker0
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
  facts.nics[0].bridge = false;
  facts.nics[0].arp = false;  // a tunnel
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
}

TEST(Doctor, StrictReversePath) {
  HostFacts facts = good_host();
  facts.nics[1].rp_filter = 1;
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("eth1: strict reverse path", "rp_filter=2")));
  facts.nics[1].rp_filter = 2;
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
}

TEST(Doctor, NicsInOneSubnet) {
  HostFacts facts = good_host();
  facts.nics[1].subnets.emplace_back("10.0.0.0/24");
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(warns("eth0, eth1 are in one subnet, 10.0.0.0/24", "ip rule")));
  facts.nics[0].subnets = {"10.0.2.0/24", "10.0.2.0/24"};  // two addresses of one NIC
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
}

TEST(Doctor, NicsThatAreNotUsed) {
  HostFacts facts = good_host();
  facts.nics[1].up = false;
  EXPECT_TRUE(has(facts, Severity::kNote, "eth1: not used, it is down"));
  facts.nics[1].up = true;
  facts.nics[1].has_address = false;
  EXPECT_TRUE(has(facts, Severity::kNote, "eth1: not used, it has no IP address"));
  facts.nics[1].hardware = false;
  EXPECT_FALSE(has(facts, Severity::kNote, "eth1")) << "software's interfaces are nobody's cable";
  facts.nics[0].up = false;
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("no NIC is up", "ip link")));
}

TEST(Doctor, CongestionControl) {
  HostFacts facts = good_host();
  facts.congestion_control = "bbr";
  facts.congestion_available = {"reno", "cubic", "bbr"};
  facts.congestion_allowed = {"bbr"};
  facts.may_set_network = true;
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
  EXPECT_TRUE(has(facts, Severity::kOk, "phub uses cubic to workers on this machine"));
  facts.may_set_network = false;
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(warns("bbr paces", "tcp_allowed_congestion_control='bbr cubic reno'")));
  facts.congestion_allowed = {"bbr", "reno"};
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
  EXPECT_TRUE(has(facts, Severity::kOk, "phub uses reno"));
}

TEST(Doctor, NumaPlacement) {
  HostFacts facts = good_host();
  facts.allowed_cpus = {0, 1};
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(warns("mlx5_1: none of the CPUs of its NUMA node 1", "taskset")));
  facts.allowed_cpus = {0, 3};
  EXPECT_THAT(worse_than_ok(facts), IsEmpty());
  facts.rdma_ports[1].os_node = 0;
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(warns("all NICs are on NUMA node 0", "other processors")));
  facts.rdma_ports[1].os_node = std::nullopt;
  EXPECT_THAT(worse_than_ok(facts),
              ElementsAre(warns("mlx5_1: its NUMA node is not known", "BIOS")));
  facts.nodes = {{0, {0, 1, 2, 3}}};
  EXPECT_THAT(worse_than_ok(facts), IsEmpty()) << "one node: nothing to place";
}

// Without RDMA the Ethernet devices are what is placed.
TEST(Doctor, NumaPlacementOfEthernet) {
  HostFacts facts = good_host();
  facts.rdma_devices.clear();
  facts.rdma_ports.clear();
  facts.nics[0].os_node = 1;
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("all NICs are on NUMA node 1", "slots")));
}

TEST(Doctor, FewerCpusThanNics) {
  HostFacts facts = good_host();
  facts.nodes = {{0, {0}}};
  facts.allowed_cpus = {0};
  EXPECT_THAT(worse_than_ok(facts), ElementsAre(warns("fewer than the 2 NICs", "fewer NICs")));
}

TEST(Doctor, TellsPeopleAndPrograms) {
  HostFacts facts = good_host();
  facts.rdma_cm = false;
  facts.open_files = 100;
  expect_advice(facts);
  const std::vector<Finding> findings = judge(facts);
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

#include "numa/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <ios>
#include <set>
#include <sstream>
#include <system_error>
#include <thread>

#include "numa/host.h"

namespace phub::numa {
namespace topology_test {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::Ne;

template <typename Function>
std::string message_of(const Function& function) {
  try {
    function();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no error";
}

std::vector<uint32_t> core_nodes(const Topology& topology) {
  std::vector<uint32_t> nodes;
  for (const Core& core : topology.cores) nodes.push_back(core.node);
  return nodes;
}

std::vector<uint32_t> core_cpus(const Topology& topology) {
  std::vector<uint32_t> cpus;
  for (const Core& core : topology.cores) cpus.push_back(core.os_cpu);
  return cpus;
}

std::vector<std::string> nic_places(const Topology& topology) {
  std::vector<std::string> places;
  for (const NicInfo& nic : topology.nics) {
    places.push_back(nic.name + "@" + std::to_string(nic.node));
  }
  return places;
}

class File {
 public:
  explicit File(const std::string& text)
      : path_(::testing::TempDir() + "topology_test_" + std::to_string(getpid()) + ".xml") {
    std::ofstream(path_) << text;
  }
  ~File() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Synthetic, OneCorePerPhysicalCore) {
  const Topology topology = from_synthetic("pack:2 core:3 pu:2");
  EXPECT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes[1].os_node, 1u);
  EXPECT_THAT(core_nodes(topology), ElementsAre(0, 0, 0, 1, 1, 1));
  EXPECT_THAT(core_cpus(topology), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_TRUE(topology.nics.empty());
  EXPECT_EQ(topology.source, "synthetic pack:2 core:3 pu:2");
}

TEST(Synthetic, OneNodePerPackageUnlessItSaysOtherwise) {
  EXPECT_EQ(from_synthetic("Package:3(indexes=0,1,2) pu:2").nodes.size(), 3u);
  EXPECT_EQ(from_synthetic("pack:2 numa:2 core:2 pu:1").nodes.size(), 4u);
  EXPECT_EQ(from_synthetic("[numa] pack:2 core:2 pu:1").nodes.size(), 1u);
  EXPECT_EQ(from_synthetic("numa:4 core:2 pu:1").nodes.size(), 4u);
  EXPECT_EQ(from_synthetic("core:4 pu:1").nodes.size(), 1u);
}

TEST(Synthetic, NodesWithinPackagesAndMemory) {
  const Topology topology = from_synthetic("pack:2 die:2 [numa(memory=8GB)] core:2 pu:1");
  EXPECT_EQ(topology.nodes.size(), 4u);
  EXPECT_EQ(topology.nodes[3].memory_bytes, 8000000000u);
  EXPECT_THAT(core_nodes(topology), ElementsAre(0, 0, 1, 1, 2, 2, 3, 3));
}

TEST(Synthetic, MemoryFurtherAwayIsNotTheCoresOwn) {
  // A node of the whole machine (say, CXL memory) beside one per package.
  const Topology topology = from_synthetic("[numa] pack:2 [numa] core:2 pu:1");
  ASSERT_EQ(topology.nodes.size(), 3u);
  std::set<uint32_t> used;
  for (const Core& core : topology.cores) used.insert(core.node);
  EXPECT_EQ(used.size(), 2u);
}

TEST(Synthetic, ProcessingUnitsAreCoresWhereThereAreNone) {
  EXPECT_THAT(core_cpus(from_synthetic("pack:2 pu:2")), ElementsAre(0, 1, 2, 3));
}

TEST(Synthetic, BadDescriptionsAreNamed) {
  for (const char* bad : {"", "pack", "pack:2 cores of mine", "pack:0", "(", "pu:-1"}) {
    const std::string message = message_of([&] { from_synthetic(bad); });
    EXPECT_THAT(message, HasSubstr("synthetic \"")) << bad;
  }
  for (const char* huge : {"pack:100000", "pack:2 core:1000 pu:1000", "pack:4294967297 pu:1",
                           "65536 2", "pu:99999999999999999999999"}) {
    EXPECT_THAT(message_of([&] { from_synthetic(huge); }), HasSubstr("more than 65536")) << huge;
  }
}

std::string hex(uint32_t bits) {
  std::ostringstream text;
  text << "0x" << std::hex << bits;
  return text.str();
}

// A machine of packages with two cores each, two packages to a board, and a NIC at each package;
// `memory` has the bytes of each package's node, kNoNode where it has no node.
constexpr int64_t kNoNode = -1;
std::string machine(const std::vector<int64_t>& memory, const std::string& distances = "",
                    uint32_t forbidden_nodes = 0) {
  const auto sets = [](uint32_t cpus, uint32_t nodes) {
    return " cpuset=\"" + hex(cpus) + "\" complete_cpuset=\"" + hex(cpus) + "\" nodeset=\"" +
           hex(nodes) + "\" complete_nodeset=\"" + hex(nodes) + "\"";
  };
  const auto packages = static_cast<uint32_t>(memory.size());
  const auto cpus_of = [](uint32_t package) { return 3u << (2 * package); };
  const auto node_of = [&](uint32_t p) { return p < packages && memory[p] >= 0 ? 1u << p : 0; };
  uint32_t all_cpus = 0, all_nodes = 0;
  std::string boards;
  for (uint32_t first = 0; first < packages; first += 2) {
    const uint32_t end = std::min(first + 2, packages);
    uint32_t board_cpus = 0, board_nodes = 0;
    std::string inner;
    for (uint32_t p = first; p < end; p++) {
      const std::string here = sets(cpus_of(p), node_of(p));
      const std::string number = std::to_string(p);
      inner += "<object type=\"Package\" os_index=\"" + number + "\"" + here + ">";
      if (memory[p] >= 0) {
        inner += "<object type=\"NUMANode\" os_index=\"" + number + "\"" + here +
                 " local_memory=\"" + std::to_string(memory[p]) + "\"/>";
      }
      for (uint32_t cpu = 2 * p; cpu < 2 * p + 2; cpu++) {
        const std::string at =
            " os_index=\"" + std::to_string(cpu) + "\"" + sets(1u << cpu, node_of(p));
        inner += "<object type=\"Core\"" + at + "><object type=\"PU\"" + at + "/></object>";
      }
      inner += "<object type=\"Bridge\" bridge_type=\"0-1\" depth=\"0\" bridge_pci=\"0000:[" +
               number + "0-" + number + "1]\"><object type=\"PCIDev\" pci_busid=\"0000:" + number +
               "1:00.0\" pci_type=\"0200 [8086:10fb] [8086:0003] 01\" "
               "pci_link_speed=\"0.0\"><object type=\"OSDev\" name=\"eth" +
               number + "\" osdev_type=\"2\"/></object></object></object>";
      board_cpus |= cpus_of(p);
      board_nodes |= node_of(p);
    }
    boards += "<object type=\"Group\"" + sets(board_cpus, board_nodes) +
              " kind=\"1000\" subkind=\"0\">" + inner + "</object>";
    all_cpus |= board_cpus;
    all_nodes |= board_nodes;
  }
  return "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n"
         "<topology version=\"2.0\"><object type=\"Machine\" os_index=\"0\"" +
         sets(all_cpus, all_nodes) + " allowed_cpuset=\"" + hex(all_cpus) +
         "\" allowed_nodeset=\"" + hex(all_nodes & ~forbidden_nodes) + "\">" + boards +
         "</object>" + distances + "</topology>\n";
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  EXPECT_NE(text.find(what), text.npos) << what;
  return text.replace(text.find(what), what.size(), by);
}

std::string os_device(const std::string& name, int type) {
  return "<object type=\"OSDev\" name=\"" + name + "\" osdev_type=\"" + std::to_string(type) +
         "\"/>";
}

// Two packages: at the first an Ethernet card, at the other an mlx5 card (fabric and network device
// on one function); and what a machine has besides: a disk, loopback, a bridge. CPU 2 may not be
// used.
std::string two_packages() {
  std::string text = machine({1 << 30, 1 << 30});
  text = replaced(text, os_device("eth1", 2), os_device("ens1", 2) + os_device("mlx5_0", 3));
  const std::string eth0 = os_device("eth0", 2) + "</object>";
  text = replaced(text, eth0,
                  eth0 +
                      "<object type=\"PCIDev\" pci_busid=\"0000:02:00.0\" pci_type=\"0106 "
                      "[8086:8d02] [8086:0003] 01\" pci_link_speed=\"0.0\">" +
                      os_device("sda", 0) + "</object>");
  text = replaced(text, "</object></topology>",
                  os_device("lo", 2) + os_device("docker0", 2) + "</object></topology>");
  return replaced(text, "allowed_cpuset=\"0xf\"", "allowed_cpuset=\"0xb\"");
}

TEST(Xml, FindsNicsNextToTheirNodes) {
  const File file(two_packages());
  const Topology topology = from_xml(file.path());
  EXPECT_EQ(topology.source, "xml " + file.path());
  EXPECT_EQ(topology.nodes.size(), 2u);
  EXPECT_THAT(nic_places(topology), ElementsAre("eth0@0", "mlx5_0@1"))
      << "ens1 is mlx5_0 once more; lo and docker0 are no NICs";
}

TEST(Xml, LeavesOutCpusThatAreNotAllowed) {
  const File file(two_packages());
  EXPECT_THAT(core_cpus(from_xml(file.path())), ElementsAre(0, 1, 3));
}

std::vector<std::string> notes_of(const Topology& topology) {
  std::vector<std::string> notes;
  for (const Note& note : topology.notes) notes.push_back(note.what);
  return notes;
}

TEST(Xml, SaysWhatItLeavesOut) {
  // A card with no driver.
  const std::string text = replaced(two_packages(), os_device("eth0", 2), "");
  const Topology topology = from_xml(File(text).path());
  EXPECT_THAT(notes_of(topology),
              ElementsAre(HasSubstr("left out: 1 core that may not be used"),
                          HasSubstr("left out: lo, docker0, as they are on no bus"),
                          HasSubstr("left out: 1 network card without a network device (PCI "
                                    "0000:01:00.0)")));
  EXPECT_THAT(describe(topology), HasSubstr("in a container, give it the host's network"));
  const std::string shown = describe(topology);
  for (const std::string& note : notes_of(topology)) EXPECT_THAT(shown, HasSubstr(note));
  Topology other = topology;
  set_nics(other, 2);
  EXPECT_THAT(notes_of(other), ElementsAre(HasSubstr("1 core")));
}

TEST(Xml, CoresAndNicsWithoutMemoryOfTheirOwnAreOnTheNearestNode) {
  // Package 1 shares its board with package 0.
  const Topology topology = from_xml(File(machine({1 << 30, kNoNode, 1 << 30, 1 << 30})).path());
  EXPECT_EQ(topology.nodes.size(), 3u);
  EXPECT_THAT(core_cpus(topology), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(core_nodes(topology), ElementsAre(0, 0, 0, 0, 1, 1, 2, 2));
  EXPECT_THAT(nic_places(topology), ElementsAre("eth0@0", "eth1@0", "eth2@1", "eth3@2"));
  EXPECT_THAT(notes_of(topology),
              ElementsAre("2 cores (CPU 2-3) without memory of their own: the nearest is that of "
                          "node 0"));
}

TEST(Xml, NodesThatAreEquallyNearShareTheCoresAndNics) {
  // Both nodes of the other board are as near to a board without memory.
  const Topology topology = from_xml(File(machine({kNoNode, kNoNode, 1 << 30, 1 << 30})).path());
  EXPECT_THAT(core_nodes(topology), ElementsAre(0, 0, 0, 0, 1, 1, 1, 1));
  EXPECT_THAT(nic_places(topology), ElementsAre("eth0@0", "eth2@0", "eth1@1", "eth3@1"));
  EXPECT_THAT(notes_of(topology), ElementsAre(HasSubstr("CPU 0-3) without memory of their own: the "
                                                        "nearest is that of nodes 2-3")));
}

TEST(Xml, AnEmptyNodeUsesTheNodeAtTheLeastDistance) {
  const std::string distances =
      "<distances2 type=\"NUMANode\" nbobjs=\"4\" kind=\"5\" name=\"NUMALatency\" indexing=\"os\">"
      "<indexes length=\"8\">0 1 2 3 </indexes>"
      "<u64values length=\"48\">10 30 20 20 30 10 20 12 20 20 10 20 20 12 20 10 </u64values>"
      "</distances2>";
  const Topology topology =
      from_xml(File(machine({1 << 30, 0, 1 << 30, 1 << 30}, distances)).path());
  EXPECT_EQ(topology.nodes.size(), 4u);
  EXPECT_THAT(core_nodes(topology), ElementsAre(0, 0, 2, 2, 3, 3, 3, 3));
  EXPECT_THAT(nic_places(topology), ElementsAre("eth0@0", "eth2@2", "eth1@3", "eth3@3"));
  EXPECT_THAT(notes_of(topology), ElementsAre(HasSubstr("nearest is that of node 3")));
  // Without distances, the other package of the board is the nearest.
  EXPECT_THAT(core_nodes(from_xml(File(machine({1 << 30, 0, 1 << 30, 1 << 30})).path())),
              ElementsAre(0, 0, 0, 0, 2, 2, 3, 3));
}

TEST(Xml, MemoryThatIsNotAllowedIsNoMemory) {
  const Topology topology =
      from_xml(File(machine({1 << 30, 1 << 30, 1 << 30, 1 << 30}, "", 1u << 2)).path());
  EXPECT_THAT(core_nodes(topology), ElementsAre(0, 0, 1, 1, 3, 3, 3, 3));
  EXPECT_THAT(notes_of(topology), ElementsAre(HasSubstr("CPU 4-5")));
}

TEST(Xml, MemoryThatNobodyCountsIsMemory) {
  EXPECT_THAT(core_nodes(from_xml(File(machine({0, 0})).path())), ElementsAre(0, 0, 1, 1));
}

TEST(Xml, CoresAreThereIfOnlyNodesWithoutCpusHaveMemory) {
  const std::string node = "<object type=\"NUMANode\" os_index=\"0\" cpuset=";
  const std::string text = replaced(machine({1 << 30}), node + "\"0x3\"", node + "\"0x0\"");
  const Topology topology = from_xml(File(text).path());
  EXPECT_THAT(core_nodes(topology), ElementsAre(0, 0));
  EXPECT_THAT(nic_places(topology), ElementsAre("eth0@0"));
}

TEST(Xml, ANewerVersionIsNamedWithTheWayOut) {
  const File file(replaced(two_packages(), "version=\"2.0\"", "version=\"3.0\""));
  EXPECT_THAT(message_of([&] { from_xml(file.path()); }),
              HasSubstr("has version 3.0, and hwloc here reads versions up to 2: write it with "
                        "'lstopo --export-xml-flags v2 FILE.xml'"));
  const std::string half = two_packages().substr(0, 1000);
  const File other(half);
  EXPECT_THAT(message_of([&] { from_xml(other.path()); }), HasSubstr("(of version 2.0)"));
}

TEST(Xml, BadFilesAreNamed) {
  EXPECT_THAT(message_of([] { from_xml("/nowhere/x.xml"); }),
              HasSubstr("xml /nowhere/x.xml: No such file"));
  const std::string whole = two_packages();
  for (const std::string& text :
       {std::string(), std::string("no xml"), std::string("<topology version=\"2.0\"></topology>"),
        whole.substr(0, whole.size() / 2)}) {
    const File file(text);
    EXPECT_THAT(message_of([&] { from_xml(file.path()); }), HasSubstr("xml " + file.path()));
  }
}

TEST(ThisMachine, HasOnlyCoresThatThisProcessMayUse) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  const Topology topology = this_machine();
  EXPECT_EQ(topology.source, "this machine");
  ASSERT_FALSE(topology.cores.empty());
  for (const Core& core : topology.cores) EXPECT_TRUE(CPU_ISSET(core.os_cpu, &allowed));
  EXPECT_LE(topology.cores.size(), static_cast<size_t>(CPU_COUNT(&allowed)));
  EXPECT_TRUE(std::is_sorted(topology.cores.begin(), topology.cores.end(),
                             [](const Core& a, const Core& b) { return a.node < b.node; }));
}

// In a process of its own: the affinity of all threads is looked at.
TEST(ThisMachineDeathTest, FollowsTheAffinity) {
  const auto pinned_cores = [] {
    cpu_set_t allowed, one;
    sched_getaffinity(0, sizeof(allowed), &allowed);
    uint32_t last = CPU_SETSIZE - 1;
    while (!CPU_ISSET(last, &allowed)) last--;
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    sched_setaffinity(0, sizeof(one), &one);
    const Topology topology = this_machine();
    std::exit(topology.cores.size() == 1 && topology.cores[0].os_cpu == last ? 0 : 1);
  };
  EXPECT_EXIT(pinned_cores(), ::testing::ExitedWithCode(0), "");
}

// hwloc's own variables can stand in for the machine.
TEST(ThisMachineDeathTest, CanBeAnotherOne) {
  const auto synthetic = [] {
    setenv("HWLOC_SYNTHETIC", "pack:3 [numa] core:2 pu:1", 1);
    const Topology topology = this_machine();
    const bool right = topology.nodes.size() == 3 && topology.cores.size() == 6 &&
                       topology.nics.empty() && topology.source != "this machine";
    std::exit(right ? 0 : 1);
  };
  EXPECT_EXIT(synthetic(), ::testing::ExitedWithCode(0), "");
}

// Another network is another machine: what is there is not reached without a NIC.
TEST(ThisMachineDeathTest, HasItsNumberUntilItsNetworkIsAnother) {
  const uint64_t number = this_host();
  EXPECT_EQ(this_host(), number);
  for (const Node& node : this_machine().nodes) EXPECT_EQ(node.host, number);
  constexpr int kIsAnother = 0, kMayNot = 77;
  const auto elsewhere = [number] {
    if (this_host() != number) std::exit(1);
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) std::exit(kMayNot);
    std::exit(this_host() != number && this_host() != 0 ? kIsAnother : 2);
  };
  const auto is_right = [](int status) {
    return WIFEXITED(status) &&
           (WEXITSTATUS(status) == kIsAnother || WEXITSTATUS(status) == kMayNot);
  };
  EXPECT_EXIT(elsewhere(), is_right, "");
}

TEST(ThisMachine, VirtualDevicesAreNoNics) {
  const Topology machine = this_machine();
  size_t seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/class/net")) {
    std::error_code error;
    const std::string device = std::filesystem::canonical(entry.path(), error).string();
    if (error || device.find("/devices/virtual/") == std::string::npos) continue;
    ++seen;
    EXPECT_THAT(machine.nics, Each(Field(&NicInfo::name, Ne(entry.path().filename().string()))));
  }
  EXPECT_GE(seen, 1u) << "the loopback interface is one";
}

TEST(SetNics, SpreadsThemEvenlyOverNodesWithCores) {
  Topology topology = from_synthetic("pack:2 core:2 pu:1");
  set_nics(topology, 5);
  EXPECT_THAT(nic_places(topology), ElementsAre("nic0@0", "nic1@0", "nic2@0", "nic3@1", "nic4@1"));
  set_nics(topology, 1);
  EXPECT_THAT(nic_places(topology), ElementsAre("nic0@0"));
  set_nics(topology, 0);
  EXPECT_TRUE(topology.nics.empty());
  topology.nodes.push_back({});
  set_nics(topology, 4);
  EXPECT_THAT(nic_places(topology), ElementsAre("nic0@0", "nic1@0", "nic2@1", "nic3@1"));
  EXPECT_THAT(message_of([&] { set_nics(topology, 4097); }), HasSubstr("4097 NICs"));
}

TEST(Describe, ShowsNodesCoresAndNics) {
  Topology topology = from_synthetic("pack:2 [numa(memory=64GiB)] core:3 pu:2");
  set_nics(topology, 3);
  const std::string text = describe(topology);
  EXPECT_THAT(text, HasSubstr("synthetic pack:2"));
  EXPECT_THAT(text, HasSubstr("2 NUMA nodes, 6 cores, 3 NICs\n"));
  EXPECT_THAT(text, HasSubstr("64.0 GiB"));
  EXPECT_THAT(text, HasSubstr("CPU 6,8,10"));
  EXPECT_THAT(text, HasSubstr("nic0 nic1\n"));
}

}  // namespace topology_test
}  // namespace phub::numa

#include "numa/topology.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwloc.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "numa/host.h"
#include "numa/nearest.h"

namespace phub::numa {
namespace {

constexpr uint32_t kMaxNics = 4096;
constexpr uint64_t kMaxSyntheticObjects = 1u << 16;

template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw std::runtime_error(fmt::format(format, std::forward<Args>(args)...));
}

using Loaded = std::unique_ptr<hwloc_topology, void (*)(hwloc_topology_t)>;
using Bitmap = std::unique_ptr<hwloc_bitmap_s, void (*)(hwloc_bitmap_t)>;

Loaded new_topology() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) fail("hwloc_topology_init: {}", std::strerror(errno));
  // All of the machine, CPUs that are not ours included: only then is it known which node a NIC is
  // on. Of the devices only real ones.
  hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  // Linux's own files tell all that is needed. The others start drivers of GPUs and displays, and
  // libpciaccess leaks; that one of them is not installed is no error.
  for (const char* unneeded : {"pci", "gl", "opencl", "cuda", "nvml", "rsmi", "levelzero"}) {
    hwloc_topology_set_components(topology, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, unneeded);
  }
  return {topology, hwloc_topology_destroy};
}

// CPUs that this process may run on: its cgroup's, and within them its affinity's.
Bitmap usable_cpus(hwloc_topology_t topology) {
  Bitmap usable(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology)), hwloc_bitmap_free);
  if (!hwloc_topology_is_thissystem(topology)) return usable;
  const Bitmap bound(hwloc_bitmap_alloc(), hwloc_bitmap_free);
  if (hwloc_get_cpubind(topology, bound.get(), HWLOC_CPUBIND_PROCESS) == 0 &&
      hwloc_bitmap_intersects(usable.get(), bound.get())) {
    hwloc_bitmap_and(usable.get(), usable.get(), bound.get());
  }
  return usable;
}

// "0-3,8,10-11"
std::string ranges(std::vector<uint32_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) last++;
    text += text.empty() ? "" : ",";
    text +=
        last == i ? fmt::format("{}", numbers[i]) : fmt::format("{}-{}", numbers[i], numbers[last]);
    i = last + 1;
  }
  return text;
}

std::string plural(size_t n, std::string_view noun) {
  return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s");
}

// "eth0, eth1 and 14 others"
std::string first_of(const std::vector<std::string>& names) {
  constexpr size_t kMost = 8;
  const size_t shown = std::min(names.size(), kMost);
  std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  if (names.size() > kMost) text += fmt::format(" and {}", plural(names.size() - kMost, "other"));
  return text;
}

// "node 1", "nodes 0-3"
std::string named_nodes(const Topology& topology, const std::set<uint32_t>& nodes) {
  std::vector<uint32_t> numbers;
  for (const uint32_t node : nodes) numbers.push_back(topology.nodes[node].os_node);
  return fmt::format("node{} {}", nodes.size() == 1 ? "" : "s", ranges(numbers));
}

// Of `nodes`, the one with the fewest so far; `counts` has a number for each node.
uint32_t least_of(const std::vector<uint32_t>& nodes, const std::vector<uint32_t>& counts) {
  return *std::min_element(nodes.begin(), nodes.end(),
                           [&](uint32_t a, uint32_t b) { return counts[a] < counts[b]; });
}

using NodeOfCore = std::map<hwloc_obj_t, uint32_t>;

// The last `homeless` of the cores.
void note_cores(size_t homeless, size_t forbidden, Topology& result) {
  std::vector<uint32_t> cpus;
  std::set<uint32_t> nodes;
  for (size_t i = result.cores.size() - homeless; i < result.cores.size(); i++) {
    cpus.push_back(result.cores[i].os_cpu);
    nodes.insert(result.cores[i].node);
  }
  if (homeless > 0) {
    result.notes.push_back(
        {fmt::format("{} (CPU {}) without memory of {} own: the nearest is that of {}",
                     plural(homeless, "core"), ranges(cpus), homeless == 1 ? "its" : "their",
                     named_nodes(result, nodes)),
         "put memory into the slots of that processor, or allow its node (cpuset.mems)"});
  }
  if (forbidden > 0) {
    result.notes.push_back(
        {fmt::format("left out: {} that may not be used (taskset, cpuset, or what the file allows)",
                     plural(forbidden, "core")),
         ""});
  }
}

// Returns the node of each core that this process may use.
NodeOfCore add_cores(hwloc_topology_t topology, Nearest& nearest, Topology& result) {
  const Bitmap usable = usable_cpus(topology);
  // Some virtual machines and descriptions know processing units only.
  const bool has_cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE) > 0;
  const hwloc_obj_type_t type = has_cores ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  const Bitmap cpus(hwloc_bitmap_alloc(), hwloc_bitmap_free);
  NodeOfCore node_of;
  std::vector<uint32_t> cores_on(result.nodes.size(), 0);
  const auto add = [&](hwloc_obj_t core, uint32_t node) {
    hwloc_bitmap_and(cpus.get(), core->cpuset, usable.get());
    result.cores.push_back({node, static_cast<uint32_t>(hwloc_bitmap_first(cpus.get()))});
    cores_on[node]++;
    node_of[core] = node;
  };
  size_t forbidden = 0;
  std::vector<std::pair<hwloc_obj_t, std::vector<uint32_t>>> homeless;
  for (hwloc_obj_t core = nullptr;
       (core = hwloc_get_next_obj_by_type(topology, type, core)) != nullptr;) {
    if (hwloc_bitmap_intersects(core->cpuset, usable.get()) == 0) {
      forbidden++;
      continue;
    }
    Nearest::Nodes near = nearest.of(core);
    if (near.own) {
      add(core, near.nodes.front());
    } else {
      homeless.emplace_back(core, std::move(near.nodes));
    }
  }
  // Where several nodes are equally near, the cores are shared out.
  for (const auto& [core, near] : homeless) add(core, least_of(near, cores_on));
  note_cores(homeless.size(), forbidden, result);
  std::stable_sort(result.cores.begin(), result.cores.end(),
                   [](const Core& a, const Core& b) { return a.node < b.node; });
  return node_of;
}

// A soft-RoCE device runs over the network device that it names.
std::map<std::string, std::string> soft_roce_by_network_device() {
  std::map<std::string, std::string> devices;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/class/infiniband", none)) {
    std::ifstream file(entry.path() / "parent");
    std::string parent;
    if (std::getline(file, parent)) devices[parent] = entry.path().filename();
  }
  return devices;
}

bool is_nic(hwloc_obj_t device) {
  const auto type = device->attr->osdev.type;
  return type == HWLOC_OBJ_OSDEV_OPENFABRICS || type == HWLOC_OBJ_OSDEV_NETWORK;
}

// The PCI device that an operating system device belongs to; nullptr if none.
hwloc_obj_t pci_device_of(hwloc_obj_t device) {
  while (device != nullptr && device->type == HWLOC_OBJ_OS_DEVICE) device = device->parent;
  return device != nullptr && device->type == HWLOC_OBJ_PCI_DEVICE ? device : nullptr;
}

// The nodes that may drive a NIC at this place: those of the cores there that can be used or, if
// there are no CPUs, of those around it. Where no CPU of the place may be used, the place's own.
std::vector<uint32_t> nodes_for_nic(hwloc_obj_t place, Nearest& nearest,
                                    const NodeOfCore& node_of) {
  while (place->parent != nullptr && hwloc_bitmap_iszero(place->cpuset) != 0) place = place->parent;
  std::set<uint32_t> nodes;
  for (const auto& [core, node] : node_of) {
    if (hwloc_bitmap_intersects(core->cpuset, place->cpuset) != 0) nodes.insert(node);
  }
  if (nodes.empty()) return nearest.of(place).nodes;
  return {nodes.begin(), nodes.end()};
}

constexpr unsigned kPciNetwork = 0x02;       // the class, of class and subclass
constexpr unsigned kPciInfiniBand = 0x0c06;  // as it was before it became a network

// Network cards that the system has made no network device of.
void note_cards_without_device(hwloc_topology_t topology, const std::set<hwloc_obj_t>& in_use,
                               Topology& result) {
  std::vector<std::string> names;
  for (hwloc_obj_t d = nullptr; (d = hwloc_get_next_pcidev(topology, d)) != nullptr;) {
    const auto& pci = d->attr->pcidev;
    if (pci.class_id >> 8 != kPciNetwork && pci.class_id != kPciInfiniBand) continue;
    if (in_use.contains(d)) continue;
    names.push_back(
        fmt::format("{:04x}:{:02x}:{:02x}.{:x}", pci.domain, pci.bus, pci.dev, pci.func));
  }
  if (names.empty()) return;
  result.notes.push_back(
      {fmt::format("left out: {} without a network device (PCI {})",
                   plural(names.size(), "network card"), first_of(names)),
       "if they are to be used, load a driver for them, or, in a container, give it "
       "the host's network",
       true});
}

void add_nics(hwloc_topology_t topology, Nearest& nearest, const NodeOfCore& node_of,
              Topology& result) {
  const bool here = hwloc_topology_is_thissystem(topology) != 0;
  const auto soft_roce =
      here ? soft_roce_by_network_device() : std::map<std::string, std::string>();
  std::set<hwloc_obj_t> fabrics;  // PCI devices whose network device is the same NIC once more
  std::set<hwloc_obj_t> cards;    // PCI devices with network devices
  for (hwloc_obj_t d = nullptr; (d = hwloc_get_next_osdev(topology, d)) != nullptr;) {
    if (d->attr->osdev.type == HWLOC_OBJ_OSDEV_OPENFABRICS) fabrics.insert(pci_device_of(d));
    if (is_nic(d)) cards.insert(pci_device_of(d));
  }
  std::vector<uint32_t> nics_on(result.nodes.size(), 0);
  std::vector<std::string> virtual_nics;
  for (hwloc_obj_t d = nullptr; (d = hwloc_get_next_osdev(topology, d)) != nullptr;) {
    if (!is_nic(d)) continue;
    const hwloc_obj_t pci = pci_device_of(d);
    // A saved description may hold loopback, bridges and the like; they are on no bus. (On this
    // machine hwloc leaves them out, and a virtual machine's NICs need not be on a bus.)
    if (pci == nullptr && !here) {
      virtual_nics.emplace_back(d->name);
      continue;
    }
    const bool is_network = d->attr->osdev.type == HWLOC_OBJ_OSDEV_NETWORK;
    if (is_network && pci != nullptr && fabrics.contains(pci)) continue;

    // Where several nodes are equally near, the NICs are shared out.
    const hwloc_obj_t place = hwloc_get_non_io_ancestor_obj(topology, d);
    const std::vector<uint32_t> near = nodes_for_nic(place, nearest, node_of);
    const uint32_t node = least_of(near, nics_on);
    nics_on[node]++;
    const auto soft = soft_roce.find(d->name);
    result.nics.push_back({node, soft == soft_roce.end() ? d->name : soft->second});
  }
  if (!virtual_nics.empty()) {
    result.notes.push_back(
        {fmt::format("left out: {}, as {} on no bus of the machine", first_of(virtual_nics),
                     virtual_nics.size() == 1 ? "it is" : "they are"),
         "", true});
  }
  note_cards_without_device(topology, cards, result);
  std::stable_sort(result.nics.begin(), result.nics.end(),
                   [](const NicInfo& a, const NicInfo& b) { return a.node < b.node; });
}

Topology convert(hwloc_topology_t topology, const std::string& source) {
  Topology result;
  result.source = source;
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    result.nodes.push_back({node->os_index, node->attr->numanode.local_memory});
  }
  if (result.nodes.empty()) fail("{} has no NUMA nodes", source);
  Nearest nearest(topology);
  const NodeOfCore node_of = add_cores(topology, nearest, result);
  if (result.cores.empty()) fail("{} has no cores that this process may use", source);
  add_nics(topology, nearest, node_of, result);
  return result;
}

// hwloc builds whatever it is asked for; a billion cores would take all memory. Counts stand at the
// beginning of a word or behind a colon; attributes in parentheses hold none.
void check_size(const std::string& description) {
  uint64_t objects = 1;
  int depth = 0;
  char before = ' ';
  for (size_t i = 0; i < description.size(); i++) {
    const char c = description[i];
    depth += (c == '(') - (c == ')');
    if (depth == 0 && c >= '1' && c <= '9' && (before == ' ' || before == ':')) {
      const std::string digits =
          description.substr(i, description.find_first_not_of("0123456789", i) - i);
      objects = digits.size() > 9 ? kMaxSyntheticObjects + 1 : objects * std::stoull(digits);
      if (objects > kMaxSyntheticObjects) {
        fail("synthetic \"{}\": more than {} processing units", description, kMaxSyntheticObjects);
      }
    }
    before = c;
  }
}

// Where a description has packages and says nothing about memory, hwloc makes one node of all.
// People mean a node per package.
std::string with_nodes(const std::string& description) {
  std::string lower = description;
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const size_t package = std::min(lower.find("pack"), lower.find("socket"));
  const bool has_nodes = lower.find("numa") != lower.npos || lower.find('[') != lower.npos;
  if (package == lower.npos || has_nodes) return description;
  const size_t end = std::min(lower.find(' ', package), lower.size());
  return description.substr(0, end) + " [numa]" + description.substr(end);
}

// What follows `<topology version="` in the file; "" if there is none in its first bytes.
std::string version_of_xml(const std::string& path) {
  constexpr size_t kMost = 4096;
  std::string text(kMost, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), kMost);
  text.resize(static_cast<size_t>(file.gcount()));
  constexpr std::string_view kBefore = "<topology version=\"";
  const size_t at = text.find(kBefore);
  if (at == text.npos) return "";
  const size_t begin = at + kBefore.size();
  return text.substr(begin, text.find_first_not_of("0123456789.", begin) - begin);
}

[[noreturn]] void fail_xml(const std::string& path) {
  const std::string version = version_of_xml(path);
  const unsigned readable = hwloc_get_api_version() >> 16;
  if (std::strtoul(version.c_str(), nullptr, 10) > readable) {
    fail(
        "xml {} has version {}, and hwloc here reads versions up to {}: write it with 'lstopo "
        "--export-xml-flags v{} FILE.xml'",
        path, version, readable, readable);
  }
  fail("xml {}{} is no topology that hwloc {} can read (lstopo writes them: lstopo FILE.xml)", path,
       version.empty() ? "" : fmt::format(" (of version {})", version), HWLOC_VERSION);
}

}  // namespace

Topology this_machine() {
  const Loaded topology = new_topology();
  if (hwloc_topology_load(topology.get()) != 0) {
    fail("hwloc cannot read this machine's topology: {}", std::strerror(errno));
  }
  const bool here = hwloc_topology_is_thissystem(topology.get()) != 0;
  Topology found =
      convert(topology.get(), here ? "this machine" : "hwloc's environment variables (HWLOC_…)");
  for (Node& node : found.nodes) node.host = this_host();
  return found;
}

Topology from_xml(const std::string& path) {
  if (std::ifstream file(path); !file) fail("xml {}: {}", path, std::strerror(errno));
  const Loaded topology = new_topology();
  errno = 0;
  if (hwloc_topology_set_xml(topology.get(), path.c_str()) != 0 ||
      hwloc_topology_load(topology.get()) != 0) {
    fail_xml(path);
  }
  return convert(topology.get(), "xml " + path);
}

Topology from_synthetic(const std::string& description) {
  check_size(description);
  const Loaded topology = new_topology();
  if (hwloc_topology_set_synthetic(topology.get(), with_nodes(description).c_str()) != 0 ||
      hwloc_topology_load(topology.get()) != 0) {
    fail("synthetic \"{}\" is not hwloc's syntax (for example \"pack:2 core:8 pu:1\")",
         description);
  }
  return convert(topology.get(), "synthetic " + description);
}

Topology find_topology(const std::string& text) {
  if (text == "this") return this_machine();
  const bool is_file = text.find('/') != text.npos || text.ends_with(".xml");
  return is_file ? from_xml(text) : from_synthetic(text);
}

void set_nics(Topology& topology, uint32_t count) {
  if (count > kMaxNics) fail("{} NICs; there can be at most {}", count, kMaxNics);
  std::vector<uint32_t> nodes;  // that can drive a NIC
  for (const Core& core : topology.cores) {
    if (nodes.empty() || nodes.back() != core.node) nodes.push_back(core.node);
  }
  if (nodes.empty() && count > 0) fail("{} has no cores to drive NICs", topology.source);
  topology.nics.clear();
  std::erase_if(topology.notes, [](const Note& note) { return note.of_nics; });
  for (uint32_t i = 0; i < count; i++) {
    topology.nics.push_back({nodes[uint64_t{i} * nodes.size() / count], fmt::format("nic{}", i)});
  }
}

void append(const Topology& one, uint32_t box, uint64_t host, Topology& all) {
  const auto first = static_cast<uint32_t>(all.nodes.size());
  for (const Node& node : one.nodes) {
    all.nodes.push_back({node.os_node, node.memory_bytes, box, host});
  }
  for (const Core& core : one.cores) all.cores.push_back({first + core.node, core.os_cpu});
  for (const NicInfo& nic : one.nics) all.nics.push_back({first + nic.node, nic.name});
}

std::string describe(const Topology& topology) {
  std::string text =
      fmt::format("{}: {}, {}, {}\n", topology.source, plural(topology.nodes.size(), "NUMA node"),
                  plural(topology.cores.size(), "core"), plural(topology.nics.size(), "NIC"));
  for (uint32_t n = 0; n < topology.nodes.size(); n++) {
    std::vector<uint32_t> cpus;
    for (const Core& core : topology.cores) {
      if (core.node == n) cpus.push_back(core.os_cpu);
    }
    std::vector<std::string_view> nics;
    for (const NicInfo& nic : topology.nics) {
      if (nic.node == n) nics.push_back(nic.name);
    }
    const Node& node = topology.nodes[n];
    text += fmt::format("  node {:<3} {:>8.1f} GiB   {:<9} {:<14} {}\n", node.os_node,
                        static_cast<double>(node.memory_bytes) / (1ull << 30),
                        plural(cpus.size(), "core"),
                        cpus.empty() ? "" : fmt::format("(CPU {})", ranges(cpus)),
                        nics.empty() ? "no NIC" : fmt::format("{}", fmt::join(nics, " ")));
  }
  for (const Note& note : topology.notes) {
    text += fmt::format("  {}{}{}\n", note.what, note.todo.empty() ? "" : ": ", note.todo);
  }
  return text;
}

}  // namespace phub::numa

// `phub doctor`: the checks of memory and processors, and the findings as text and JSON.
#include "phub/commands/doctor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "phub/text_table.h"

namespace phub {
namespace {

// ResNet-50 with eight ranks: gradient slots, parameters and results.
constexpr uint64_t kSmallJobBytes = 1ull << 30;

Finding judge_locked_memory(const HostFacts& facts) {
  Finding finding{"memory and limits", Severity::kOk, "", ""};
  if (facts.may_lock || !facts.locked_memory) {
    finding.what = facts.may_lock ? "locked memory: no limit for this process (CAP_IPC_LOCK)"
                                  : "locked memory: no limit";
    return finding;
  }
  const uint64_t limit = *facts.locked_memory;
  finding.what = fmt::format("locked memory: at most {}", human_bytes(limit));
  if (facts.rdma_devices.empty() && facts.rdma_ports.empty()) {
    finding.what += " (only RDMA needs it)";
    return finding;
  }
  if (limit >= facts.memory_bytes) return finding;
  finding.severity = limit < kSmallJobBytes ? Severity::kError : Severity::kWarn;
  finding.what += ": over RDMA all of a job's gradients and parameters are locked";
  finding.todo =
      "LimitMEMLOCK=infinity in the unit, ulimit -l unlimited, or memlock in "
      "/etc/security/limits.conf";
  return finding;
}

// What `phub serve` takes without --memory-limit.
Finding judge_memory_of_jobs(const HostFacts& facts) {
  const ContainerMemory& container = facts.container;
  const std::string machine = human_bytes(facts.memory_bytes);
  Finding finding{"memory and limits", Severity::kOk, "", ""};
  if (!container.unknown.empty()) {
    finding.severity = Severity::kWarn;
    finding.what = fmt::format(
        "memory: {}, and a limit of this container may be there that is "
        "not seen: {}",
        machine, container.unknown);
    finding.todo = "give --memory-limit, below the container's limit";
  } else if (container.file.empty()) {
    finding.what = fmt::format("memory: {}, no limit of a container or unit", machine);
  } else {
    finding.what = fmt::format(
        "memory: {}, of which the control group may use {} and has {} left "
        "({}); jobs may take 80% of that, unless --memory-limit says "
        "otherwise",
        machine, human_bytes(container.limit), human_bytes(container.available), container.file);
    if (container.available < kSmallJobBytes) {
      finding.severity = Severity::kWarn;
      finding.todo = "raise the limit of the container or unit (MemoryMax)";
    }
  }
  return finding;
}

void judge_huge_pages(const HostFacts& facts, std::vector<Finding>& findings) {
  const auto judge_setting = [&](const std::string& word, const char* what, const char* file,
                                 std::initializer_list<std::string_view> off) {
    Finding finding{"memory and limits", Severity::kOk, fmt::format("{}: {}", what, word), ""};
    const std::string path = fmt::format("/sys/kernel/mm/transparent_hugepage/{}", file);
    if (word.empty()) {
      finding.severity = Severity::kNote;
      finding.what = fmt::format("{}: this kernel has no {}", what, path);
    } else if (std::find(off.begin(), off.end(), word) != off.end()) {
      finding.severity = Severity::kWarn;
      finding.what += ", so pages are small, and TLB misses of cores and NICs frequent";
      finding.todo = fmt::format("echo {} > {}", file[0] == 'e' ? "madvise" : "advise", path);
    }
    findings.push_back(finding);
  };
  judge_setting(facts.huge_pages, "huge pages for the box's own memory", "enabled", {"never"});
  judge_setting(facts.shared_huge_pages, "huge pages for memory shared with workers",
                "shmem_enabled", {"never", "deny"});
  if (facts.reserved_huge_pages > 0) {
    findings.push_back({"memory and limits", Severity::kNote,
                        fmt::format("{} huge pages are reserved (nr_hugepages), which phub does "
                                    "not use: it uses transparent huge pages",
                                    facts.reserved_huge_pages),
                        "sysctl -w vm.nr_hugepages=0, unless something else needs them"});
  }
}

// The NICs that a plan would use, as name and node: RDMA ports if there are any.
std::vector<std::pair<std::string, std::optional<uint32_t>>> planned_nics(const HostFacts& facts) {
  std::vector<std::pair<std::string, std::optional<uint32_t>>> nics;
  for (const RdmaPortFacts& port : facts.rdma_ports) nics.emplace_back(port.name, port.os_node);
  if (!nics.empty()) return nics;
  for (const NicFacts& nic : facts.nics) {
    if (nic.usable()) nics.emplace_back(nic.name, nic.os_node);
  }
  return nics;
}

size_t allowed_on(const HostFacts& facts, const NodeFacts& node) {
  return static_cast<size_t>(std::count_if(node.cpus.begin(), node.cpus.end(), [&](uint32_t cpu) {
    return std::find(facts.allowed_cpus.begin(), facts.allowed_cpus.end(), cpu) !=
           facts.allowed_cpus.end();
  }));
}

void judge_nodes(const HostFacts& facts, std::vector<Finding>& findings) {
  std::vector<uint32_t> with_nics, with_cpus;
  size_t known = 0;
  for (const NodeFacts& node : facts.nodes) {
    if (allowed_on(facts, node) > 0) with_cpus.push_back(node.os_node);
  }
  for (const auto& [name, os_node] : planned_nics(facts)) {
    if (!os_node) {
      findings.push_back(
          {"processors", Severity::kWarn,
           fmt::format("{}: its NUMA node is not known; node 0 is assumed", name),
           "set it in the virtual machine's configuration; on hardware, update the BIOS"});
      continue;
    }
    known++;
    if (std::find(with_nics.begin(), with_nics.end(), *os_node) == with_nics.end()) {
      with_nics.push_back(*os_node);
    }
    // Cores of another node serve the NIC of a node that has no CPUs.
    const auto node = std::ranges::find(facts.nodes, *os_node, &NodeFacts::os_node);
    if (node == facts.nodes.end() || node->cpus.empty()) continue;
    if (std::find(with_cpus.begin(), with_cpus.end(), *os_node) != with_cpus.end()) continue;
    findings.push_back({"processors", Severity::kWarn,
                        fmt::format("{}: none of the CPUs of its NUMA node {} may be used, so the "
                                    "NIC stays unused",
                                    name, *os_node),
                        "allow CPUs of that node (taskset, cpuset, AllowedCPUs= in the unit)"});
  }
  if (known < 2) return;
  if (with_nics.size() == 1 && with_cpus.size() > 1) {
    findings.push_back(
        {"processors", Severity::kWarn,
         fmt::format("all NICs are on NUMA node {}: cores and memory of the other "
                     "nodes stay unused",
                     with_nics[0]),
         "move NICs to slots of the other processors; 'phub plan' shows the result"});
  } else if (with_nics.size() > 1) {
    findings.push_back({"processors", Severity::kOk,
                        fmt::format("NICs on NUMA nodes {}", fmt::join(with_nics, ", ")), ""});
  }
}

}  // namespace

void judge_memory(const HostFacts& facts, std::vector<Finding>& findings) {
  findings.push_back(judge_memory_of_jobs(facts));
  findings.push_back(judge_locked_memory(facts));
  judge_huge_pages(facts, findings);
  // Each worker takes a connection per queue over tcp, and a few descriptors over shared memory.
  constexpr uint64_t kManyFiles = 4096;
  Finding files{"memory and limits", Severity::kOk,
                fmt::format("open files: up to {}", facts.open_files), ""};
  if (facts.open_files < kManyFiles) {
    files.severity = Severity::kWarn;
    files.what += ", and over tcp every worker takes one per queue (core and NIC)";
    files.todo = "LimitNOFILE=65536 in the unit, or ulimit -Hn 65536";
  }
  findings.push_back(files);
}

void judge_processors(const HostFacts& facts, std::vector<Finding>& findings) {
  size_t all = 0;
  for (const NodeFacts& node : facts.nodes) all += node.cpus.size();
  const size_t allowed = facts.allowed_cpus.size(), nics = planned_nics(facts).size();
  Finding cpus{
      "processors", Severity::kOk,
      fmt::format("{} of {} CPUs may be used, on {} NUMA node{}", allowed, std::max(all, allowed),
                  facts.nodes.size(), facts.nodes.size() == 1 ? "" : "s"),
      ""};
  if (allowed < nics) {
    cpus.severity = Severity::kWarn;
    cpus.what += fmt::format(", fewer than the {} NICs: a core serves several", nics);
    cpus.todo = "allow more CPUs (taskset, cpuset), or name fewer NICs to serve";
  }
  findings.push_back(cpus);
  for (const numa::Note& note : facts.topology_notes) {
    findings.push_back({"processors", note.todo.empty() ? Severity::kNote : Severity::kWarn,
                        note.what, note.todo});
  }
  // With one node there is nothing to choose.
  if (facts.nodes.size() > 1) judge_nodes(facts, findings);
}

std::vector<Finding> judge(const HostFacts& facts) {
  std::vector<Finding> findings;
  judge_rdma(facts, findings);
  judge_libfabric(facts, findings);
  judge_network(facts, findings);
  judge_memory(facts, findings);
  judge_processors(facts, findings);
  return findings;
}

std::string_view name_of(Severity severity) {
  switch (severity) {
    case Severity::kOk:
      return "ok";
    case Severity::kNote:
      return "note";
    case Severity::kWarn:
      return "warn";
    case Severity::kError:
      return "error";
  }
  return "unknown";
}

std::string describe(const std::vector<Finding>& findings) {
  std::string text, group;
  for (const Finding& finding : findings) {
    if (finding.group != group) {
      text += fmt::format("{}{}\n", group.empty() ? "" : "\n", finding.group);
      group = finding.group;
    }
    text += fmt::format("  {:<6} {}\n", name_of(finding.severity), finding.what);
    if (!finding.todo.empty()) text += fmt::format("         -> {}\n", finding.todo);
  }
  const auto count = [&](Severity severity) {
    return std::count_if(findings.begin(), findings.end(),
                         [&](const Finding& f) { return f.severity == severity; });
  };
  const auto errors = count(Severity::kError), warnings = count(Severity::kWarn);
  return text + fmt::format("\n{} error{}, {} warning{}\n", errors, errors == 1 ? "" : "s",
                            warnings, warnings == 1 ? "" : "s");
}

std::string to_json(const std::vector<Finding>& findings) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"group", finding.group},
                    {"severity", name_of(finding.severity)},
                    {"what", finding.what},
                    {"todo", finding.todo}});
  }
  // Names of devices and files need not be UTF-8.
  using Json = nlohmann::ordered_json;
  return Json{{"findings", list}}.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace phub

#include "phub/commands/container_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "transport/text.h"

namespace phub {
namespace {

// The names of the files of one version, and of the lines of memory.stat that count pages which the
// kernel takes back when memory is short.
struct Version {
  std::vector<std::string_view> limits;
  std::string_view used;
  std::vector<std::string_view> reclaimable;
};
const Version kOne = {{"memory.limit_in_bytes"},
                      "memory.usage_in_bytes",
                      {"total_inactive_file", "total_active_file"}};
// Beyond memory.high the kernel slows the group down so much that it stands still.
const Version kTwo = {{"memory.max", "memory.high"},
                      "memory.current",
                      {"inactive_file", "active_file", "slab_reclaimable"}};
// Version one writes "no limit" as a number of about 2^63, rounded to pages.
constexpr uint64_t kMostLimit = uint64_t{1} << 62;

// Where a hierarchy of groups is mounted, and which of its groups is seen there as the root.
struct Mount {
  std::string folder, group;
};

std::optional<uint64_t> number_of(std::string_view text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return number;
}

// Of lines "NAME NUMBER", the sum of those with these names.
uint64_t sum_of(const std::string& path, const std::vector<std::string_view>& names) {
  std::ifstream file(path);
  uint64_t sum = 0, number = 0;
  for (std::string name; file >> name >> number;) {
    if (std::ranges::count(names, name) > 0) sum += number;
  }
  return sum;
}

// "\040" stands for a space in /proc/self/mountinfo.
std::string unescaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); i++) {
    unsigned value = 0;
    const char* digits = text.data() + i + 1;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(digits, digits + 3, value, 8).ptr == digits + 3) {
      out += static_cast<char>(value);
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

// Of lines "36 35 0:32 GROUP FOLDER OPTIONS … - TYPE SOURCE OPTIONS", where the options of version
// one name its controllers.
std::optional<Mount> mount_of(const std::string& root, bool two) {
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream words(line);
    std::string skip, group, folder, type, options;
    words >> skip >> skip >> skip >> group >> folder;
    while (words >> skip && skip != "-") {
    }
    words >> type >> skip >> options;
    const bool memory = ("," + options + ",").find(",memory,") != std::string::npos;
    if (two ? type != "cgroup2" : type != "cgroup" || !memory) continue;
    return Mount{unescaped(folder), unescaped(group)};
  }
  return std::nullopt;
}

// The least limit of a group, and the file that has it. In version one memory.stat has what the
// groups around allow, too, also where these are not seen.
uint64_t limit_in(const std::string& folder, const Version& version, ContainerMemory& found,
                  std::string& file) {
  uint64_t least = ContainerMemory::kNoLimit;
  for (const std::string_view name : version.limits) {
    const std::string path = fmt::format("{}/{}", folder, name);
    errno = 0;
    std::ifstream stream(path);
    if (!stream) {
      // The root has no limit, and of a group outside of the container there is no folder.
      if (errno != ENOENT) found.unknown = fmt::format("{}: {}", path, std::strerror(errno));
      continue;
    }
    std::string text;
    if (!(stream >> text)) found.unknown = path + " cannot be read";
    const std::optional<uint64_t> limit = number_of(text);
    if (!limit || *limit >= least) continue;  // "max"
    least = *limit;
    file = path;
  }
  const std::string statistics = folder + "/memory.stat";
  const uint64_t around = sum_of(statistics, {"hierarchical_memory_limit"});
  if (around > 0 && around < least) least = around, file = statistics;
  return least;
}

void look_at(const std::string& folder, const Version& version, ContainerMemory& found) {
  std::string file;
  const uint64_t limit = limit_in(folder, version, found, file);
  if (limit >= kMostLimit) return;
  const uint64_t used =
      number_of(first_line(fmt::format("{}/{}", folder, version.used))).value_or(0);
  const uint64_t kept = used - std::min(used, sum_of(folder + "/memory.stat", version.reclaimable));
  const uint64_t available = limit - std::min(limit, kept);
  if (available > found.available || (available == found.available && limit >= found.limit)) return;
  found.limit = limit;
  found.available = available;
  found.file = file;
}

// From the group up to the root of what is mounted. `path` is the group's name in the hierarchy, of
// which the mount may show a part; a name outside of it leads to the part's root.
void look_up_from(const std::string& root, const std::string& path, bool two,
                  ContainerMemory& found) {
  const std::optional<Mount> mount = mount_of(root, two);
  if (!mount) {
    // Where version one limits memory, processes are in the root of version two.
    if (!two || path != "/") found.unknown = "the control groups of memory are not mounted here";
    return;
  }
  const std::string seen = root + mount->folder;
  if (mount->group.starts_with("/..")) {
    found.unknown =
        fmt::format("the control groups at {} are mounted for another name space", seen);
    return;
  }
  // Every group has this file. Another file system may lie over the groups.
  if (!std::ifstream(seen + "/cgroup.procs")) {
    found.unknown = fmt::format("the control groups of memory are hidden: {} cannot be read",
                                seen + "/cgroup.procs");
    return;
  }
  std::string below = path;
  if (mount->group != "/") {
    const bool inside = below == mount->group || below.starts_with(mount->group + "/");
    below = inside ? below.substr(mount->group.size()) : "";
  }
  if (below.starts_with("/..")) below.clear();  // outside of the name space
  for (;;) {
    while (below.ends_with('/')) below.pop_back();
    look_at(seen + below, two ? kTwo : kOne, found);
    if (below.empty()) return;
    below.resize(below.rfind('/') == below.npos ? 0 : below.rfind('/'));
  }
}

}  // namespace

// Lines "4:memory:/docker/f00" of version one, "0::/system.slice/phub.service" of version two.
ContainerMemory container_memory(const std::string& root) {
  ContainerMemory found;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") look_up_from(root, path, true, found);
    if (controllers.find(",memory,") != controllers.npos) look_up_from(root, path, false, found);
  }
  return found;
}

}  // namespace phub

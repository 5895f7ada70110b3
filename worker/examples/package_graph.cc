#include "worker/examples/package_graph.h"

#include <algorithm>
#include <fstream>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "transport/error.h"
#include "worker/examples/files.h"

namespace phub::examples {
namespace {

// "libc6:any (>= 2.34)" without what is not the name.
std::string_view name_in(std::string_view dependency) {
  const size_t begin = dependency.find_first_not_of(' ');
  if (begin == std::string_view::npos) return {};
  dependency.remove_prefix(begin);
  return dependency.substr(0, dependency.find_first_of(" :("));
}

std::string_view value_of(std::string_view line, std::string_view field) {
  return line.starts_with(field) ? line.substr(field.size()) : std::string_view();
}

}  // namespace

PackageGraph read_packages(const std::string& path) {
  std::ifstream file = open_to_read(path);
  std::vector<std::pair<std::string, std::string>> dependencies;  // by name
  PackageGraph graph;
  for (std::string line; std::getline(file, line);) {
    if (const auto name = value_of(line, "Package: "); !name.empty()) {
      graph.names.emplace_back(name);
    }
    for (const char* field : {"Depends: ", "Pre-Depends: "}) {
      std::string_view list = value_of(line, field);
      while (!list.empty() && !graph.names.empty()) {
        const size_t end = std::min(list.find_first_of(",|"), list.size());
        dependencies.emplace_back(graph.names.back(), name_in(list.substr(0, end)));
        list.remove_prefix(std::min(end + 1, list.size()));
      }
    }
  }
  if (graph.names.empty()) {
    fail(ErrorCode::kInvalid, "{} has no packages: make it with `apt-cache dumpavail`", path);
  }
  std::ranges::sort(graph.names);
  graph.names.erase(std::unique(graph.names.begin(), graph.names.end()), graph.names.end());
  std::unordered_map<std::string_view, uint32_t> numbers;
  for (uint32_t n = 0; n < graph.names.size(); ++n) numbers[graph.names[n]] = n;
  for (const auto& [from, to] : dependencies) {
    const auto at = numbers.find(to);
    if (at == numbers.end() || from == to) continue;
    graph.links.push_back({numbers.at(from), at->second});
  }
  const auto key = [](const PackageGraph::Link& l) { return std::pair(l.from, l.to); };
  std::ranges::sort(graph.links, {}, key);
  graph.links.erase(std::unique(graph.links.begin(), graph.links.end()), graph.links.end());
  return graph;
}

}  // namespace phub::examples

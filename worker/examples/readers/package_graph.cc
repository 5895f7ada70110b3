#include <algorithm>
#include <string_view>
#include <utility>

#include "worker/examples/readers/graph.h"
#include "worker/examples/readers/lines.h"
#include "worker/examples/readers/names.h"

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

Graph read_packages(const std::string& path) {
  Lines lines(path);
  std::vector<std::pair<std::string, std::string>> dependencies;  // by name
  Graph graph;
  while (const auto line = lines.next()) {
    if (const auto name = value_of(*line, "Package: "); !name.empty()) {
      graph.names.emplace_back(name);
    }
    for (const char* field : {"Depends: ", "Pre-Depends: "}) {
      std::string_view list = value_of(*line, field);
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
  const Names numbers(graph.names);
  for (const auto& [from, to] : dependencies) {
    const uint32_t* at = numbers.find(to);
    if (at == nullptr || from == to) continue;
    graph.links.push_back({.from = *numbers.find(from), .to = *at});
  }
  const auto key = [](const Graph::Link& l) { return std::pair(l.from, l.to); };
  std::ranges::sort(graph.links, {}, key);
  graph.links.erase(std::unique(graph.links.begin(), graph.links.end()), graph.links.end());
  graph.digest = lines.digest();
  return graph;
}

}  // namespace phub::examples

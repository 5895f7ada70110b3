#include "phub/plan/cluster.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <stdexcept>

#include "phub/text_file.h"
#include "transport/error.h"
#include "transport/text.h"
#include "transport/wire.h"

namespace phub {
namespace {

constexpr uint32_t kMostNics = 4096;
constexpr size_t kMostBytes = 1u << 20;

struct Rate {
  std::string_view key;
  std::optional<double> LimitInputs::*field;
};
constexpr Rate kRates[] = {
    {"link_gbps", &LimitInputs::link_gbit_s},         {"pcie_gbps", &LimitInputs::pcie_gb_s},
    {"pcie_node_gbps", &LimitInputs::pcie_node_gb_s}, {"memory_gbps", &LimitInputs::memory_gb_s},
    {"core_gbps", &LimitInputs::core_gb_s},           {"images_per_s", &LimitInputs::images_per_s}};

template <typename... Args>
[[noreturn]] void refuse(std::string_view path, const toml::node& at,
                         fmt::format_string<Args...> format, Args&&... args) {
  fail(ErrorCode::kInvalid, "{}:{}:{}: {}", path, at.source().begin.line, at.source().begin.column,
       fmt::format(format, std::forward<Args>(args)...));
}

// One [[host]] of the file.
class HostTable {
 public:
  HostTable(const toml::table& table, std::string_view path) : table_(table), path_(path) {}

  HostKind read() const {
    check_keys();
    HostKind kind{.name = text("kind")};
    const std::string role = text("role");
    if (role != "box" && role != "worker") {
      refuse(path_, need("role"), "role must be \"box\" or \"worker\", got '{}'", printable(role));
    }
    kind.box = role == "box";
    kind.count = count("count", kMaxRanks);
    read_topology(kind);
    for (const Rate& rate : kRates) kind.rates.*rate.field = number(rate.key);
    if (!kind.rates.link_gbit_s) need("link_gbps");
    if (!kind.rates.core_gb_s) kind.rates.core_gb_s = kMeasuredCoreGbS;
    if (kind.box && kind.rates.images_per_s) {
      refuse(path_, need("images_per_s"), "images_per_s is of workers, and no worker is on a box");
    }
    return kind;
  }

 private:
  void check_keys() const {
    std::vector<std::string_view> keys = {"kind", "role", "count", "topology", "nics"};
    for (const Rate& rate : kRates) keys.push_back(rate.key);
    for (const auto& [key, node] : table_) {
      if (std::ranges::count(keys, key.str()) > 0) continue;
      refuse(path_, node, "a host has no '{}'; there are {}", printable(key.str()),
             fmt::join(keys, ", "));
    }
  }
  const toml::node& need(std::string_view key) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) refuse(path_, table_, "a host needs '{}'", key);
    return *node;
  }
  std::string text(std::string_view key) const {
    const toml::node& node = need(key);
    if (!node.is_string() || node.as_string()->get().empty()) {
      refuse(path_, node, "{} must be a string that is not empty", key);
    }
    return node.as_string()->get();
  }
  uint32_t count(std::string_view key, uint32_t most) const {
    const toml::node& node = need(key);
    if (!node.is_integer() || node.as_integer()->get() < 1 || node.as_integer()->get() > most) {
      refuse(path_, node, "{} must be an integer from 1 to {}", key, most);
    }
    return static_cast<uint32_t>(node.as_integer()->get());
  }
  std::optional<double> number(std::string_view key) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) return std::nullopt;
    const std::optional<double> value = node->value<double>();
    if (!node->is_number() || !value || !(*value > 0 && std::isfinite(*value))) {
      refuse(path_, *node, "{} must be a positive number", key);
    }
    return value;
  }
  void read_topology(HostKind& kind) const {
    const std::string from = text("topology");
    try {
      kind.topology = from.ends_with(".xml") ? numa::from_xml(from) : numa::from_synthetic(from);
      numa::set_nics(kind.topology, count("nics", kMostNics));
    } catch (const Error&) {
      throw;
    } catch (const std::runtime_error& error) {
      refuse(path_, need("topology"), "{}", error.what());
    }
  }

  const toml::table& table_;
  std::string_view path_;
};

}  // namespace

Cluster parse_cluster(std::string_view text, std::string_view path) {
  toml::table file;
  try {
    file = toml::parse(text);
  } catch (const toml::parse_error& error) {
    fail(ErrorCode::kInvalid, "{}:{}:{}: {}", path, error.source().begin.line,
         error.source().begin.column, error.description());
  }
  for (const auto& [key, node] : file) {
    if (key.str() != "host") {
      refuse(path, node, "unknown '{}'; a cluster has [[host]]", printable(key.str()));
    }
  }
  const toml::array* list = file["host"].as_array();
  if (list == nullptr || list->empty() || !list->is_array_of_tables()) {
    fail(ErrorCode::kInvalid, "{}: a cluster needs a [[host]] with role = \"worker\"", path);
  }
  Cluster cluster;
  uint64_t hosts = 0;
  for (size_t i = 0; i < list->size(); i++) {
    cluster.kinds.push_back(HostTable(*list->get_as<toml::table>(i), path).read());
    const HostKind& kind = cluster.kinds.back();
    hosts += kind.count;
    if (std::ranges::count(cluster.kinds, kind.name, &HostKind::name) > 1) {
      refuse(path, *list->get(i), "there are two kinds '{}'", printable(kind.name));
    }
  }
  if (std::ranges::all_of(cluster.kinds, &HostKind::box)) {
    fail(ErrorCode::kInvalid, "{}: a cluster needs a [[host]] with role = \"worker\"", path);
  }
  if (hosts > 2 * kMaxRanks) {
    fail(ErrorCode::kInvalid, "{}: {} hosts; there can be at most {}", path, hosts, 2 * kMaxRanks);
  }
  return cluster;
}

Cluster load_cluster(const std::string& path) {
  return parse_cluster(read_file(path, kMostBytes), path);
}

}  // namespace phub

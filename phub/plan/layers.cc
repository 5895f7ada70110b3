#include "phub/plan/layers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <span>

#include "transport/error.h"

namespace phub::layers {
namespace {

// Layers whose names begin with this have outputs of side x side. The first that fits counts.
struct Outputs {
  std::string_view prefix;
  double side;
};
constexpr Outputs kAlexNet[] = {
    {"features.0", 55}, {"features.3", 27}, {"features.", 13}, {"classifier.", 1}};
constexpr Outputs kVgg16[] = {{"features.0", 224}, {"features.24", 14}, {"features.26", 14},
                              {"features.28", 14}, {"features.21", 28}, {"features.2", 224},
                              {"features.5", 112}, {"features.7", 112}, {"features.17", 28},
                              {"features.19", 28}, {"features.1", 56},  {"classifier.", 1}};
constexpr Outputs kGoogLeNet[] = {{"conv1", 112},     {"conv2", 56},      {"conv3", 56},
                                  {"inception3", 28}, {"inception4", 14}, {"inception5", 7},
                                  {"fc", 1}};

struct Known {
  std::string_view name;
  std::span<const Outputs> outputs;
};
constexpr std::array kKnown = {Known{"alexnet", kAlexNet}, Known{"vgg16", kVgg16},
                               Known{"googlenet", kGoogLeNet}};

double side_of(std::span<const Outputs> outputs, std::string_view layer) {
  const auto found = std::ranges::find_if(
      outputs, [&](const Outputs& each) { return layer.starts_with(each.prefix); });
  PHUB_CHECK(found != outputs.end());
  return found->side;
}

// "inception3a.branch1.conv.weight" and "….bn.bias" are of "inception3a.branch1".
std::string_view layer_of(std::string_view key) {
  key = key.substr(0, key.rfind('.'));
  for (const std::string_view part : {".conv", ".bn"}) {
    if (key.ends_with(part)) return key.substr(0, key.size() - part.size());
  }
  return key;
}

}  // namespace

double Net::connections() const {
  return std::accumulate(layers.begin(), layers.end(), 0.0,
                         [](double sum, const Layer& layer) { return sum + layer.connections; });
}

Net net(std::string_view name) {
  const auto known = std::ranges::find(kKnown, name, &Known::name);
  if (known == kKnown.end()) {
    fail(ErrorCode::kInvalid, "there are no layers of '{}', only of {}", name,
         fmt::join(net_names(), ", "));
  }
  Net net{.table = model(name), .layers = {}};
  for (size_t k = 0; k < net.table.keys.size(); ++k) {
    const KeySpec& key = net.table.keys[k];
    const std::string_view of = layer_of(key.name);
    if (net.layers.empty() || net.layers.back().name != of) {
      net.layers.push_back({.name = std::string(of), .keys = {}, .matrix = {}, .connections = 0});
    }
    Layer& layer = net.layers.back();
    layer.keys.push_back(k);
    if (key.shape.size() == 2) layer.matrix = k;
    if (key.shape.size() < 2) continue;
    const double side = side_of(known->outputs, of);
    layer.connections += static_cast<double>(key.elements) * side * side;
  }
  return net;
}

std::vector<std::string_view> net_names() {
  std::vector<std::string_view> names;
  for (const Known& known : kKnown) names.push_back(known.name);
  return names;
}

}  // namespace phub::layers

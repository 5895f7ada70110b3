#include "phub/plan/layers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <string>

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
constexpr Outputs kVgg11[] = {{"features.0", 224}, {"features.3", 112}, {"features.6", 56},
                              {"features.8", 56},  {"features.11", 28}, {"features.13", 28},
                              {"features.16", 14}, {"features.18", 14}, {"classifier.", 1}};
constexpr Outputs kVgg16[] = {{"features.0", 224}, {"features.24", 14}, {"features.26", 14},
                              {"features.28", 14}, {"features.21", 28}, {"features.2", 224},
                              {"features.5", 112}, {"features.7", 112}, {"features.17", 28},
                              {"features.19", 28}, {"features.1", 56},  {"classifier.", 1}};
constexpr Outputs kGoogLeNet[] = {{"conv1", 112},     {"conv2", 56},      {"conv3", 56},
                                  {"inception3", 28}, {"inception4", 14}, {"inception5", 7},
                                  {"fc", 1}};
// Images of 299 x 299.
constexpr Outputs kInceptionV3[] = {{"Conv2d_1a", 149},
                                    {"Conv2d_2", 147},
                                    {"Conv2d_3b", 73},
                                    {"Conv2d_4a", 71},
                                    {"Mixed_5", 35},
                                    {"Mixed_6a.branch3x3dbl_1", 35},
                                    {"Mixed_6a.branch3x3dbl_2", 35},
                                    {"Mixed_6", 17},
                                    {"AuxLogits.conv0", 5},
                                    {"AuxLogits", 1},
                                    {"Mixed_7a.branch3x3_1", 17},
                                    {"Mixed_7a.branch7x7x3_4", 8},
                                    {"Mixed_7a.branch7x7x3", 17},
                                    {"Mixed_7", 8},
                                    {"fc", 1}};
// With bottlenecks: the 3 x 3 of a stage's first block has the stride.
constexpr Outputs kResNet[] = {
    {"conv1", 112},         {"layer1", 56},         {"layer2.0.conv1", 56},
    {"layer2", 28},         {"layer3.0.conv1", 28}, {"layer3", 14},
    {"layer4.0.conv1", 14}, {"layer4", 7},          {"fc", 1}};

struct Known {
  std::string_view name;
  std::span<const Outputs> outputs;
};
constexpr std::array kKnown = {
    Known{"alexnet", kAlexNet},
    Known{"vgg11", kVgg11},
    Known{"vgg16", kVgg16},
    Known{"googlenet", kGoogLeNet},
    Known{"inception_v3", kInceptionV3},
    Known{"resnet50", kResNet},
    Known{"resnet101", kResNet},
    Known{"resnet269", kResNet},
    Known{"resnext101_32x8d", kResNet},
    Known{"resnext269_32x4d", kResNet},
};

double side_of(std::span<const Outputs> outputs, std::string_view layer) {
  const auto found = std::ranges::find_if(
      outputs, [&](const Outputs& each) { return layer.starts_with(each.prefix); });
  PHUB_CHECK(found != outputs.end());
  return found->side;
}

// "inception3a.branch1.conv.weight" and "….bn.bias" are of "inception3a.branch1",
// "layer1.0.bn2.bias" of "layer1.0.conv2", and "….downsample.1.bias" of "….downsample.0".
std::string layer_of(std::string_view key) {
  std::string layer(key.substr(0, key.rfind('.')));
  const size_t last = layer.rfind('.') + 1;  // 0 where there is none
  const std::string_view part = std::string_view(layer).substr(last);
  if (part == "conv" || part == "bn") return layer.substr(0, last - 1);
  if (part.starts_with("bn")) return layer.replace(last, 2, "conv");
  if (layer.ends_with("downsample.1")) layer.back() = '0';
  return layer;
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
    const std::string of = layer_of(key.name);
    if (net.layers.empty() || net.layers.back().name != of) {
      net.layers.push_back({.name = of, .keys = {}, .matrix = {}, .connections = 0});
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

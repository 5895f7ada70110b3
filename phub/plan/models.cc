#include "phub/plan/models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "phub/plan/model_networks.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

using Keys = std::vector<KeySpec>;

Keys vgg11() { return vgg({1, 1, 2, 2, 2}); }
Keys vgg16() { return vgg({2, 2, 3, 3, 3}); }
Keys vgg19() { return vgg({2, 2, 4, 4, 4}); }
Keys resnet18() { return resnet_basic({2, 2, 2, 2}); }
Keys resnet50() { return resnet_bottleneck({3, 4, 6, 3}); }
Keys resnet101() { return resnet_bottleneck({3, 4, 23, 3}); }
Keys resnet269() { return resnet_bottleneck({3, 30, 48, 8}); }
Keys resnext101_32x8d() { return resnet_bottleneck({3, 4, 23, 3}, 32, 8); }
Keys resnext269_32x4d() { return resnet_bottleneck({3, 30, 48, 8}, 32, 4); }
Keys bert_base() { return bert(12, 768); }
Keys bert_large() { return bert(24, 1024); }
Keys gpt2_small() { return gpt2(12, 768); }
Keys gpt2_xl() { return gpt2(48, 1600); }

// A new model is a function, here or in model_networks.h, and a line here.
struct Model {
  std::string_view name;
  Keys (*keys)();
};
constexpr Model kModels[] = {
    {"alexnet", alexnet},
    {"vgg11", vgg11},
    {"vgg16", vgg16},
    {"vgg19", vgg19},
    {"googlenet", googlenet},
    {"inception_v3", inception_v3},
    {"resnet18", resnet18},
    {"resnet50", resnet50},
    {"resnet101", resnet101},
    {"resnet269", resnet269},
    {"resnext101_32x8d", resnext101_32x8d},
    {"resnext269_32x4d", resnext269_32x4d},
    {"bert-base", bert_base},
    {"bert-large", bert_large},
    {"gpt2", gpt2_small},
    {"gpt2-xl", gpt2_xl},
};

}  // namespace

uint64_t total_elements(const KeyTable& table) {
  uint64_t total = 0;
  for (const KeySpec& key : table.keys) total += key.elements;
  return total;
}

std::vector<std::string_view> model_names() {
  std::vector<std::string_view> names;
  for (const Model& model : kModels) names.push_back(model.name);
  return names;
}

KeyTable model(std::string_view name) {
  for (const Model& model : kModels) {
    if (model.name == name) return {std::string(name), model.keys()};
  }
  const std::vector<std::string_view> names = model_names();
  const std::string near = nearest(name, names);
  fail(
      ErrorCode::kInvalid,
      "unknown model '{}'{}; known models: {}; for a file, give a path with '/' or ending in .json",
      printable(name), near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near),
      fmt::join(names, ", "));
}

KeyTable model_or_file(const std::string& argument) {
  const bool is_path = argument.find('/') != std::string::npos || argument.ends_with(".json");
  return is_path ? load_key_table(argument) : model(argument);
}

}  // namespace phub

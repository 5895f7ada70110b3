#include "phub/models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "phub/model_networks.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

// A new model is a function in model_networks.h and a line here.
struct Model {
  std::string_view name;
  std::vector<KeySpec> (*keys)();
};
constexpr Model kModels[] = {
    {"alexnet", alexnet},
    {"vgg11", [] { return vgg({1, 1, 2, 2, 2}); }},
    {"vgg16", [] { return vgg({2, 2, 3, 3, 3}); }},
    {"vgg19", [] { return vgg({2, 2, 4, 4, 4}); }},
    {"googlenet", googlenet},
    {"inception_v3", inception_v3},
    {"resnet18", [] { return resnet_basic({2, 2, 2, 2}); }},
    {"resnet50", [] { return resnet_bottleneck({3, 4, 6, 3}); }},
    {"resnet101", [] { return resnet_bottleneck({3, 4, 23, 3}); }},
    {"resnet269", [] { return resnet_bottleneck({3, 30, 48, 8}); }},
    {"resnext101_32x8d", [] { return resnet_bottleneck({3, 4, 23, 3}, 32, 8); }},
    {"bert-base", [] { return bert(12, 768); }},
    {"bert-large", [] { return bert(24, 1024); }},
    {"gpt2", [] { return gpt2(12, 768); }},
    {"gpt2-xl", [] { return gpt2(48, 1600); }},
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
  fail(ErrorCode::kInvalid,
       "there is no model '{}'{}; known are {}; a path with '/' or ending in .json names a file",
       printable(name), near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near),
       fmt::join(names, ", "));
}

KeyTable model_or_file(const std::string& argument) {
  const bool is_path = argument.find('/') != std::string::npos || argument.ends_with(".json");
  return is_path ? load_key_table(argument) : model(argument);
}

}  // namespace phub

#include "phub/models.h"

#include <fmt/format.h>

#include <initializer_list>
#include <span>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

// Collects the parameters of a network, layer by layer, in the order and under the names of the
// library that the model comes from (so that a real training job has the same keys).
class Builder {
 public:
  void add(std::string name, std::initializer_list<uint64_t> shape) {
    uint64_t elements = 1;
    for (uint64_t n : shape) elements *= n;
    keys_.push_back({.name = std::move(name), .elements = elements});
  }
  void conv(const std::string& name, uint64_t in, uint64_t out, uint64_t kernel, bool bias) {
    add(name + ".weight", {out, in, kernel, kernel});
    if (bias) add(name + ".bias", {out});
  }
  void linear(const std::string& name, uint64_t in, uint64_t out) {
    add(name + ".weight", {out, in});
    add(name + ".bias", {out});
  }
  // Batch and layer normalisation: a scale and a shift per channel.
  void norm(const std::string& name, uint64_t channels) {
    add(name + ".weight", {channels});
    add(name + ".bias", {channels});
  }
  void embedding(const std::string& name, uint64_t rows, uint64_t width) {
    add(name + ".weight", {rows, width});
  }
  std::vector<KeySpec> take() { return std::move(keys_); }

 private:
  std::vector<KeySpec> keys_;
};

// He et al., 2015 ("Deep Residual Learning"), with bottleneck blocks; torchvision's names.
std::vector<KeySpec> resnet(std::span<const uint32_t> blocks_per_stage) {
  constexpr uint64_t kExpansion = 4;
  Builder net;
  net.conv("conv1", 3, 64, 7, false);
  net.norm("bn1", 64);
  uint64_t in = 64;
  for (size_t stage = 0; stage < blocks_per_stage.size(); stage++) {
    const uint64_t width = 64ull << stage, out = width * kExpansion;
    for (uint32_t block = 0; block < blocks_per_stage[stage]; block++) {
      const std::string name = fmt::format("layer{}.{}.", stage + 1, block);
      net.conv(name + "conv1", in, width, 1, false);
      net.norm(name + "bn1", width);
      net.conv(name + "conv2", width, width, 3, false);
      net.norm(name + "bn2", width);
      net.conv(name + "conv3", width, out, 1, false);
      net.norm(name + "bn3", out);
      if (block == 0) {
        net.conv(name + "downsample.0", in, out, 1, false);
        net.norm(name + "downsample.1", out);
      }
      in = out;
    }
  }
  net.linear("fc", in, 1000);
  return net.take();
}

std::vector<KeySpec> resnet50() {
  constexpr uint32_t kBlocks[] = {3, 4, 6, 3};
  return resnet(kBlocks);
}

// Krizhevsky, 2014 ("One weird trick"), the variant that torchvision has.
std::vector<KeySpec> alexnet() {
  Builder net;
  net.conv("features.0", 3, 64, 11, true);
  net.conv("features.3", 64, 192, 5, true);
  net.conv("features.6", 192, 384, 3, true);
  net.conv("features.8", 384, 256, 3, true);
  net.conv("features.10", 256, 256, 3, true);
  net.linear("classifier.1", 256 * 6 * 6, 4096);
  net.linear("classifier.4", 4096, 4096);
  net.linear("classifier.6", 4096, 1000);
  return net.take();
}

// Simonyan and Zisserman, 2014, without batch normalisation; torchvision's names. A stage is that
// many 3×3 convolutions and a pooling layer; every convolution is followed by a ReLU, and all of
// them count in the names.
std::vector<KeySpec> vgg(std::span<const uint32_t> convolutions_per_stage) {
  constexpr uint64_t kWidth[] = {64, 128, 256, 512, 512};
  Builder net;
  uint64_t in = 3;
  uint32_t layer = 0;
  for (size_t stage = 0; stage < convolutions_per_stage.size(); stage++) {
    for (uint32_t i = 0; i < convolutions_per_stage[stage]; i++) {
      net.conv(fmt::format("features.{}", layer), in, kWidth[stage], 3, true);
      in = kWidth[stage];
      layer += 2;
    }
    layer += 1;
  }
  net.linear("classifier.0", in * 7 * 7, 4096);
  net.linear("classifier.3", 4096, 4096);
  net.linear("classifier.6", 4096, 1000);
  return net.take();
}

std::vector<KeySpec> vgg19() {
  constexpr uint32_t kConvolutions[] = {2, 2, 4, 4, 4};
  return vgg(kConvolutions);
}

// Devlin et al., 2018: bert-base-uncased, encoder and pooler; Hugging Face's names.
std::vector<KeySpec> bert_base() {
  constexpr uint64_t kWidth = 768, kInner = 3072, kVocabulary = 30522, kPositions = 512;
  Builder net;
  net.embedding("embeddings.word_embeddings", kVocabulary, kWidth);
  net.embedding("embeddings.position_embeddings", kPositions, kWidth);
  net.embedding("embeddings.token_type_embeddings", 2, kWidth);
  net.norm("embeddings.LayerNorm", kWidth);
  for (int layer = 0; layer < 12; layer++) {
    const std::string name = fmt::format("encoder.layer.{}.", layer);
    net.linear(name + "attention.self.query", kWidth, kWidth);
    net.linear(name + "attention.self.key", kWidth, kWidth);
    net.linear(name + "attention.self.value", kWidth, kWidth);
    net.linear(name + "attention.output.dense", kWidth, kWidth);
    net.norm(name + "attention.output.LayerNorm", kWidth);
    net.linear(name + "intermediate.dense", kWidth, kInner);
    net.linear(name + "output.dense", kInner, kWidth);
    net.norm(name + "output.LayerNorm", kWidth);
  }
  net.linear("pooler.dense", kWidth, kWidth);
  return net.take();
}

// A new model is a function above and a line here.
struct Model {
  std::string_view name;
  std::vector<KeySpec> (*keys)();
};
constexpr Model kModels[] = {
    {"resnet50", resnet50},
    {"alexnet", alexnet},
    {"vgg19", vgg19},
    {"bert-base", bert_base},
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

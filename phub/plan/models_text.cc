// Transformers, as Hugging Face has them.
#include <fmt/format.h>

#include <string>

#include "phub/plan/model_builder.h"
#include "phub/plan/model_networks.h"

namespace phub {
namespace {

constexpr uint64_t kInnerPerWidth = 4;  // of a layer's two dense ones

}  // namespace

// Devlin et al., 2018: bert-base-uncased and its larger sister.
std::vector<KeySpec> bert(uint32_t layers, uint64_t width) {
  constexpr uint64_t kVocabulary = 30522, kPositions = 512, kTokenTypes = 2;
  const uint64_t inner = kInnerPerWidth * width;
  ModelBuilder net;
  net.embedding("embeddings.word_embeddings", kVocabulary, width);
  net.embedding("embeddings.position_embeddings", kPositions, width);
  net.embedding("embeddings.token_type_embeddings", kTokenTypes, width);
  net.norm("embeddings.LayerNorm", width);
  for (uint32_t layer = 0; layer < layers; layer++) {
    const std::string name = fmt::format("encoder.layer.{}.", layer);
    net.linear(name + "attention.self.query", width, width);
    net.linear(name + "attention.self.key", width, width);
    net.linear(name + "attention.self.value", width, width);
    net.linear(name + "attention.output.dense", width, width);
    net.norm(name + "attention.output.LayerNorm", width);
    net.linear(name + "intermediate.dense", width, inner);
    net.linear(name + "output.dense", inner, width);
    net.norm(name + "output.LayerNorm", width);
  }
  net.linear("pooler.dense", width, width);
  return net.take();
}

// Radford et al., 2019.
std::vector<KeySpec> gpt2(uint32_t layers, uint64_t width) {
  constexpr uint64_t kVocabulary = 50257, kPositions = 1024;
  const uint64_t inner = kInnerPerWidth * width;
  ModelBuilder net;
  net.embedding("transformer.wte", kVocabulary, width);
  net.embedding("transformer.wpe", kPositions, width);
  for (uint32_t layer = 0; layer < layers; layer++) {
    const std::string name = fmt::format("transformer.h.{}.", layer);
    net.norm(name + "ln_1", width);
    net.linear(name + "attn.c_attn", width, 3 * width);
    net.linear(name + "attn.c_proj", width, width);
    net.norm(name + "ln_2", width);
    net.linear(name + "mlp.c_fc", width, inner);
    net.linear(name + "mlp.c_proj", inner, width);
  }
  net.norm("transformer.ln_f", width);
  return net.take();
}

}  // namespace phub

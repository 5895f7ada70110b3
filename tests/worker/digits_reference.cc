#include "tests/worker/digits_reference.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tests/kernels/reference.h"
#include "tests/worker/participation.h"
#include "transport/error.h"

namespace phub::digits {
namespace {

// Where a chunk lies when all keys lie one after another, in elements.
struct Chunk {
  size_t begin;
  size_t elements;
};

std::vector<Chunk> chunks_of(const Training& training, const std::vector<KeySpec>& keys) {
  std::vector<Chunk> chunks;
  size_t key_begin = 0;
  for (const KeySpec& key : keys) {
    for (size_t at = 0; at < key.elements; at += training.chunk_elements) {
      chunks.push_back(
          {key_begin + at, std::min<size_t>(training.chunk_elements, key.elements - at)});
    }
    key_begin += key.elements;
  }
  return chunks;
}

// What one rank computes in one round, from the parameters of the round before.
std::vector<float> gradient(Network& network, std::span<const float> parameters,
                            const Samples& batch) {
  const std::vector<size_t> offsets = key_offsets(network.keys());
  std::vector<float> all(offsets.back());
  auto key_of = [&](auto values, size_t key) {
    return values.subspan(offsets[key], offsets[key + 1] - offsets[key]);
  };
  network.start(batch.images);
  for (size_t l = 0; l < network.layers(); ++l) {
    network.forward(l, key_of(parameters, Network::weights_key(l)),
                    key_of(parameters, Network::bias_key(l)));
  }
  network.loss(batch.labels);
  for (size_t l = network.layers(); l-- > 0;) {
    network.backward(l, key_of(parameters, Network::weights_key(l)),
                     key_of(std::span(all), Network::weights_key(l)),
                     key_of(std::span(all), Network::bias_key(l)));
  }
  return all;
}

void set(reference::Hyper& hyper, const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) {
    if (name == "lr") {
      hyper.lr = value;
    } else if (name == "momentum") {
      hyper.momentum = value;
    } else if (name == "weight_decay") {
      hyper.weight_decay = value;
    } else {
      fail(ErrorCode::kInvalid, "membership log: the reference does not know '{}'", name);
    }
  }
}

}  // namespace

std::vector<float> recompute(const Training& training, const Samples& train,
                             std::span<const LogRecord> log) {
  Network network = digits::network(training);
  const std::vector<Chunk> chunks = chunks_of(training, network.keys());
  const Participation participation(log, static_cast<uint32_t>(chunks.size()));
  std::vector<float> parameters = network.initial(training.seed);
  std::vector<float> momentum(parameters.size(), 0.0f);
  reference::Hyper hyper = kernels::default_hyper(kernels::Optimizer::kNesterov);
  set(hyper, job_spec(training, "reference").hyper);

  for (uint64_t round = 1; round <= training.rounds; ++round) {
    for (const LogRecord& record : log) {
      if (record.kind == LogRecord::Kind::kHyper && record.round == round) {
        set(hyper, record.values);
      }
    }
    std::map<uint32_t, std::vector<float>> gradients;  // of the ranks that are in any chunk
    const std::vector<float> before = parameters;
    for (size_t c = 0; c < chunks.size(); ++c) {
      const Chunk& chunk = chunks[c];
      const std::vector<uint32_t> ranks = participation.ranks(round, static_cast<uint32_t>(c));
      if (ranks.empty()) {
        fail(ErrorCode::kInvalid, "membership log: nobody is in round {} of chunk {}", round, c);
      }
      std::vector<const void*> slots;
      for (const uint32_t rank : ranks) {
        if (!gradients.contains(rank)) {
          gradients[rank] =
              gradient(network, before,
                       batch(train, training.seed, rank, training.world, round, training.batch));
        }
        slots.push_back(gradients[rank].data() + chunk.begin);
      }
      std::vector<float> mean(chunk.elements);
      const auto factor = static_cast<float>(1.0 / static_cast<double>(ranks.size()));
      reference::sum(slots, kernels::DType::kF32, factor, mean.data(), chunk.elements);
      reference::step(kernels::Optimizer::kNesterov, hyper, round, mean.data(),
                      parameters.data() + chunk.begin, momentum.data() + chunk.begin, nullptr,
                      chunk.elements);
    }
  }
  return parameters;
}

std::vector<LogRecord> quiet_log(uint32_t world) {
  std::vector<LogRecord> log;
  for (uint32_t rank = 0; rank < world; ++rank) {
    log.push_back({.round = 1, .rank = rank, .incarnation = 1});
  }
  return log;
}

}  // namespace phub::digits

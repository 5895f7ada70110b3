#include "tests/worker/digits_reference.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "tests/oracle/replay.h"
#include "transport/error.h"

namespace phub::digits {
namespace {

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

}  // namespace

std::vector<float> recompute(const Training& training, const Samples& train,
                             std::span<const LogRecord> log) {
  Network network = digits::network(training);
  const JobSpec spec = job_spec(training, "reference");
  const std::vector<ChunkPlace> chunks = chunks_of(spec);
  const Participation participation(log, static_cast<uint32_t>(chunks.size()));
  const HyperHistory hyper(spec, log);
  const std::vector<size_t> offsets = key_offsets(network.keys());
  std::vector<float> parameters = network.initial(training.seed);
  std::map<uint32_t, std::vector<float>> gradients;  // of this round, by rank

  std::vector<Replay> replays;
  std::vector<std::span<float>> places;
  for (uint32_t c = 0; c < chunks.size(); ++c) {
    const size_t begin = offsets[chunks[c].key] + chunks[c].begin;
    places.push_back(std::span(parameters).subspan(begin, chunks[c].elements));
    replays.emplace_back(
        spec, participation, hyper, c, std::vector<float>(places[c].begin(), places[c].end()),
        [&, begin, c](const Member& from, uint64_t round, std::byte* out) {
          auto [at, is_new] = gradients.try_emplace(from.rank);
          if (is_new) {
            at->second = gradient(
                network, parameters,
                batch(train, training.seed, from.rank, training.world, round, training.batch));
          }
          std::memcpy(out, at->second.data() + begin, chunks[c].elements * sizeof(float));
          return true;
        });
  }
  for (uint64_t round = 1; round <= training.rounds; ++round) {
    gradients.clear();
    for (uint32_t c = 0; c < chunks.size(); ++c) {
      replays[c].next_round();
      if (!replays[c].counted().empty()) continue;
      fail(ErrorCode::kInvalid, "membership log: nobody is in round {} of chunk {}", round, c);
    }
    for (uint32_t c = 0; c < chunks.size(); ++c) {
      std::ranges::copy(replays[c].parameters(), places[c].begin());
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

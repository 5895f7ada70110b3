// Runs exchanges of a small job, and computes what they must give: gradients are functions of rank,
// round, key and element, some pushes are null, and the oracle is a single process.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/hyper.h"
#include "tests/oracle/reference.h"
#include "tests/worker/box.h"
#include "transport/control/job_spec.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/exchange.h"

namespace phub::geeps::testing {

inline float gradient_of(uint64_t seed, uint32_t rank, uint64_t round, size_t key, size_t element) {
  uint64_t x = seed + rank * 0x9e3779b97f4a7c15u + round * 0xbf58476d1ce4e5b9u +
               key * 0x94d049bb133111ebu + element * 0xd6e8feb86659fd93u;
  x ^= x >> 31;
  x *= 0x7fb5d329728ea185u;
  x ^= x >> 27;
  return (static_cast<float>(x % 20001) - 10000.0f) / 3000.0f;
}

// Of two ranks or more, some push null while others do not; of round 3 and key 1, all do.
inline bool is_null(uint32_t rank, uint64_t round, size_t key) {
  return (round == 3 && key == 1) || (rank + round + key) % 5 == 0;
}

// Odd sizes, less and more than a chunk, and local data between.
inline std::vector<TableSpec> tables() {
  return {{"one", 1, dense(1)},
          {"rows", 3, {7, 2, 11}},
          {"hidden", 16, dense(10), true},
          {"layer", 128, dense(65)},
          {"large", 33, dense(2500)}};
}

// The tables' job, with a learning rate and a weight decay of its own for some keys.
inline JobSpec spec_of(const std::string& optimizer, const std::string& reduction,
                       uint32_t world_size) {
  JobSpec spec;
  spec.name = optimizer + "-" + reduction + "-" + std::to_string(world_size);
  spec.keys = keys_of(tables());
  spec.keys[1].lr_scale = 0.5;
  spec.keys[2].decay_scale = 0;
  spec.keys[3].lr_scale = 2;
  spec.world_size = world_size;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.optimizer = optimizer;
  spec.reduction = reduction;
  if (optimizer != "none") {
    spec.hyper = {{"lr", 0.05}, {"weight_decay", 0.01}};
    spec.initial = "broadcast";
  }
  return spec;
}

inline std::vector<float> initial_of(const JobSpec& spec) {
  std::vector<float> initial;
  for (size_t key = 0; key < spec.keys.size(); ++key) {
    for (size_t i = 0; i < spec.keys[key].elements; ++i) {
      initial.push_back(gradient_of(99, 0, 0, key, i));
    }
  }
  return initial;
}

// Parameters of every key.
using Parameters = std::vector<std::vector<float>>;

inline Parameters parameters_of(const Exchange& exchange) {
  Parameters out;
  for (size_t key = 0; key < exchange.keys(); ++key) {
    const std::span<const float> parameters = exchange.parameters(key);
    out.emplace_back(parameters.begin(), parameters.end());
  }
  return out;
}

inline bool same_bits(const Parameters& a, const Parameters& b) {
  return a.size() == b.size() && std::ranges::equal(a, b, [](const auto& x, const auto& y) {
           return x.size() == y.size() &&
                  std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
         });
}

// Pushes the gradient of a rank, or null.
inline void push(Exchange& exchange, uint64_t seed, uint32_t rank, uint64_t round, size_t key,
                 int32_t priority) {
  if (is_null(rank, round, key)) return exchange.push_null(key);
  const std::span<float> gradient = exchange.gradient(key);
  for (size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = gradient_of(seed, rank, round, key, i);
  }
  exchange.push(key, priority);
}

// Every key goes round `rounds` times, each at its own pace, in an order that `random` has a part
// in.
inline void run(Exchange& exchange, uint64_t seed, uint32_t rank, uint64_t rounds,
                std::mt19937_64 random) {
  std::vector<size_t> here(exchange.keys());
  for (size_t key = 0; key < here.size(); ++key) here[key] = key;
  std::vector<uint64_t> done(exchange.keys());
  size_t away = 0;
  while (!here.empty() || away > 0) {
    while (!here.empty()) {  // what is held back, others may wait for
      std::swap(here[random() % here.size()], here.back());
      const size_t key = here.back();
      here.pop_back();
      push(exchange, seed, rank, done[key] + 1, key, static_cast<int32_t>(random() % 7) - 3);
      ++away;
    }
    const std::optional<size_t> key = exchange.next();
    ASSERT_TRUE(key.has_value());
    --away;
    if (++done.at(*key) < rounds) here.push_back(*key);
  }
}

// What every rank must see in the end. `hyper` may change hyperparameters before a round.
inline Parameters expected(
    const JobSpec& spec, uint64_t seed, uint32_t ranks, uint64_t rounds,
    const std::function<void(uint64_t round, kernels::Hyper&)>& change = {}) {
  const auto optimizer = *kernels::parse_optimizer(spec.optimizer);
  const std::vector<float> initial = initial_of(spec);
  size_t at = 0;
  Parameters out;
  for (size_t key = 0; key < spec.keys.size(); ++key) {
    const KeySpec& k = spec.keys[key];
    std::vector<float> begin(k.elements);
    if (spec.initial == "broadcast") std::copy_n(initial.data() + at, k.elements, begin.data());
    at += k.elements;
    kernels::Hyper hyper = kernels::default_hyper(optimizer);
    for (const auto& [name, value] : spec.hyper) kernels::set(hyper, name, value);
    reference::Model model(optimizer, hyper, std::move(begin));
    for (uint64_t round = 1; round <= rounds; ++round) {
      if (change) change(round, hyper);
      model.hyper = hyper;
      model.hyper.lr = reference::learning_rate(hyper, round) * k.lr_scale;
      model.hyper.weight_decay *= k.decay_scale;
      std::vector<std::vector<float>> gradients;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        if (is_null(rank, round, key)) continue;
        gradients.emplace_back(k.elements);
        for (size_t i = 0; i < k.elements; ++i) {
          gradients.back()[i] = gradient_of(seed, rank, round, key, i);
        }
      }
      std::vector<const void*> slots;
      for (const auto& gradient : gradients) slots.push_back(gradient.data());
      const double divisor = spec.reduction == "mean" ? ranks : 1;
      model.round(slots, kernels::DType::kF32,
                  static_cast<float>(1.0 / (hyper.grad_scale * divisor)));
    }
    out.push_back(std::move(model.params));
  }
  return out;
}

inline WorkerOptions options_of(const phub::testing::Box& box, const JobSpec& spec, uint32_t rank) {
  WorkerOptions options = box.options(spec);
  options.rank = static_cast<int32_t>(rank);
  return options;
}

inline uint64_t random_seed() {
  const uint64_t seed = std::random_device()();
  ::testing::Test::RecordProperty("seed", std::to_string(seed));
  return seed;
}

}  // namespace phub::geeps::testing

// PyTorch's results (golden.txt, written by make_golden.py), reproduced by the reference and by the
// kernels with every instruction set, with no bit different after any step.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <vector>

#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"
#include "tests/oracle/reference.h"

namespace phub::kernels {
namespace {

struct Config {
  uint64_t number;
  std::string name;
  Optimizer optimizer;
  Hyper hyper;
  std::vector<uint64_t> hashes;  // of the parameters' bits after each step
  std::vector<uint32_t> final_bits;
};

double& field(Hyper& h, const std::string& name) {
  const std::map<std::string, double Hyper::*> fields = {
      {"lr", &Hyper::lr},
      {"momentum", &Hyper::momentum},
      {"dampening", &Hyper::dampening},
      {"weight_decay", &Hyper::weight_decay},
      {"beta1", &Hyper::beta1},
      {"beta2", &Hyper::beta2},
      {"eps", &Hyper::eps},
      {"alpha", &Hyper::alpha},
      {"rho", &Hyper::rho},
      {"rmsprop_momentum", &Hyper::rmsprop_momentum},
      {"lr_decay", &Hyper::lr_decay},
  };
  return h.*fields.at(name);
}

std::vector<Config> read_golden() {
  std::ifstream file(PHUB_GOLDEN_FILE);
  std::vector<Config> configs;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    if (line.starts_with('#')) continue;
    if (line.starts_with("config ")) {
      Config config;
      config.number = configs.size();
      std::string optimizer;
      words >> word >> config.name >> optimizer;
      config.optimizer = parse_optimizer(optimizer).value();
      config.hyper = default_hyper(config.optimizer);
      while (words >> word) {
        const size_t equals = word.find('=');
        field(config.hyper, word.substr(0, equals)) = std::stod(word.substr(equals + 1));
      }
      configs.push_back(config);
    } else if (line.starts_with("final ")) {
      words >> word;
      while (words >> word) {
        configs.back().final_bits.push_back(static_cast<uint32_t>(std::stoul(word, nullptr, 16)));
      }
    } else {
      configs.back().hashes.push_back(std::stoull(line, nullptr, 16));
    }
  }
  return configs;
}

uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// The generator of make_golden.py. Step 0 is the initial parameters.
std::vector<float> values(uint64_t config, uint64_t step, size_t n) {
  std::vector<float> out(n);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t x = mix(mix(mix(config) ^ step) ^ i);
    const auto fraction = static_cast<int64_t>(x >> 40) - (1 << 23);
    const bool zero = ((x >> 8) & 63) == 0;
    out[i] = zero ? 0.0f : std::ldexp(static_cast<float>(fraction), -23 - static_cast<int>(x & 7));
  }
  return out;
}

uint64_t hash_of(const std::vector<float>& params) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const float param : params) {
    for (int shift = 0; shift < 32; shift += 8) {
      hash = (hash ^ ((std::bit_cast<uint32_t>(param) >> shift) & 0xFF)) * 0x100000001B3;
    }
  }
  return hash;
}

// Runs all steps of a configuration; `advance(t, gradient, params)` does one.
template <class Advance>
void expect_golden(const Config& config, Advance advance) {
  SCOPED_TRACE("configuration " + config.name);
  const size_t n = config.final_bits.size();
  std::vector<float> params = values(config.number, 0, n);
  for (uint64_t t = 1; t <= config.hashes.size(); ++t) {
    advance(t, values(config.number, t, n), params);
    ASSERT_EQ(hash_of(params), config.hashes[t - 1]) << "after step " << t;
  }
  for (size_t i = 0; i < n; ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(params[i]), config.final_bits[i]) << "element " << i;
  }
}

TEST(Golden, HoldsEveryOptimizer) {
  const std::vector<Config> configs = read_golden();
  std::map<Optimizer, size_t> seen;
  for (const Config& config : configs) {
    ++seen[config.optimizer];
    EXPECT_EQ(config.hashes.size(), 200u);
    EXPECT_EQ(config.final_bits.size(), 67u);
  }
  EXPECT_EQ(seen.size(), 9u) << "in " << PHUB_GOLDEN_FILE;
}

TEST(Golden, Reference) {
  for (const Config& config : read_golden()) {
    std::vector<float> state0(config.final_bits.size()), state1(config.final_bits.size());
    expect_golden(config, [&](uint64_t t, const std::vector<float>& g, std::vector<float>& params) {
      reference::step(config.optimizer, config.hyper, t, g.data(), params.data(), state0.data(),
                      state1.data(), g.size());
    });
  }
}

TEST(Golden, Kernels) {
  const std::vector<Config> configs = read_golden();
  test::for_each_target([&] {
    for (const Config& config : configs) {
      std::vector<float> state0(config.final_bits.size()), state1(config.final_bits.size());
      expect_golden(
          config, [&](uint64_t t, const std::vector<float>& g, std::vector<float>& params) {
            optimize(make_step(config.optimizer, config.hyper, t), g.data(), params.data(),
                     state0.data(), state1.data(), g.size(), nullptr, DType::kF32, Store::kCached);
          });
    }
  });
}

}  // namespace
}  // namespace phub::kernels

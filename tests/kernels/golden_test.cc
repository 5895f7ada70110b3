// PyTorch's results (golden.txt, written by make_golden.py), reproduced by the reference and by the
// kernels with every instruction set, with no bit different after any step: a hash is of all steps
// so far.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iomanip>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/trust.h"
#include "kernels/whole_key.h"
#include "tests/kernels/arrays.h"
#include "tests/oracle/reference.h"

namespace phub::kernels {
namespace golden_test {

constexpr size_t kValues = 67;

struct Step {
  uint64_t number;
  uint64_t hash;                   // of all parameters' bits after each step up to this one
  std::vector<std::string> first;  // the bits of the first parameters
};

struct Config {
  uint64_t number;
  std::string name;
  Optimizer optimizer;
  Hyper hyper;
  std::vector<Step> steps;
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
      {"trust_coeff", &Hyper::trust_coeff},
      {"always_adapt", &Hyper::always_adapt},
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
    } else {
      Step& step = configs.back().steps.emplace_back();
      words >> step.number >> std::hex >> step.hash;
      while (words >> word) step.first.push_back(word);
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

// Goes on from `hash`.
uint64_t add_to_hash(uint64_t hash, std::span<const float> params) {
  for (const float param : params) {
    for (int shift = 0; shift < 32; shift += 8) {
      hash = (hash ^ ((std::bit_cast<uint32_t>(param) >> shift) & 0xFF)) * 0x100000001B3;
    }
  }
  return hash;
}

std::string bits_of(std::span<const float> params) {
  std::ostringstream text;
  text << std::hex << std::setfill('0');
  for (const float param : params) {
    text << (text.tellp() > 0 ? " " : "") << std::setw(8) << std::bit_cast<uint32_t>(param);
  }
  return text.str();
}

// Runs all steps of a configuration; `advance(t, gradient, params)` does one.
template <class Advance>
void expect_golden(const Config& config, Advance advance) {
  std::vector<float> params = values(config.number, 0, kValues);
  uint64_t hash = 0xCBF29CE484222325;
  uint64_t t = 1;
  for (const Step& step : config.steps) {
    const uint64_t from = t;
    for (; t <= step.number; ++t) {
      advance(t, values(config.number, t, kValues), params);
      hash = add_to_hash(hash, params);
    }
    const std::string where =
        fmt::format("{} ({}), after step {}", config.name, name_of(config.optimizer), step.number);
    for (size_t i = 0; i < step.first.size(); ++i) {
      ASSERT_EQ(bits_of({&params[i], 1}), step.first[i]) << where << ": parameter " << i;
    }
    ASSERT_EQ(hash, step.hash) << where << ": a parameter differs after a step from " << from
                               << " on. These are the parameters here; `make_golden.py "
                               << config.name << " " << step.number << "` prints PyTorch's:\n"
                               << bits_of(params);
  }
}

TEST(Golden, HoldsEveryOptimizer) {
  const std::vector<uint64_t> want = {1, 2, 10, 50, 100, 200};
  std::map<Optimizer, size_t> seen;
  for (const Config& config : read_golden()) {
    ++seen[config.optimizer];
    std::vector<uint64_t> steps;
    for (const Step& step : config.steps) {
      steps.push_back(step.number);
      EXPECT_EQ(step.first.size(), 8u) << config.name;
    }
    EXPECT_EQ(steps, want) << config.name;
  }
  // But none, and those of whole keys, whose sums and products PyTorch rounds otherwise.
  const auto has_none = [](std::string_view name) {
    const Optimizer o = *parse_optimizer(name);
    return o == Optimizer::kNone || takes_whole_keys(o);
  };
  const auto without = std::ranges::count_if(optimizer_names(), has_none);
  EXPECT_EQ(seen.size() + static_cast<size_t>(without), optimizer_names().size())
      << "in " << PHUB_GOLDEN_FILE;
}

TEST(Golden, Reference) {
  for (const Config& config : read_golden()) {
    std::vector<float> state0(kValues), state1(kValues);
    expect_golden(config, [&](uint64_t t, const std::vector<float>& g, std::vector<float>& params) {
      reference::Norms norms =
          reference::squares(config.optimizer, config.hyper, t, g, params, state0, state1);
      norms = {std::sqrt(norms.parameters), std::sqrt(norms.update)};
      reference::step(config.optimizer, config.hyper, t, g.data(), params.data(), state0.data(),
                      state1.data(), g.size(),
                      reference::trust_ratio(config.optimizer, config.hyper, norms));
    });
  }
}

TEST(Golden, Kernels) {
  const std::vector<Config> configs = read_golden();
  test::for_each_target([&] {
    for (const Config& config : configs) {
      std::vector<float> state0(kValues), state1(kValues);
      expect_golden(
          config, [&](uint64_t t, const std::vector<float>& g, std::vector<float>& params) {
            kernels::Step step = make_step(config.optimizer, config.hyper, t);
            if (adapts(config.optimizer)) {
              std::vector<float> scratch(kValues);
              const KeyNorms squares = measure(step, g.data(), params.data(), state0.data(),
                                               state1.data(), g.size(), scratch.data());
              step.trust =
                  trust_ratio(step, {std::sqrt(squares.parameters), std::sqrt(squares.update)});
            }
            optimize(step, g.data(), params.data(), state0.data(), state1.data(), g.size(), nullptr,
                     DType::kF32, Store::kCached);
          });
    }
  });
}

}  // namespace golden_test
}  // namespace phub::kernels

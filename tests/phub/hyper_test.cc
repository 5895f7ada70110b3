// The documented hyperparameters are those of the code, with their defaults, and do something
// exactly where the documents say so.
#include "phub/core/hyper.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/hyper.h"
#include "kernels/kernels.h"
#include "kernels/trust.h"
#include "kernels/whole_key.h"
#include "phub/core/round_gate.h"

namespace phub {
namespace hyper_test {

using kernels::Hyper;
using kernels::Optimizer;

const std::vector<std::string> kOptimizers(kernels::optimizer_names().begin(),
                                           kernels::optimizer_names().end());

std::string text_of(const std::string& path) {
  std::ifstream file(std::string(PHUB_SOURCE_DIR) + "/" + path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end = text.find(separator); end != text.npos; end = text.find(separator, begin)) {
    parts.push_back(text.substr(begin, end - begin));
    begin = end + separator.size();
  }
  parts.push_back(text.substr(begin));
  return parts;
}

struct Row {
  std::map<std::string, double> defaults;  // by optimizer; "": of the others
  std::vector<std::string> used_by;
};

// The table of training.md: | `name` | default; optimizer, optimizer default | used by | … |
std::map<std::string, Row> documented() {
  const std::string text = text_of("worker/training.md");
  const std::string begin = "tests/phub/hyper_test.cc";
  std::map<std::string, Row> rows;
  for (const std::string& line : split(text.substr(text.find(begin) + begin.size()), "\n")) {
    if (line.starts_with("###")) break;
    if (!line.starts_with("| `")) continue;
    const std::vector<std::string> cells = split(line, " | ");
    Row& row = rows[cells[0].substr(3, cells[0].size() - 4)];
    for (const std::string& part : split(cells[1], "; ")) {
      std::vector<std::string> words = split(part, " ");
      const double value = std::stod(words.back());
      words.pop_back();
      if (words.empty()) row.defaults[""] = value;
      for (std::string& word : words) {
        if (word.ends_with(",")) word.pop_back();
        row.defaults[word] = value;
      }
    }
    row.used_by = split(cells[2], ", ");
    if (cells[2].starts_with("all")) row.used_by = kOptimizers;
    if (cells[2] == "all but none") row.used_by.erase(row.used_by.begin());
  }
  return rows;
}

std::vector<std::string> known_names() {
  Hyper hyper;
  const std::string error = kernels::set(hyper, "?", 1);
  return split(error.substr(error.find("known are ") + 10), ", ");
}

// Another valid value.
double other(const std::string& name) {
  if (name == "clip_threshold") return 1.5;
  if (name == "ns_steps") return 2;
  if (name == "eps2") return 8;  // more than the parameters' size
  if (name == "nesterov") return 0;
  return name.starts_with("beta") ? 0.5 : 0.25;
}

// With all schedules, so that each of their settings does something. `for_trust`: keys have trust
// ratios, but for what always_adapt does.
Hyper scheduled(Hyper hyper, bool for_trust) {
  if (for_trust) hyper.weight_decay = 0.125;
  hyper.lr_warmup = 1, hyper.lr_warmup_from = 0.5;
  hyper.lr_inverse = hyper.lr_exponential = 0.5;
  hyper.lr_polynomial = 4, hyper.lr_cosine = 6;
  return hyper;
}

// A matrix, after a step of all its elements.
void step_whole(const kernels::WholeKey& key, const Hyper& hyper, uint64_t round,
                std::vector<float> gradient, std::vector<float>& parameters,
                std::vector<float>& state) {
  const double squares = kernels::sum_of_squares(parameters.data(), parameters.size());
  std::vector<float> scratch(kernels::scratch_elements(key)), after = state;
  const kernels::KeyStep step = kernels::step_of_key(key, hyper, round, squares, state.data(),
                                                     gradient.data(), after.data(), scratch.data());
  kernels::apply_direction(step, gradient.data(), parameters.data(), parameters.size());
  state = after;
}

// Parameters and state after three rounds, from gradients that differ, one of them in its sign, and
// parameters that are not zero.
std::vector<float> train(Optimizer optimizer, Hyper hyper, std::vector<uint64_t> shape) {
  const Hyper of_job = hyper;
  std::vector<float> parameters = {0.5f, -1.25f, 3, 0.01f}, state0(4), state1(4);
  for (uint64_t round = 1; round <= 3; ++round) {
    hyper.lr = kernels::learning_rate(of_job, round);
    const float turning = round == 3 ? 0.05f : -0.7f;
    const std::vector<float> gradient = {0.3f * static_cast<float>(round), turning, 1e-9f, 2};
    const void* slot = gradient.data();
    std::vector<float> sum(4);
    kernels::sum({&slot, 1}, kernels::DType::kF32, static_cast<float>(1 / hyper.grad_scale),
                 sum.data(), 4);
    if (optimizer == Optimizer::kNone) return sum;
    if (kernels::uses(optimizer, kernels::kHyperFields[kernels::hyper_field("max_norm")])) {
      const void* clipped = sum.data();
      kernels::sum({&clipped, 1}, kernels::DType::kF32,
                   clip_factor(hyper.max_norm, std::sqrt(kernels::sum_of_squares(sum.data(), 4))),
                   sum.data(), 4);
    }
    const kernels::WholeKey key = kernels::whole_key(optimizer, hyper, shape, 4);
    if (key.rule != kernels::KeyRule::kElements) {
      step_whole(key, hyper, round, std::move(sum), parameters, state0);
      continue;
    }
    kernels::Step step = kernels::make_step(optimizer, hyper, round);
    if (kernels::adapts(optimizer)) {
      std::vector<float> scratch(4);
      const kernels::KeyNorms squares = kernels::measure(
          step, sum.data(), parameters.data(), state0.data(), state1.data(), 4, scratch.data());
      step.trust =
          kernels::trust_ratio(step, {std::sqrt(squares.parameters), std::sqrt(squares.update)});
    }
    kernels::optimize(step, sum.data(), parameters.data(), state0.data(), state1.data(), 4, nullptr,
                      kernels::DType::kF32, kernels::Store::kCached);
  }
  parameters.insert(parameters.end(), state0.begin(), state0.end());
  return parameters;
}

TEST(Hyper, TheDocumentedNamesAreThoseOfTheCode) {
  const std::map<std::string, Row> rows = documented();
  const std::string header = text_of("worker/phub.h");
  for (const std::string& name : known_names()) {
    EXPECT_TRUE(rows.contains(name)) << name << " is not in training.md";
    EXPECT_NE(header.find(" " + name), header.npos) << name << " is not in phub.h";
  }
  EXPECT_EQ(rows.size(), known_names().size());
}

TEST(Hyper, TheDocumentedDefaultsAreThoseOfTheCode) {
  for (const auto& [name, row] : documented()) {
    for (const std::string& optimizer : kOptimizers) {
      const Hyper hyper = kernels::default_hyper(*kernels::parse_optimizer(optimizer));
      const auto own = row.defaults.find(optimizer);
      Hyper expected = hyper;
      ASSERT_EQ(kernels::set(expected, name,
                             own == row.defaults.end() ? row.defaults.at("") : own->second),
                "");
      EXPECT_EQ(std::memcmp(&hyper, &expected, sizeof hyper), 0) << name << " of " << optimizer;
    }
  }
}

TEST(Hyper, EachIsUsedByTheOptimizersThatAreDocumented) {
  for (const auto& [name, row] : documented()) {
    for (const std::string& optimizer : kOptimizers) {
      const Optimizer which = *kernels::parse_optimizer(optimizer);
      Hyper before = scheduled(kernels::default_hyper(which),
                               name == "trust_coeff" || (name == "eps" && optimizer == "lars"));
      if (name == "always_adapt") before.weight_decay = 0;
      Hyper after = before;
      ASSERT_EQ(kernels::set(after, name, other(name)), "");
      const bool used = std::ranges::find(row.used_by, optimizer) != row.used_by.end();
      const kernels::HyperField& field = kernels::kHyperFields[kernels::hyper_field(name)];
      // Nobody's steps depend on slack and batch, which check_for_job() looks at by themselves.
      if (!row.used_by.empty() && row.used_by.front() != "no optimizer") {
        EXPECT_EQ(kernels::uses(which, field), used) << name << " of " << optimizer;
        const std::string refusal = kernels::unused(which, field, name, 1);
        EXPECT_EQ(refusal.empty(), used);
        for (const std::string& user : row.used_by) {
          if (used || row.used_by.size() == kOptimizers.size() - 1) continue;  // "all but none"
          EXPECT_NE(refusal.find(user), refusal.npos) << refusal;
        }
      }
      // Muon has two kinds of steps, of matrices and of other keys.
      const bool differs = train(which, before, {}) != train(which, after, {}) ||
                           train(which, before, {2, 2}) != train(which, after, {2, 2});
      EXPECT_EQ(differs, used) << name << " of " << optimizer;
    }
  }
}

// What "mean" is said to be: for three ranks not the quotient.
TEST(Hyper, AMeanIsTheSumTimesTheReciprocal) {
  const std::vector<float> a = {1}, b = {2}, c = {4};
  const std::vector<const void*> slots = {a.data(), b.data(), c.data()};
  float mean = 0;
  kernels::sum(slots, kernels::DType::kF32, static_cast<float>(1.0 / 3), &mean, 1);
  EXPECT_EQ(mean, 7.0f * static_cast<float>(1.0 / 3));
  EXPECT_NE(mean, 7.0f / 3.0f);
}

}  // namespace hyper_test
}  // namespace phub

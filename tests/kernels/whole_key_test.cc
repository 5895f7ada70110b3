// Steps of whole keys against plain loops, in every instruction set; and what they are for.
#include "kernels/whole_key.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/kernels/arrays.h"
#include "tests/oracle/whole_steps.h"

namespace phub::kernels {
namespace {

using Shape = std::vector<uint64_t>;

uint64_t elements_in(const Shape& shape) {
  uint64_t all = 1;
  for (const uint64_t side : shape) all *= side;
  return all;
}

std::vector<float> values(std::mt19937_64& random, size_t n, test::Values kind) {
  std::vector<float> all(n);
  for (float& value : all) value = test::make_value(random, kind);
  return all;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Three steps with gradients and states as they come.
void check(Optimizer optimizer, const Hyper& hyper, const Shape& shape, test::Values kind,
           std::mt19937_64& random) {
  const WholeKey key = whole_key(optimizer, hyper, shape, elements_in(shape));
  ASSERT_NE(key.rule, KeyRule::kElements);
  const size_t n = key.elements();
  ASSERT_EQ(n, elements_in(shape));
  std::vector<float> state(n), params = values(random, n, kind);
  ASSERT_EQ(state_elements(key, 0), reference::elements_with_state(optimizer, hyper, shape, n, 0));
  for (uint64_t t = 1; t <= 3; ++t) {
    const auto gradient = values(random, n, kind);
    const double squares = sum_of_squares(params.data(), n);
    const reference::WholeStep want =
        reference::whole_step(optimizer, hyper, t, shape, gradient, squares, state);
    auto moved = params;
    for (size_t i = 0; i < n; ++i) moved[i] = want.apply(params[i], i);
    test::for_each_target([&] {
      std::vector<float> direction = gradient, new_state(n), after = params;
      std::vector<float> scratch(scratch_elements(key));
      const KeyStep step = step_of_key(key, hyper, t, squares, state.data(), direction.data(),
                                       new_state.data(), scratch.data());
      std::copy(state.begin() + static_cast<ptrdiff_t>(state_elements(key, 0)), state.end(),
                new_state.begin() + static_cast<ptrdiff_t>(state_elements(key, 0)));
      apply_direction(step, direction.data(), after.data(), n);
      EXPECT_TRUE(same(new_state, want.state)) << "state";
      EXPECT_TRUE(same(after, moved)) << "parameters";
    });
    if (::testing::Test::HasFailure()) {
      FAIL() << name_of(optimizer) << ", step " << t << ", " << ::testing::PrintToString(shape)
             << ", values " << static_cast<int>(kind) << ", PHUB_SEED " << test::seed();
    }
    state = want.state;
    params = moved;
  }
}

const std::vector<Shape> kShapes = {{1, 1}, {1, 7},  {7, 1},   {2, 2},   {3, 5},
                                    {5, 3}, {17, 8}, {16, 64}, {70, 33}, {33, 300}};

TEST(WholeKey, AdafactorIsAsTheReference) {
  std::mt19937_64 random(test::seed());
  auto shapes = kShapes;
  shapes.insert(shapes.end(), {{13}, {4, 3, 2}, {2, 3, 4, 5}, {6, 1, 9}});
  for (const Shape& shape : shapes) {
    for (const test::Values kind :
         {test::Values::kOrdinary, test::Values::kFinite, test::Values::kAny}) {
      Hyper hyper = default_hyper(Optimizer::kAdafactor);
      check(Optimizer::kAdafactor, hyper, shape, kind, random);
      hyper.weight_decay = 0.1, hyper.clip_threshold = 2, hyper.eps2 = 0.5, hyper.eps = 0.25;
      hyper.beta2_power = 0.5;
      check(Optimizer::kAdafactor, hyper, shape, kind, random);
    }
  }
}

TEST(WholeKey, MuonIsAsTheReference) {
  std::mt19937_64 random(test::seed());
  for (const Shape& shape : kShapes) {
    for (const test::Values kind : {test::Values::kOrdinary, test::Values::kAny}) {
      Hyper hyper = default_hyper(Optimizer::kMuon);
      check(Optimizer::kMuon, hyper, shape, kind, random);
      hyper.nesterov = 0, hyper.match_rms = 1, hyper.ns_steps = 2, hyper.momentum = 0.25;
      check(Optimizer::kMuon, hyper, shape, kind, random);
    }
  }
}

TEST(WholeKey, EachHasItsRule) {
  Hyper hyper = default_hyper(Optimizer::kMuon);
  const auto muon = [&](const Shape& shape) {
    return whole_key(Optimizer::kMuon, hyper, shape, 24).rule;
  };
  EXPECT_EQ(muon({4, 6}), KeyRule::kOrthogonal);
  EXPECT_EQ(muon({}), KeyRule::kElements);
  EXPECT_EQ(muon({24}), KeyRule::kElements);
  EXPECT_EQ(muon({2, 3, 4}), KeyRule::kElements);
  hyper.ns_steps = 0;
  EXPECT_EQ(muon({4, 6}), KeyRule::kElements);
  EXPECT_EQ(whole_key(Optimizer::kAdam, hyper, Shape{4, 6}, 24).rule, KeyRule::kElements);
  const WholeKey matrices = whole_key(Optimizer::kAdafactor, hyper, Shape{2, 3, 4}, 24);
  EXPECT_EQ(matrices.rule, KeyRule::kFactored);
  EXPECT_EQ(state_elements(matrices, 0), 2 * (3 + 4));
  EXPECT_EQ(state_elements(whole_key(Optimizer::kAdafactor, hyper, {}, 24), 0), 24u);
}

// Singular values of about 1, by the product with the transpose, in double.
TEST(WholeKey, MuonMakesRowsOrthogonal) {
  std::mt19937_64 random(test::seed());
  std::normal_distribution<float> normal;
  for (const bool is_tall : {false, true}) {
    const size_t rows = is_tall ? 96 : 24, columns = is_tall ? 24 : 96;
    std::vector<float> matrix(rows * columns), scratch(4 * matrix.size());
    for (float& value : matrix) value = normal(random);
    orthogonalize(matrix.data(), rows, columns, 5, 1e-7, scratch.data());
    const size_t shorter = std::min(rows, columns), longer = std::max(rows, columns);
    const auto at = [&](size_t i, size_t k) {
      return double{is_tall ? matrix[k * columns + i] : matrix[i * columns + k]};
    };
    for (size_t i = 0; i < shorter; ++i) {
      for (size_t j = 0; j < shorter; ++j) {
        double sum = 0;
        for (size_t k = 0; k < longer; ++k) sum += at(i, k) * at(j, k);
        EXPECT_NEAR(sum, i == j ? 1 : 0, i == j ? 0.5 : 0.25) << i << " and " << j;
      }
    }
  }
}

}  // namespace
}  // namespace phub::kernels

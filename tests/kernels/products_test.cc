// add_products against a loop of std::fma, bit for bit: every instruction set, shape and alignment.
#include "kernels/products.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/arrays.h"

namespace phub::kernels {
namespace products_test {

using test::Array;
using test::Values;

void expect_exact(std::mt19937_64& random, Values kind, size_t samples, size_t rows,
                  size_t columns) {
  const auto floats = [&](Array& array, size_t n) {
    float* values = array.as<float>();
    for (size_t i = 0; i < n; ++i) values[i] = test::make_value(random, kind);
    return values;
  };
  const auto skew = [&] { return random() % 16 * sizeof(float); };
  Array left(samples * rows * sizeof(float), skew());
  Array right(samples * columns * sizeof(float), skew());
  const float* l = floats(left, samples * rows);
  const float* r = floats(right, samples * columns);
  std::vector<float> before(rows * columns);
  for (float& value : before) value = test::make_value(random, kind);
  std::vector<float> expected = before;
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) {
      float& at = expected[i * columns + j];
      for (size_t s = 0; s < samples; ++s) at = std::fma(l[s * rows + i], r[s * columns + j], at);
      if (std::isnan(at)) at = std::numeric_limits<float>::quiet_NaN();
    }
  }
  test::for_each_target([&] {
    Array out(rows * columns * sizeof(float), skew());
    std::ranges::copy(before, out.as<float>());
    add_products(l, r, samples, rows, columns, out.as<float>());
    for (size_t i = 0; i < expected.size(); ++i) {
      const float found = out.as<float>()[i];
      ASSERT_EQ(std::bit_cast<uint32_t>(found), std::bit_cast<uint32_t>(expected[i]))
          << samples << " samples, " << rows << " x " << columns << ", element " << i << ": "
          << found << " for " << expected[i];
    }
    ASSERT_TRUE(out.intact());
  });
  ASSERT_TRUE(left.intact() && right.intact());
}

TEST(AddProducts, IsALoopOfFma) {
  SCOPED_TRACE("PHUB_SEED=" + std::to_string(test::seed()));
  std::mt19937_64 random(test::seed());
  for (int i = 0; i < 150; ++i) {
    const Values kind = i % 3 == 0 ? Values::kFinite : Values::kOrdinary;
    ASSERT_NO_FATAL_FAILURE(
        expect_exact(random, kind, random() % 9, 1 + random() % 40, 1 + random() % 300));
  }
}

TEST(AddProducts, EveryWidthAroundATile) {
  SCOPED_TRACE("PHUB_SEED=" + std::to_string(test::seed()));
  std::mt19937_64 random(test::seed());
  for (size_t columns = 1; columns <= 70; ++columns) {
    ASSERT_NO_FATAL_FAILURE(expect_exact(random, Values::kOrdinary, 3, 9, columns));
  }
  for (size_t rows = 1; rows <= 20; ++rows) {
    ASSERT_NO_FATAL_FAILURE(expect_exact(random, Values::kOrdinary, 3, rows, 131));
  }
}

TEST(AddProducts, WhatIsNotFiniteStaysSo) {
  std::mt19937_64 random(5);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> left(2 * 11, 1), right(2 * 40, 2);
    left[11 + 3] = bad;
    right[7] = bad;
    test::for_each_target([&] {
      std::vector<float> out(size_t{11} * 40, 1);
      add_products(left.data(), right.data(), 2, 11, 40, out.data());
      for (size_t i = 0; i < out.size(); ++i) {
        const bool touched = i / 40 == 3 || i % 40 == 7;
        ASSERT_EQ(std::isfinite(out[i]), !touched) << i;
        if (!touched) {
          ASSERT_EQ(out[i], 5);
        }
      }
    });
  }
}

}  // namespace products_test
}  // namespace phub::kernels

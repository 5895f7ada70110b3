// sum_of_squares against the reference, bit for bit: every instruction set, length and alignment.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <span>

#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"
#include "tests/oracle/reference.h"

namespace phub::kernels {
namespace norm_test {

using test::Array;
using test::Values;

TEST(SumOfSquares, IsTheReferences) {
  SCOPED_TRACE("PHUB_SEED=" + std::to_string(test::seed()));
  std::mt19937_64 random(test::seed());
  for (int i = 0; i < 400; ++i) {
    const size_t n = i < 100 ? static_cast<size_t>(i) : random() % 9000;
    Array array(n * sizeof(float), random() % 16 * sizeof(float));
    const std::span<float> values(array.as<float>(), n);
    const Values kind = i % 2 == 0 ? Values::kOrdinary : Values::kFinite;
    for (float& value : values) value = test::make_value(random, kind);
    const double expected = reference::sum_of_squares(values);
    ASSERT_TRUE(std::isfinite(expected));
    test::for_each_target([&] {
      const double sum = sum_of_squares(values.data(), n);
      ASSERT_EQ(std::bit_cast<uint64_t>(sum), std::bit_cast<uint64_t>(expected))
          << n << " elements: " << sum << " for " << expected;
    });
    ASSERT_TRUE(array.intact());
  }
}

TEST(SumOfSquares, IsFiniteExactlyIfAllElementsAre) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const size_t at : {0u, 15u, 16u, 100u, 102u}) {
      std::vector<float> values(103, std::numeric_limits<float>::max());
      test::for_each_target(
          [&] { ASSERT_TRUE(std::isfinite(sum_of_squares(values.data(), values.size()))); });
      values[at] = bad;
      test::for_each_target(
          [&] { ASSERT_FALSE(std::isfinite(sum_of_squares(values.data(), values.size()))); });
    }
  }
}

}  // namespace norm_test
}  // namespace phub::kernels

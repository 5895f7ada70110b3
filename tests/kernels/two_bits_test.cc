// What codes of 2 bits are worth: which values they hold, and that what they leave gets less.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/encode.h"
#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"

namespace phub::kernels {
namespace two_bits_test {

constexpr DType kTwoBits[] = {DType::kTopKInt2, DType::kTopK10Int2, DType::kTopK100Int2,
                              DType::kTopK1000Int2};

std::vector<float> sent(DType type, const std::vector<float>& gradient, std::vector<float> residual,
                        const Rounding& rounding = {}) {
  std::vector<uint8_t> slot(slot_bytes(type, gradient.size()));
  EXPECT_TRUE(encode(gradient.data(), residual.empty() ? nullptr : residual.data(), type, rounding,
                     slot.data(), gradient.size()));
  std::vector<float> out(gradient.size());
  decode(slot.data(), type, out.data(), out.size());
  return out;
}

double squares(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += double{v} * v;
  return sum;
}

// Few elements are far larger than the others, as in gradients.
std::vector<float> heavy_tailed(size_t n, std::mt19937_64& random) {
  std::vector<float> x(n);
  std::student_t_distribution<float> of(1.5f);
  for (float& v : x) v = std::clamp(of(random), -1e6f, 1e6f);
  return x;
}

// Levels of 2 and 7: the mean of 1, 2, 2 and 3, and that of 6, 7, 7 and 8.
TEST(TwoBits, ASlotByItsBytes) {
  test::for_each_target([] {
    const std::vector<float> gradient = {1, -7, 2, 6, -2, 8, 3, -7};
    const std::vector<uint8_t> expected = {
        0, 0, 1, 0,    2,    0,   3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 0b01'00'11'00, 0b11'00'01'10,
        0, 0, 0, 0x40, 0xE0, 0x40};
    std::vector<uint8_t> slot(slot_bytes(DType::kTopKInt2, 8));
    std::vector<float> residual(8);
    ASSERT_TRUE(encode(gradient.data(), residual.data(), DType::kTopKInt2, {}, slot.data(), 8));
    EXPECT_EQ(slot, expected);
    EXPECT_EQ(residual, (std::vector<float>{-1, 0, 0, -1, 0, 1, 1, 0}));
  });
}

TEST(TwoBits, TwoMagnitudesAreSentAsTheyAre) {
  for (const bool stochastic : {false, true}) {
    std::vector<float> gradient(64);
    gradient[3] = gradient[40] = gradient[41] = 0.5f;
    gradient[7] = gradient[9] = -0.5f;
    gradient[20] = gradient[63] = 96;
    gradient[62] = -96;
    EXPECT_EQ(sent(DType::kTopK10Int2, gradient, {}, {.stochastic = stochastic}), gradient);
  }
}

// There is no code for it, but the lower level can be.
TEST(TwoBits, AZeroStaysZero) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kTwoBits) {
    for (const bool stochastic : {false, true}) {
      std::vector<float> gradient(200);
      for (int few = 0; few < 3; ++few) {
        gradient[random() % 200] = static_cast<float>(random() % 1000) + 1;
      }
      const std::vector<float> out = sent(type, gradient, {}, {.stochastic = stochastic});
      for (size_t i = 0; i < 200; ++i) {
        if (gradient[i] != 0) continue;
        ASSERT_EQ(out[i], 0) << i << ", PHUB_SEED " << test::seed();
      }
    }
  }
}

TEST(TwoBits, WhatIsLeftOfAChunkHasLessSquare) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kTwoBits) {
    for (const size_t n : {8, 100, 1000, 8192}) {
      std::vector<float> gradient = heavy_tailed(n, random);
      const double before = squares(gradient);
      std::vector<float> rest = gradient;
      const std::vector<float> out = sent(type, gradient, {});
      double chosen = 0;
      for (size_t i = 0; i < n; ++i) {
        rest[i] -= out[i];
        if (out[i] != 0) chosen += double{gradient[i]} * gradient[i];
      }
      // More than half of what was chosen has gone.
      EXPECT_LT(squares(rest), before - chosen / 2)
          << name_of(type) << ' ' << n << ", PHUB_SEED " << test::seed();
    }
  }
}

// Of the same gradient in every round all comes through, as 1 / round: the residual is bounded.
TEST(TwoBits, WhatIsSentIsTheGradientOnAverage) {
  std::mt19937_64 random(test::seed());
  constexpr size_t kElements = 512;
  const std::vector<float> gradient = heavy_tailed(kElements, random);
  std::vector<float> residual(kElements);
  std::vector<uint8_t> slot(slot_bytes(DType::kTopKInt2, kElements));
  const double largest = std::sqrt(squares(gradient));
  for (int round = 0; round < 2000; ++round) {
    ASSERT_TRUE(
        encode(gradient.data(), residual.data(), DType::kTopKInt2, {}, slot.data(), kElements));
    ASSERT_LT(std::sqrt(squares(residual)), 64 * largest)
        << "round " << round << ", PHUB_SEED " << test::seed();
  }
}

}  // namespace two_bits_test
}  // namespace phub::kernels

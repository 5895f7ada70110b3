// int32 in parts (align, add, make floats) against sum() of the slots, bit for bit; and against
// integers of another kind. Slots that an encoder wrote, and slots of any bytes.
#include "kernels/fixed_point.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/encode.h"
#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"
#include "tests/kernels/slots.h"

namespace phub::kernels {
namespace fixed_point_test {

using test::Values;

std::vector<uint8_t> random_slot(size_t n, std::mt19937_64& random) {
  std::vector<uint8_t> slot(slot_bytes(DType::kInt32, n));
  std::vector<float> gradient(n);
  const int exponent = static_cast<int>(random() % 60) - 30;
  const bool zero = random() % 8 == 0;
  for (float& x : gradient) {
    x = zero ? 0.0f : std::ldexp(test::make_value(random, Values::kOrdinary), exponent);
  }
  Rounding rounding;
  rounding.stochastic = random() % 2 == 0;
  encode(gradient.data(), nullptr, DType::kInt32, rounding, slot.data(), n);
  return slot;
}

// What workers, a switch and the box do, in pieces of any size and in any order of the slots.
std::vector<float> in_parts(const std::vector<std::vector<uint8_t>>& slots, size_t n, float factor,
                            std::mt19937_64& random, bool& finite) {
  int exponent = kExponentOfZero;
  for (const auto& slot : slots) exponent = std::max(exponent, exponent_of(slot.data(), n));
  std::vector<int32_t> sums(n);
  std::vector<size_t> order(slots.size());
  for (size_t s = 0; s < order.size(); ++s) order[s] = s;
  std::shuffle(order.begin(), order.end(), random);
  if (exponent != kExponentOfZero && exponent != kExponentOfNaN) {
    for (const size_t s : order) {
      for (size_t first = 0; first < n;) {
        std::vector<int32_t> codes(1 + random() % 300, -1);
        align(slots[s].data(), n, exponent, first, codes);
        for (size_t i = 0; i < codes.size(); ++i) {
          if (first + i < n) {
            sums[first + i] += codes[i];
          } else {
            EXPECT_EQ(codes[i], 0);
          }
        }
        first += codes.size();
      }
    }
  }
  std::vector<float> out(n);
  finite = from_fixed_point(sums, exponent, factor, out.data());
  return out;
}

TEST(FixedPoint, InPartsAndInAnyOrderIsTheSum) {
  std::mt19937_64 random(test::seed());
  SCOPED_TRACE(::testing::Message() << "PHUB_SEED " << test::seed());
  for (int run = 0; run < 300; ++run) {
    const size_t n = random() % 600, count = 1 + random() % 40;
    const float factor = run % 3 == 0 ? 1.0f : run % 3 == 1 ? 1.0f / 3 : 0x1p100f;
    std::vector<std::vector<uint8_t>> slots;
    std::vector<const void*> pointers;
    for (size_t s = 0; s < count; ++s) slots.push_back(random_slot(n, random));
    if (run % 10 == 0 && n > 0) {
      std::ranges::fill(std::span(slots[random() % count]).last(4), uint8_t{0xFF});
    }
    for (const auto& slot : slots) pointers.push_back(slot.data());
    std::vector<float> expected(n);
    const bool finite = sum(pointers, DType::kInt32, factor, expected.data(), n);
    bool parts_finite = false;
    const std::vector<float> out = in_parts(slots, n, factor, random, parts_finite);
    ASSERT_EQ(parts_finite, finite);
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected[i]))
          << "run " << run << ", element " << i;
    }
  }
}

// As many as may take part, all with the largest code, and all with the smallest that counts.
TEST(FixedPoint, TheSumOfAsManyAsMayTakePartFits) {
  for (const int32_t code : {kLargestCode, -kLargestCode, -kLargestCode - 1}) {
    std::vector<uint8_t> slot(slot_bytes(DType::kInt32, 1));
    const float scale = 1;
    std::memcpy(slot.data(), &code, 4);
    std::memcpy(slot.data() + 4, &scale, 4);
    const std::vector<const void*> slots(kMostSlots, slot.data());
    test::for_each_target([&] {
      float out = 0;
      ASSERT_TRUE(sum(slots, DType::kInt32, 1.0f, &out, 1));
      ASSERT_EQ(out, static_cast<float>(int64_t{code} * int64_t{kMostSlots}));
    });
  }
}

TEST(FixedPoint, HalvesGoUp) {
  struct Known {
    int32_t code;
    int exponent, to;
    int32_t aligned;
  };
  for (const Known& k : {Known{3, 0, 1, 2},
                         {-3, 0, 1, -1},
                         {1, 0, 1, 1},
                         {-1, 0, 1, 0},
                         {5, 4, 6, 1},
                         {6, 4, 6, 2},
                         {kLargestCode, 0, 22, 1},
                         {kLargestCode, 0, 23, 0},
                         {-kLargestCode - 1, -126, 106, 0},
                         {7, 3, 3, 7}}) {
    std::vector<uint8_t> slot(slot_bytes(DType::kInt32, 1));
    const float scale = std::ldexp(1.0f, k.exponent);
    std::memcpy(slot.data(), &k.code, 4);
    std::memcpy(slot.data() + 4, &scale, 4);
    ASSERT_EQ(exponent_of(slot.data(), 1), k.exponent);
    std::vector<int32_t> out(2, 9);
    align(slot.data(), 1, k.to, 0, out);
    EXPECT_EQ(out, (std::vector<int32_t>{k.aligned, 0})) << k.code << " from " << k.exponent;
  }
}

TEST(FixedPoint, UnitsThatAreNoneAreNaN) {
  const std::vector<int32_t> sums = {0, 1, -1};
  for (const int exponent : {-127, 107, 128, 31000, -31000, kExponentOfNaN}) {
    std::vector<float> out(3);
    EXPECT_FALSE(from_fixed_point(sums, exponent, 1.0f, out.data())) << exponent;
    for (const float v : out) EXPECT_EQ(std::bit_cast<uint32_t>(v), 0x7FC00000u);
  }
}

// A slot comes off the network.
TEST(FixedPoint, ScalesThatAreNoneAreNaN) {
  for (const float scale :
       {-1.0f, 3.0f, -0.0f, 0x1p-127f, 0x1p107f, 0x1p127f, std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<uint8_t> slot(slot_bytes(DType::kInt32, 3));
    std::memcpy(slot.data() + 12, &scale, 4);
    EXPECT_EQ(exponent_of(slot.data(), 3), kExponentOfNaN) << scale;
    test::for_each_target([&] {
      const void* const pointer = slot.data();
      float out[3] = {};
      EXPECT_FALSE(sum({&pointer, 1}, DType::kInt32, 1.0f, out, 3));
      for (const float v : out) EXPECT_EQ(std::bit_cast<uint32_t>(v), 0x7FC00000u);
      EXPECT_EQ(find_nonfinite({&pointer, 1}, DType::kInt32, 3), 0);
    });
  }
}

}  // namespace fixed_point_test
}  // namespace phub::kernels

// Slots that hold factors: their sum against a loop of std::fma, bit for bit, on every instruction
// set; and slots of any bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/slots.h"
#include "tests/kernels/arrays.h"
#include "tests/oracle/groups.h"

namespace phub::kernels {
namespace factor_slots_test {

using reference::Factors;
using test::Array;
using test::Values;

void check(std::mt19937_64& random, Values kind, bool any_bytes) {
  const size_t rows = 1 + random() % 20, columns = 1 + random() % 70, limit = 1 + random() % 5;
  const SlotShape shape{
      .elements = rows * columns, .form = SlotForm::kFactors, .columns = columns, .limit = limit};
  const Factors factors{rows, columns, limit};
  ASSERT_EQ(slot_bytes(shape), factors.floats() * sizeof(float));
  const size_t ranks = random() % 6;
  std::vector<Array> arrays;
  std::vector<const void*> slots;
  int nonfinite = -1;
  for (size_t rank = 0; rank < ranks; ++rank) {
    arrays.emplace_back(slot_bytes(shape), random() % 16 * sizeof(float));
    auto* floats = arrays.back().as<float>();
    for (size_t i = 0; i < factors.floats(); ++i) floats[i] = test::make_value(random, kind);
    factors.set_count(floats, static_cast<uint32_t>(random() % (limit + 1)));
    if (any_bytes && random() % 4 == 0) factors.set_count(floats, static_cast<uint32_t>(random()));
    slots.push_back(floats);
    if (nonfinite < 0 && !reference::is_finite(factors, floats)) nonfinite = static_cast<int>(rank);
  }
  const float factor = random() % 2 == 0 ? 1.0f : 1.0f / static_cast<float>(1 + random() % 9);
  std::vector<float> expected(shape.elements);
  const bool too_many =
      std::ranges::any_of(slots, [&](const void* slot) { return factors.count(slot) > limit; });
  bool finite = false;
  if (!too_many) {
    finite = reference::sum(reference::parse_groups("", static_cast<uint32_t>(ranks)), slots,
                            factors, factor, expected.data());
  }
  test::for_each_target([&] {
    Array out(shape.elements * sizeof(float), random() % 16 * sizeof(float));
    ASSERT_EQ(sum(slots, shape, factor, out.as<float>()), finite);
    for (size_t i = 0; i < shape.elements && !too_many; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(out.as<float>()[i]), std::bit_cast<uint32_t>(expected[i]))
          << "element " << i << " of " << rows << " x " << columns;
    }
    ASSERT_TRUE(out.intact());
    ASSERT_EQ(find_nonfinite(slots, shape), nonfinite);
  });
  for (const Array& array : arrays) ASSERT_TRUE(array.intact());
}

TEST(FactorSlots, SumsAreALoopOfFma) {
  SCOPED_TRACE("PHUB_SEED=" + std::to_string(test::seed()));
  std::mt19937_64 random(test::seed());
  for (int i = 0; i < 200; ++i) {
    ASSERT_NO_FATAL_FAILURE(check(random, Values::kOrdinary, i % 2 == 0));
  }
}

TEST(FactorSlots, WhatIsNotFiniteIsFound) {
  SCOPED_TRACE("PHUB_SEED=" + std::to_string(test::seed()));
  std::mt19937_64 random(test::seed() + 1);
  for (int i = 0; i < 200; ++i) ASSERT_NO_FATAL_FAILURE(check(random, Values::kAny, i % 4 == 0));
}

// What is not sent is not looked at.
TEST(FactorSlots, PairsBehindTheNumberAreNotRead) {
  const SlotShape shape{.elements = 6, .form = SlotForm::kFactors, .columns = 2, .limit = 3};
  const Factors factors{3, 2, 3};
  std::vector<float> slot(factors.floats(), std::numeric_limits<float>::quiet_NaN());
  const float left[] = {1, 2, 3}, right[] = {5, 7};
  store_factors(shape, left, 3, right, 0, 1, slot.data());
  EXPECT_EQ(pairs_of(slot.data(), shape).count, 1u);
  const void* const slots[] = {slot.data()};
  float out[6];
  EXPECT_TRUE(sum(slots, shape, 1, out));
  EXPECT_EQ(find_nonfinite(slots, shape), -1);
  EXPECT_EQ(std::vector<float>(out, out + 6), (std::vector<float>{5, 7, 10, 14, 15, 21}));
  store_factors(shape, left, 3, right, 1, 1, slot.data());
  EXPECT_TRUE(sum(slots, shape, 0.5f, out));
  EXPECT_EQ(out[5], 21);
  EXPECT_TRUE(sum({}, shape, 1, out));
  EXPECT_EQ(out[5], 0);
}

}  // namespace factor_slots_test
}  // namespace phub::kernels

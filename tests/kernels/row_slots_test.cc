// Slots that hold rows: their sum is, row by row, that of the slots that have it, bit for bit, on
// every instruction set; and slots of any bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/slots.h"
#include "tests/kernels/arrays.h"
#include "tests/oracle/groups.h"

namespace phub::kernels {
namespace row_slots_test {

using reference::Rows;
using test::Array;
using test::Values;

// A slot of any rows, some of them twice. Sometimes of more than there are.
void fill(std::mt19937_64& random, const Rows& rows, Values kind, bool any_bytes, void* slot) {
  const size_t most = std::min(rows.rows, rows.limit);
  const size_t count = random() % (most + 1);
  for (size_t i = 0; i < most; ++i) {
    rows.set_row(slot, i, static_cast<uint32_t>(random() % rows.rows));
    for (size_t j = 0; j < rows.columns; ++j) {
      rows.elements(slot, i)[j] = random() % 4 == 0 ? -0.0f : test::make_value(random, kind);
    }
  }
  rows.set_count(slot, static_cast<uint32_t>(count));
  if (!any_bytes) return;
  const uint64_t beyond = random() % 2 == 0 ? 0 : random() % 1000;
  if (random() % 6 == 0) rows.set_count(slot, static_cast<uint32_t>(most + 1 + beyond));
  if (random() % 6 == 0) rows.set_row(slot, 0, static_cast<uint32_t>(rows.rows + beyond));
}

// Pairs of vectors in place of rows; sometimes more than there is room for.
void fill_pairs(std::mt19937_64& random, const Rows& rows, Values kind, bool any_bytes,
                void* slot) {
  const auto count = static_cast<uint32_t>(random() % (rows.pairs + 1));
  std::vector<float> left(count * rows.rows), right(count * rows.columns);
  for (float& x : left) x = test::make_value(random, kind);
  for (float& x : right) x = test::make_value(random, kind);
  const SlotShape shape{.elements = rows.rows * rows.columns,
                        .form = SlotForm::kEither,
                        .columns = rows.columns,
                        .limit = rows.pairs};
  clear_factors(shape, count, slot);
  const size_t first = random() % (count + 1);  // in two parts
  store_factors(shape, left.data(), rows.rows, right.data(), 0, first, slot);
  store_factors(shape, left.data() + first * rows.rows, rows.rows,
                right.data() + first * rows.columns, first, count - first, slot);
  ASSERT_EQ(bytes_behind(row_count(slot), rows.rows, rows.columns),
            4 + 4 * count * (rows.rows + rows.columns));
  if (any_bytes && random() % 6 == 0) {
    rows.set_count(slot, kPairs + static_cast<uint32_t>(rows.pairs + 1 + random() % 1000));
  }
}

bool is_well_formed(const Rows& rows, const void* slot) {
  if (rows.has_pairs(slot)) return rows.factors_in(slot).pairs <= rows.pairs;
  if (rows.count(slot) > std::min(rows.rows, rows.limit)) return false;
  for (size_t i = 0; i < rows.count(slot); ++i) {
    if (rows.row(slot, i) >= rows.rows) return false;
  }
  return true;
}

void check(std::mt19937_64& random, Values kind, bool any_bytes) {
  Rows rows{1 + random() % 20, 1 + random() % 70, 1 + random() % 24};
  const bool either = random() % 2 == 0;
  if (either) rows = {rows.rows, rows.columns, rows.rows, 1 + random() % 6};
  const SlotShape shape{.elements = rows.rows * rows.columns,
                        .form = either ? SlotForm::kEither : SlotForm::kRows,
                        .columns = rows.columns,
                        .limit = either ? rows.pairs : rows.limit};
  ASSERT_EQ(slot_bytes(shape), rows.bytes());
  std::vector<Array> arrays;
  std::vector<const void*> slots;
  int nonfinite = -1;
  bool well_formed = true;
  for (size_t rank = 0, ranks = random() % 6; rank < ranks; ++rank) {
    arrays.emplace_back(slot_bytes(shape), random() % 16 * sizeof(float));
    void* const slot = arrays.back().as<float>();
    fill(random, rows, kind, any_bytes, slot);
    if (either && random() % 2 == 0) fill_pairs(random, rows, kind, any_bytes, slot);
    slots.push_back(slot);
    well_formed &= is_well_formed(rows, slot);
    if (nonfinite < 0 && !reference::is_finite(rows, slot)) nonfinite = static_cast<int>(rank);
  }
  const float factor = random() % 2 == 0 ? 1.0f : 1.0f / static_cast<float>(1 + random() % 9);
  std::vector<float> expected(shape.elements);
  bool finite = false;
  if (well_formed) {
    const auto ranks = static_cast<uint32_t>(slots.size());
    finite =
        reference::sum(reference::parse_groups("", ranks), slots, rows, factor, expected.data());
  }
  test::for_each_target([&] {
    Array out(shape.elements * sizeof(float), random() % 16 * sizeof(float));
    ASSERT_EQ(sum(slots, shape, factor, out.as<float>()), finite);
    for (size_t i = 0; i < shape.elements && well_formed; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(out.as<float>()[i]), std::bit_cast<uint32_t>(expected[i]))
          << "element " << i << " of " << rows.rows << " x " << rows.columns;
    }
    ASSERT_TRUE(out.intact());
    ASSERT_EQ(find_nonfinite(slots, shape), nonfinite);
  });
  for (const Array& array : arrays) ASSERT_TRUE(array.intact());
}

TEST(RowSlots, SumsAreThoseOfEachRow) {
  SCOPED_TRACE("PHUB_SEED=" + std::to_string(test::seed()));
  std::mt19937_64 random(test::seed());
  for (int i = 0; i < 200; ++i) {
    ASSERT_NO_FATAL_FAILURE(check(random, Values::kOrdinary, i % 2 == 0));
  }
}

TEST(RowSlots, WhatIsNotFiniteIsFound) {
  SCOPED_TRACE("PHUB_SEED=" + std::to_string(test::seed()));
  std::mt19937_64 random(test::seed() + 1);
  for (int i = 0; i < 200; ++i) ASSERT_NO_FATAL_FAILURE(check(random, Values::kAny, i % 4 == 0));
}

// A row that one slot has, and no other, keeps its zero's sign: the others have no zero of theirs.
TEST(RowSlots, WhoHasNoneOfARowAddsNothing) {
  const SlotShape shape{.elements = 6, .form = SlotForm::kRows, .columns = 2, .limit = 2};
  std::vector<float> first(slot_bytes(shape) / sizeof(float)), second(first);
  const float minus[] = {-0.0f, 3};
  clear_rows(first.data());
  clear_rows(second.data());
  append_row(shape, 2, minus, first.data());
  const void* const slots[] = {second.data(), first.data()};
  float out[6];
  EXPECT_TRUE(sum(slots, shape, 1, out));
  EXPECT_EQ(std::bit_cast<uint32_t>(out[4]), 0x80000000u);
  EXPECT_EQ(std::bit_cast<uint32_t>(out[0]), 0u);
  append_row(shape, 2, minus, second.data());
  EXPECT_TRUE(sum(slots, shape, 0.5f, out));
  EXPECT_EQ(out[5], 3);
}

// What is appended to the latest row is added to it; what is not sent is not looked at.
TEST(RowSlots, RowsAreAppended) {
  const SlotShape shape{.elements = 8, .form = SlotForm::kRows, .columns = 2, .limit = 3};
  std::vector<float> slot(slot_bytes(shape) / sizeof(float),
                          std::numeric_limits<float>::quiet_NaN());
  const float a[] = {1, 2}, b[] = {5, 7};
  clear_rows(slot.data());
  append_row(shape, 1, a, slot.data());
  append_row(shape, 1, b, slot.data());
  append_row(shape, 3, a, slot.data());
  EXPECT_EQ(row_count(slot.data()), 2u);
  const void* const slots[] = {slot.data()};
  float out[8];
  EXPECT_TRUE(sum(slots, shape, 1, out));
  EXPECT_EQ(find_nonfinite(slots, shape), -1);
  EXPECT_EQ(std::vector<float>(out, out + 8), (std::vector<float>{0, 0, 6, 9, 0, 0, 1, 2}));
  EXPECT_TRUE(sum({}, shape, 1, out));
  EXPECT_EQ(out[2], 0);
}

}  // namespace row_slots_test
}  // namespace phub::kernels
